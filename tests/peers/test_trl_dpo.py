"""The same rows and weights through TRL's trainers and through ours: the same loss, gradients and metrics.

TRL computes log-probs in float32, which bounds how well they agree. Differences by design, each shown below: TRL's
sigmoid ignores label smoothing; its ORPO learns the prompt too; its WPO fails with sft and hinge; statistics of a
batch (of aot, sft, the KL of KTO) are those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from lockstep.backend.torch_backend import TorchBackend
from lockstep.parallel.group import ProcessGroup
from lockstep.types import Completion, Datum, LossSpec

datasets = pytest.importorskip("datasets", reason="needs the extra 'peers'")
trl = pytest.importorskip("trl", reason="needs the extra 'peers'")
pytestmark = pytest.mark.peers

# Sums of its log-probs, about -100, are right to 1e-5. Losses are flat there, slopes of discopop are not.
TOLERANCE = 1e-5
OF_GRADIENTS = 1e-4
PAIRS = [
    {"prompt": "What is red?", "chosen": "A colour.", "rejected": "A number, I think, or a kind of fish."},
    {"prompt": "Say hello to the whole class", "chosen": "Hello, dear class!", "rejected": "no"},
    {"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"},
    {"prompt": "A fruit?", "chosen": "apple", "rejected": "stone"},
    {"prompt": "A metal?", "chosen": "iron", "rejected": "rain"},
    {"prompt": "Where do trout live?", "chosen": "In rivers", "rejected": "In trees; they climb them in spring"},
    {"prompt": "How long is a day?", "chosen": "From one midnight to the next: 24 hours", "rejected": "Long"},
    {"prompt": "Name a bird that swims", "chosen": "The penguin swims very well", "rejected": "Sparrows swim well"},
]
ANSWERS = [
    {"prompt": "What is red?", "completion": "A colour.", "label": True},
    {"prompt": "Say hello to the whole class", "completion": "no", "label": False},
    {"prompt": "2 + 2 =", "completion": "4", "label": True},
    {"prompt": "Name a bird that swims", "completion": "Sparrows swim well", "label": False},
    {"prompt": "Name a fish", "completion": "The trout", "label": True},
]


@dataclass(frozen=True)
class Step:
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def reference_model() -> nn.Module:
    return tiny.build_model(seed=1).double()


def policy_model() -> nn.Module:
    """Some way from the reference."""
    model = reference_model()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def arguments(kind: Any, folder: Path, **settings: Any) -> Any:
    plain = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False, "disable_tqdm": True}
    return kind(output_dir=str(folder), per_device_train_batch_size=len(PAIRS), **plain, **settings)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def make_trainer(kind: Any, args: Any, rows: list[dict[str, Any]], **models: Any) -> Any:
    return kind(
        args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tiny.build_tokenizer(), **models
    )


def collate(trainer: Any) -> Any:
    return trainer.data_collator(list(trainer.train_dataset))


def finish(model: nn.Module, loss: Tensor, metrics: dict[str, float]) -> Step:
    model.zero_grad()
    loss.backward()
    return Step(loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}, metrics)


def last_metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def dpo_of_trl(folder: Path, **settings: Any) -> tuple[Step, list[dict[str, Any]]]:
    """(its step, its tokens)."""
    model = policy_model()
    args = arguments(trl.DPOConfig, folder, **settings)
    trainer = make_trainer(trl.DPOTrainer, args, PAIRS, model=model, ref_model=reference_model())
    loss = trainer.compute_loss(model, collate(trainer))
    return finish(model, loss, last_metrics(trainer)), list(trainer.train_dataset)


def step_of_lockstep(
    batch: list[Datum], kind: str, options: dict[str, Any], policy: nn.Module, reference: nn.Module
) -> Step:
    """Of the policy, beside a frozen copy of the reference."""
    model = reference
    backend = TorchBackend(
        model, micro_batch_tokens=150, precision="fp64", reference="copy", group=ProcessGroup(0, 1, torch.device("cpu"))
    )
    model.load_state_dict(policy.state_dict())
    found = backend.forward_backward(batch, LossSpec(kind, 1 / len(batch), options))
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in backend.parameters().items()}
    return Step(found.loss, gradients, found.metrics)


def in_pairs(rows: list[dict[str, Any]], ld_alpha: float = 1.0) -> list[Datum]:
    """Tokens past the shared length count `ld_alpha`."""
    batch = []
    for row in rows:
        shared = min(len(row["chosen_ids"]), len(row["rejected_ids"]))
        completions = [
            Completion(tokens, [1.0 if place < shared else ld_alpha for place in range(len(tokens))])
            for tokens in (row["chosen_ids"], row["rejected_ids"])
        ]
        batch.append(Datum(row["prompt_ids"], completions))
    return batch


def pairs_of_lockstep(rows: list[dict[str, Any]], options: dict[str, Any], ld_alpha: float = 1.0) -> Step:
    num_chosen_tokens = sum(len(row["chosen_ids"]) for row in rows)
    options = {**options, "num_chosen_tokens": num_chosen_tokens}
    return step_of_lockstep(in_pairs(rows, ld_alpha), "preference", options, policy_model(), reference_model())


def assert_same(ours: Step, theirs: Step) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE, abs=TOLERANCE)
    assert_same_gradients(ours.gradients, theirs.gradients)


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    size = max(gradient.abs().max().item() for gradient in theirs.values())
    assert size > 1e-4
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max().item() <= OF_GRADIENTS * size, name


OF_TRL = [
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
SMOOTHING = {"exo_pair": 0.001, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1}
SCORED = ["sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm"]


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", OF_TRL)
def test_every_loss_of_dpo(name, beta, tmp_path):
    smoothing = SMOOTHING.get(name, 0.0)
    theirs, rows = dpo_of_trl(tmp_path, loss_type=[name], beta=beta, label_smoothing=smoothing)
    ours = pairs_of_lockstep(rows, {"losses": {name: 1.0}, "beta": beta, "label_smoothing": smoothing})
    assert_same(ours, theirs)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
@pytest.mark.parametrize("name", SCORED)
def test_divergences(name, divergence, tmp_path):
    smoothing = SMOOTHING.get(name, 0.0)
    theirs, rows = dpo_of_trl(
        tmp_path,
        loss_type=[name],
        f_divergence_type=divergence if divergence == "forward_kl" else f"{divergence}_divergence",
        f_alpha_divergence_coef=0.7,
        label_smoothing=smoothing,
    )
    options = {"divergence": divergence, "divergence_alpha": 0.7, "label_smoothing": smoothing}
    assert_same(pairs_of_lockstep(rows, {"losses": {name: 1.0}, **options}), theirs)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "sppo_hard", "aot", "sigmoid_norm", "sft"])
def test_length_desensitisation(name, tmp_path):
    theirs, rows = dpo_of_trl(tmp_path, loss_type=[name], ld_alpha=0.3)
    assert_same(pairs_of_lockstep(rows, {"losses": {name: 1.0}}, ld_alpha=0.3), theirs)


@pytest.mark.parametrize("name", [name for name in OF_TRL if name not in ("aot", "aot_unpaired", "sft", "hinge")])
def test_wpo(name, tmp_path):
    smoothing = SMOOTHING.get(name, 0.0)
    theirs, rows = dpo_of_trl(tmp_path, loss_type=[name], use_weighting=True, label_smoothing=smoothing)
    ours = pairs_of_lockstep(rows, {"losses": {name: 1.0}, "wpo": True, "label_smoothing": smoothing})
    assert_same(ours, theirs)


def test_several_losses_with_weights_and_their_metrics(tmp_path):
    losses = {"sigmoid": 0.8, "bco_pair": 0.5, "sft": 0.2, "aot": 1.5}
    theirs, rows = dpo_of_trl(tmp_path, loss_type=list(losses), loss_weights=list(losses.values()))
    ours = pairs_of_lockstep(rows, {"losses": losses})
    assert_same(ours, theirs)
    names = {
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "margin": "rewards/margins",
        "accuracy": "rewards/accuracies",
        "chosen_logprob": "logps/chosen",
        "rejected_logprob": "logps/rejected",
    }
    for mine, their in names.items():
        assert ours.metrics[mine] / len(rows) == pytest.approx(theirs.metrics[their], rel=1e-4, abs=1e-5), mine


def rows_of(trainer: Any) -> list[dict[str, Any]]:
    """Its tokens, in the form of the DPO trainer."""
    rows = []
    for row in trainer.train_dataset:
        start = len(row["prompt_input_ids"])
        answers = {f"{side}_ids": row[f"{side}_input_ids"][start:] for side in ("chosen", "rejected")}
        rows.append({"prompt_ids": row["prompt_input_ids"], **answers})
    return rows


CPO_CASES = [
    ({"loss_type": "sigmoid"}, {"losses": {"cpo": 1.0}}),
    ({"loss_type": "sigmoid", "cpo_alpha": 0.3}, {"losses": {"cpo": 1.0}, "cpo_alpha": 0.3}),
    ({"loss_type": "sigmoid", "label_smoothing": 0.1}, {"losses": {"cpo": 1.0}, "label_smoothing": 0.1}),
    ({"loss_type": "simpo", "cpo_alpha": 0.0}, {"losses": {"simpo": 1.0}}),
    (
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.5, "label_smoothing": 0.2},
        {"losses": {"simpo": 1.0}, "beta": 2.0, "margin": 1.5, "label_smoothing": 0.2},
    ),
    ({"loss_type": "simpo", "cpo_alpha": 0.4}, {"losses": {"simpo": 1.0, "sft": 0.4}}),
]


@pytest.mark.parametrize(("settings", "options"), CPO_CASES, ids=[str(settings) for settings, _ in CPO_CASES])
def test_cpo_and_simpo(settings, options, tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model = policy_model()
    trainer = make_trainer(CPOTrainer, arguments(CPOConfig, tmp_path, **settings), PAIRS, model=model)
    loss, metrics = trainer.get_batch_loss_metrics(model, collate(trainer))
    ours = pairs_of_lockstep(rows_of(trainer), options)
    assert_same(ours, finish(model, loss, metrics))
    for mine, their in {"chosen_reward": "rewards/chosen", "accuracy": "rewards/accuracies"}.items():
        assert ours.metrics[mine] / len(PAIRS) == pytest.approx(metrics[their], rel=TOLERANCE), mine


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo_but_for_what_it_learns_of_the_prompt(beta, tmp_path):
    """Its cross-entropy is over prompt and answer, ours over the answer: what is left of both must be the same."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = policy_model()
    trainer = make_trainer(ORPOTrainer, arguments(ORPOConfig, tmp_path, beta=beta), PAIRS, model=model)
    batch, rows = collate(trainer), rows_of(trainer)
    whole, metrics = trainer.get_batch_loss_metrics(model, batch)
    chosen, rejected = trainer.concatenated_forward(model, batch)[:2]
    theirs = finish(model, -trainer.odds_ratio_loss(chosen, rejected)[0].mean(), metrics)
    assert theirs.loss == pytest.approx(whole.item() - metrics["nll_loss"], rel=1e-4)

    orpo = pairs_of_lockstep(rows, {"losses": {"orpo": 1.0}, "beta": beta})
    sft = pairs_of_lockstep(rows, {"losses": {"sft": 1.0}})
    assert orpo.loss - sft.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    assert_same_gradients({name: g - sft.gradients[name] for name, g in orpo.gradients.items()}, theirs.gradients)
    assert orpo.metrics["chosen_reward"] / len(rows) == pytest.approx(metrics["rewards/chosen"], rel=TOLERANCE)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto(loss, tmp_path):
    weights = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    model, reference = reference_model(), policy_model()  # this way round the KL is not cut off at zero
    args = arguments(trl.KTOConfig, tmp_path, loss_type=loss, **weights)
    trainer = make_trainer(trl.KTOTrainer, args, ANSWERS, model=model, ref_model=reference)
    theirs = finish(model, trainer.compute_loss(model, collate(trainer)), last_metrics(trainer))
    assert (theirs.metrics["kl"] > 0.01) == (loss == "kto")

    batch = []
    for row in trainer.train_dataset:
        size = len(row["completion_ids"])
        label = {"label": [float(row["label"])] * size}
        batch.append(Datum(row["prompt_ids"], [Completion(row["completion_ids"], [1.0] * size, label)]))
    options = {"loss": loss, "kl": theirs.metrics["kl"], **weights}
    ours = step_of_lockstep(batch, "kto", options, reference_model(), policy_model())
    assert_same(ours, theirs)
    for side in ("chosen", "rejected"):
        mean = ours.metrics[f"{side}_reward"] / ours.metrics[f"num_{side}"]
        assert mean == pytest.approx(theirs.metrics[f"rewards/{side}"], rel=1e-4), side


