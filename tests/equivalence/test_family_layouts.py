"""Ten families that people train today, on every layout, full and with adapters: the plain step, or a refusal in a
sentence, cell by cell. docs/models.md shows the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from equivalence.families import NAMES, build
from equivalence.family_layouts import (
    CELLS,
    FAMILIES,
    LAYOUTS,
    Cell,
    judge,
    run_layout,
    stored_column,
    stored_section,
    summarise,
)

from lockstep.backend.build import find_idle
from lockstep.model.policy import Policy

_NO_EXPERTS = r"^\w+ has no experts in stacked matrices to divide over ranks: set parallel.expert to 1$"
_WHOLE_TEXTS = r"of \w+ need all tokens of a document: set parallel.context to 1$"
_NO_TENSOR_PLAN = r"^\w+ has no plan for tensor parallelism: set parallel.tensor to 1$"
REFUSED = {
    "tensor": {"gpt_oss": _NO_TENSOR_PLAN, "lfm2": _NO_TENSOR_PLAN},
    "expert": dict.fromkeys(("lfm2", "gemma2", "gemma3", "gemma3_text"), _NO_EXPERTS),
    "pipeline": {
        "gemma3": r"^Gemma3ForConditionalGeneration has no plan for pipeline parallelism, and more parts than an "
        r"embedding, layers and a norm: set parallel.pipeline to 1$"
    },
    "context": {
        "qwen3_next": f"^Qwen3NextGatedDeltaNet {_WHOLE_TEXTS}",
        "nemotron_h": f"^NemotronHMamba2Mixer {_WHOLE_TEXTS}",
        "lfm2": f"^Lfm2ShortConv {_WHOLE_TEXTS}",
    },
}


# Of other versions than the page's, some have no plan.
_OF_THE_PAGE = f"transformers {transformers.__version__}," in stored_section()
_EXACT = "^exact$" if _OF_THE_PAGE else r"^exact$|no plan for \w+ parallelism.*: set parallel.\w+ to 1$"


def check(layout: str, cells: list[Cell], folder: Path) -> dict[Cell, str]:
    verdicts = {cell: judge(cell, found) for cell, found in run_layout(layout, cells, folder).items()}
    for (family, lora), verdict in verdicts.items():
        expected = REFUSED.get(layout, {}).get(family, _EXACT)
        assert re.search(expected, verdict), f"{family} {'with LoRA' if lora else 'in full'} on {layout}: {verdict}"
    return verdicts


def test_a_hybrid_without_a_plan_is_cut_into_stages(tmp_path: Path) -> None:
    check("pipeline", [("lfm2", True)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v2", "tensor"),  # heads share a part of their keys
        ("deepseek_v32", "pipeline"),  # layers choose their keys, and do not take packed attention
        ("inkling2_text", "tensor"),  # rows of the head that are no tokens, and a plan that splits its columns
        ("dots3_note_text", "tensor"),  # some layers have heads of their own number and size
    ],
)
def test_layers_of_uncommon_kinds_are_split(family: str, layout: str, tmp_path: Path) -> None:
    if family not in NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    check(layout, [(family, False), (family, True)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cell_is_the_plain_step_or_a_sentence(layout: str, tmp_path: Path) -> None:
    verdicts = check(layout, CELLS, tmp_path)
    if _OF_THE_PAGE:
        assert summarise(verdicts) == stored_column(layout)


def test_parts_that_compute_no_text_are_found() -> None:
    """Replicas would wait for their gradients, and leave those beside them unsent."""
    model = build("gemma3")
    idle = find_idle(Policy(model), torch.device("cpu"), None)
    names = {name for name, _ in model.named_parameters()}
    assert {name.removeprefix("model.") for name in idle} == {n for n in names if "vision" in n or "projector" in n}
    assert not find_idle(Policy(build("lfm2")), torch.device("cpu"), None)


def test_the_page_has_every_family() -> None:
    assert "WRONG" not in stored_section()
    for layout in LAYOUTS:
        refused = {family for family, said in stored_column(layout).items() if said == "refused"}
        assert refused == REFUSED.get(layout, {}).keys()
        assert list(stored_column(layout)) == list(FAMILIES)
