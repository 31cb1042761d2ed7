"""What was planned beside what was measured, for people. No torch: the service shows it too."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = (("memory", "memory_gib", "GiB", "memory_error"), ("step", "step_s", "s", "time_error"))


def beside_plan(planned: object, measured: Mapping[str, object]) -> str:
    """`planned`: as status.json has it, or anything. `measured`: memory_gib and step_s, as far as they are known."""
    if not isinstance(planned, Mapping):
        return ""
    shown = []
    for name, key, unit, error in _SHOWN:
        expected, share, found = (
            _positive(planned.get(key)),
            _positive(planned.get(error)),
            _positive(measured.get(key)),
        )
        if expected is None or share is None:
            continue
        beside = f", measured {found:.3g} ({found / expected - 1:+.1%})" if found is not None else ""
        shown.append(f"{name} planned {expected:.3g} {unit} ± {share:.0%}{beside}")
    return "; ".join(shown)


def _positive(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < float("inf") else None  # type: ignore[operator, arg-type]