def test_by_design_sigmoid_smooths_labels(tmp_path):
    theirs, rows = dpo_of_trl(tmp_path, loss_type=["sigmoid"], label_smoothing=0.2)
    assert_same(pairs_of_lockstep(rows, {"losses": {"sigmoid": 1.0}}), theirs)
    smoothed = pairs_of_lockstep(rows, {"losses": {"sigmoid": 1.0}, "label_smoothing": 0.2})
    assert abs(smoothed.loss - theirs.loss) > 1e-3


@pytest.mark.parametrize(("name", "words"), [("sft", "single memory location"), ("hinge", "inplace operation")])
def test_by_design_wpo_goes_with_every_loss_of_a_pair(name, words, tmp_path):
    with pytest.raises(RuntimeError, match=words):
        dpo_of_trl(tmp_path, loss_type=["sigmoid", name], use_weighting=True)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_by_design_the_batch_is_the_global_one(name, tmp_path):
    """TRL sorts each micro-batch alone: the mean over micro-batches of one pair is another loss."""
    theirs, rows = dpo_of_trl(tmp_path, loss_type=[name], beta=1.0)
    alone = [pairs_of_lockstep([row], {"losses": {name: 1.0}, "beta": 1.0}).loss for row in rows]
    assert abs(sum(alone) / len(alone) - theirs.loss) > 1e-3
