"""Every family of causal language models: trained right or refused in a sentence, as docs/models.md says."""

from __future__ import annotations

import pytest
import transformers
from equivalence.families import NAMES
from equivalence.family_table import PAGE, WRONG, measure, stored_rows

# A cross-section: plain, windows, caps, sinks, chunks, states, convolutions, ALiBi, positions and heads of their own.
QUICK = ("gemma2", "gpt_oss", "llama4_text", "lfm2", "mamba2", "bloom", "roberta", "phimoe")


def test_the_page_is_of_these_families() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in page:
        pytest.skip("the page is of another version of transformers")
    assert sorted(set(stored_rows()) - {"family"}) == NAMES
    assert WRONG not in page


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_a_family_is_as_its_row_says(name: str) -> None:
    row = str(measure(name))
    assert WRONG not in row
    if f"transformers {transformers.__version__} " in PAGE.read_text(encoding="utf-8"):
        assert row == stored_rows()[name]
