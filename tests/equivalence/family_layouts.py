"""Families that people train today on every layout, full and with adapters, beside the plain loop over documents.

A cell is the step of the plain model to 1e-10 in float64, or a refusal in a sentence. test_family_layouts.py says
which; `PYTHONPATH=tests python -m equivalence.family_layouts` writes the table in docs/models.md.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from equivalence.families import build, in_float64
from equivalence.layouts import everywhere, spawn, whole
from equivalence.plain import make_batch, plain_loss, scale_of

from lockstep.backend.torch_backend import TorchBackend, join_group
from lockstep.config import LoraConfig, ParallelConfig
from lockstep.model.lora import add_lora
from lockstep.types import LossSpec, OptimStep

FAMILIES = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
    "gemma2",
    "gemma3",
    "gemma3_text",
)
LAYOUTS = {
    "one": (1, ParallelConfig()),
    "ddp": (2, ParallelConfig(replicate=2, shard=1)),
    "fsdp2": (2, ParallelConfig(shard=2)),
    "tensor": (2, ParallelConfig(shard=1, tensor=2)),
    "expert": (2, ParallelConfig(shard=2, expert=2)),
    "pipeline": (2, ParallelConfig(shard=1, pipeline=2)),
    "context": (2, ParallelConfig(shard=1, context=2)),
}
Cell = tuple[str, bool]  # family, LoRA
CELLS: list[Cell] = [(family, lora) for family in FAMILIES for lora in (False, True)]
STEP = OptimStep(0.01, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
TOLERANCE = 1e-10
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLES = {"one": "one rank", "ddp": "DDP", "fsdp2": "FSDP2"}
_SECTION = re.compile(r"## On every layout\n.*?(?=\n## |\Z)", re.DOTALL)


def build_cell(cell: Cell) -> Any:
    family, lora = cell
    model = build(family)
    if not lora:
        return model
    model = add_lora(model, LoraConfig(rank=2, alpha=4))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the gradient of lora_A
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    return model.double().eval()


@functools.cache
def plain_step(cell: Cell) -> dict[str, Any]:
    """One document at a time through the model's own forward, and torch's AdamW."""
    with in_float64():
        model, batch = build_cell(cell), make_batch()
        model.train()  # no dropout, but some models compute in another way
        loss = plain_loss(model, batch, scale_of(batch))
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        used = {n: p for n, p in trained.items() if p.grad is not None}
        gradients = {n: p.grad.clone() for n, p in used.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(list(used.values()), STEP.max_grad_norm)
        groups = [
            {"params": [p for p in used.values() if p.ndim >= 2], "weight_decay": STEP.weight_decay},
            {"params": [p for p in used.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, lr=STEP.learning_rate, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps).step()
    weights = {n: p.detach() for n, p in trained.items()}
    return {"loss": loss.item(), "gradients": gradients, "norm": norm.item(), "weights": weights}


def compute_cells(cells: Sequence[Cell], layout: str, out: Path) -> None:
    """The body of each process: the steps, or why not, of all cells of one layout."""
    torch.set_num_threads(1)
    parallel = LAYOUTS[layout][1]
    group = join_group("cpu", parallel, timeout_s=60)
    found: dict[Cell, Any] = {}
    for cell in cells:
        try:
            found[cell] = _compute_step(cell, group, parallel)
        except ValueError as error:
            found[cell] = " ".join(str(error).split())
        except Exception as error:
            raise AssertionError(f"{cell} on {layout}") from error
        if len({isinstance(other, str) for other in group.gather_objects(found[cell])}) > 1:
            raise AssertionError(f"{cell} on {layout}: some ranks refuse what others compute")
    if group.rank == 0:
        torch.save(found, out)
    group.leave()


def _compute_step(cell: Cell, group: Any, parallel: ParallelConfig) -> dict[str, Any]:
    batch = make_batch()
    with in_float64():
        backend = TorchBackend(
            build_cell(cell), micro_batch_tokens=96, precision="fp64", parallel=parallel, group=group
        )
        loss = backend.forward_backward(batch, LossSpec(scale=scale_of(batch))).loss
        held = {n: p.grad for n, p in backend.parameters().items() if p.grad is not None}
        gradients = everywhere({n: whole(gradient) for n, gradient in held.items()}, group)
        norm = backend.optim_step(STEP).grad_norm
        weights = everywhere({n: whole(p.detach()) for n, p in backend.parameters().items()}, group)
        backend.policy.stop_packing()
    return {"loss": loss, "gradients": gradients, "norm": norm, "weights": weights}


def run_layout(layout: str, cells: Sequence[Cell], folder: Path) -> dict[Cell, Any]:
    out = folder / f"{layout}.pt"
    spawn(LAYOUTS[layout][0], compute_cells, cells, layout, out)
    found: dict[Cell, Any] = torch.load(out, weights_only=False)
    return found


def judge(cell: Cell, found: Any) -> str:
    """`exact`, the sentence of the refusal, or what is wrong."""
    if isinstance(found, str):
        return found
    expected = plain_step(cell)
    problems = [
        f"{key} {found[key]!r} instead of {expected[key]!r}"
        for key in ("loss", "norm")
        if abs(found[key] - expected[key]) > TOLERANCE * abs(expected[key])
    ]
    for kind in ("gradients", "weights"):
        ours, theirs = found[kind], expected[kind]
        # Some layouts hold a zero for what no token reaches.
        strangers = [n for n, t in ours.items() if n not in theirs and t.any()]
        problems += [f"{kind} of other parameters: {n}" for n in [*(theirs.keys() - ours.keys()), *strangers]]
        for name in theirs.keys() & ours.keys():
            difference = float((ours[name] - theirs[name]).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(theirs[name].abs().max())):
                problems.append(f"{kind} of {name} differ by {difference:.1e}")
    return "exact" if not problems else f"WRONG: {'; '.join(sorted(problems)[:4])}"


def summarise(verdicts: Mapping[Cell, str]) -> dict[str, str]:
    """Of one layout, a word for each family: `exact` or `refused`; two where full and LoRA differ."""
    words = {cell: "exact" if verdict == "exact" else "refused" for cell, verdict in verdicts.items()}
    return {
        family: words[family, False]
        if words[family, False] == words[family, True]
        else f"full {words[family, False]}, LoRA {words[family, True]}"
        for family in dict.fromkeys(family for family, _ in verdicts)
    }


def stored_section() -> str:
    found = _SECTION.search(PAGE.read_text(encoding="utf-8"))
    return found[0] if found else ""


def stored_column(layout: str) -> dict[str, str]:
    """What the page says about one layout, without the numbers of notes."""
    lines = [line.strip("| ").split(" | ") for line in stored_section().splitlines() if line.startswith("| ")]
    place = lines[0].index(TITLES.get(layout, layout))
    return {line[0]: re.sub(r" \[\d+\]", "", line[place]) for line in lines[2:]}


_INTRODUCTION = """## On every layout

