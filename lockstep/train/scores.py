"""What losses of preferences say of a batch: sums over its rows become means. Every other number stays as it is.

Must not know how the numbers were computed.
"""

from __future__ import annotations

from lockstep.types import Metrics

_SUMS_OVER_PAIRS = ("chosen_reward", "rejected_reward", "margin", "accuracy", "chosen_logprob", "rejected_logprob")


def mean_scores(sums: Metrics, num_rows: int) -> Metrics:
    """What losses of preferences give as sums over rows, as means; everything else as it is."""
    if "num_chosen" in sums:
        return _mean_over_labels(sums, num_rows)
    is_sum = {name: name in _SUMS_OVER_PAIRS or name.startswith("loss_") for name in sums}
    return {name: value / num_rows if is_sum[name] else value for name, value in sums.items()}


def _mean_over_labels(sums: Metrics, num_rows: int) -> Metrics:
    """Each side over its own rows; a side that a batch does not have is left out."""
    found = {
        name: value for name, value in sums.items() if name not in (*_SUMS_OVER_PAIRS, "num_chosen", "num_rejected")
    }
    found["kl"] = sums["kl"] / num_rows
    for side in ("chosen", "rejected"):
        count = sums[f"num_{side}"]
        for what in ("reward", "logprob"):
            if count:
                found[f"{side}_{what}"] = sums[f"{side}_{what}"] / count
    if "chosen_reward" in found and "rejected_reward" in found:
        found["margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found
