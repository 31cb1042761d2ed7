"""What cannot be split over ranks is refused by name; how it is computed when it can is in tests/equivalence."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lockstep.parallel.tensor import split

NOBODY: Any = None  # a mesh that is not asked


def test_a_style_that_is_not_known_is_named():
    with pytest.raises(ValueError, match=r"layers\.0\.mlp is to be split as 'diagonal', which is unknown: known are"):
        split({"layers.0.mlp": (nn.Linear(4, 4), "diagonal")}, NOBODY)


def test_tokens_cannot_be_shared_where_ranks_have_columns():
    norm, queries = nn.RMSNorm(4), nn.Linear(4, 4)
    plan = {"layers.0.attn.q_norm": (norm, "sequence_parallel"), "layers.0.attn.q_proj": (queries, "colwise")}
    with pytest.raises(ValueError, match=r"q_norm is to be split as 'sequence_parallel' beside .* by columns"):
        split(plan, NOBODY)


def test_a_module_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.norm is a RMSNorm, which cannot be split over ranks"):
        split({"layers.0.norm": (nn.RMSNorm(4), "rowwise")}, NOBODY)


def test_columns_that_all_heads_share_must_be_counted():
    with pytest.raises(ValueError, match=r"attn\.kv_a does not say which of its columns all heads share"):
        split({"attn.kv_a": (nn.Linear(4, 6), "mla_kv_a_proj ")}, NOBODY)