Ten families as tiny models with transformers {version}, full and with LoRA, on two real processes: `exact` is loss,
gradients, their norm and the weights after a step of AdamW within 1e-10 of a plain loop over single documents, in
float64. What is refused says so before the first step, in the sentence below. Several axes together, router losses and
quantised experts are tested for fewer families.

"""


def render(found: Mapping[str, Mapping[Cell, str]]) -> str:
    """The section of the page. `found`: verdicts by layout."""
    notes: list[str] = []
    rows = [["family", *(TITLES.get(layout, layout) for layout in found)], ["---"] * (1 + len(found))]
    for family in FAMILIES:
        row = [family]
        for verdicts in found.values():
            said = {verdicts[family, lora] for lora in (False, True)} - {"exact"}
            notes += sorted(said - set(notes))
            marks = "".join(f" [{notes.index(note) + 1}]" for note in sorted(said))
            row.append(summarise(verdicts)[family] + marks)
        rows.append(row)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return f"{_INTRODUCTION.format(version=transformers.__version__)}{table}\n\n{listed}\n"


def write_page() -> None:
    with tempfile.TemporaryDirectory() as name:
        every = {layout: run_layout(layout, CELLS, Path(name)) for layout in LAYOUTS}
    section = render({layout: {c: judge(c, f) for c, f in found.items()} for layout, found in every.items()})
    page = PAGE.read_text(encoding="utf-8")
    if stored_section():
        page = _SECTION.sub(lambda _: section, page)
    else:
        page = page.replace("\n## Every family\n", f"\n{section}\n## Every family\n")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    from equivalence import family_layouts

    family_layouts.write_page()  # processes find what they run by its name
