"""The reference of a run: which is chosen and why, and log-probs that are made once, kept, verified and attached."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.backend.fake import FakeBackend
from lockstep.config import RunConfig
from lockstep.config.reference import choose_reference
from lockstep.data.order import Batches
from lockstep.train.preference_data import AsLabelled
from lockstep.train.reference import (
    REFERENCE,
    PrecomputeSettings,
    ReferenceStore,
    add_reference,
    describe_files,
    has_all,
)
from lockstep.types import Completion, Datum


def make_config(**changes: Any) -> RunConfig:
    tree = {"model": {"path": "m"}, "data": {"train": "x"}, "algorithm": {"kind": "dpo"}, **changes}
    return RunConfig.model_validate(tree)


class Pairs(list[Datum]):
    """What compiled rows offer besides being a sequence."""

    digest = "these pairs"

    @property
    def lengths(self) -> list[int]:
        return [d.num_tokens for d in self]

    def column(self, name: str) -> Any:
        assert name == "pieces"
        return np.array([[len(d.prompt), *(len(c.tokens) for c in d.completions)] for d in self])


def make_pairs(count: int = 300) -> Pairs:
    rows = Pairs()
    for i in range(count):
        answers = [Completion(list(range(2 + (i + s) % 3)), [0.0] + [1.0] * (1 + (i + s) % 3)) for s in (0, 1)]
        rows.append(Datum([1, i], answers, f"f:{i + 1}"))
    return rows


# --- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "others", "num_seen", "expected", "why"),
    [
        ({"kind": "sft"}, {}, 100, "none", "sft has none"),
        ({"kind": "simpo"}, {}, 100, "none", "loss simpo has none"),
        ({}, {"lora": {}}, 100, "adapter_off", "without its adapters"),
        ({}, {"lora": {}}, 5, "adapter_off", "without its adapters"),
        ({"reference_sync_steps": 9}, {"lora": {}}, 100, "copy", "only a copy can follow"),
        ({}, {}, 100, "precomputed", "every row once"),
        ({}, {}, 99, "copy", "takes 99 of 100 training rows"),
        ({}, {"parallel": {"backend": "deepspeed"}}, 99, "precomputed", "every row once"),
        ({"reference": "copy"}, {"lora": {}}, 100, "copy", "as configured"),
        ({"reference": "precomputed"}, {"lora": {}}, 100, "precomputed", "as configured"),
        ({"reference_model": "other"}, {"lora": {}}, 5, "precomputed", "another model"),
        ({"kind": "kto"}, {}, 100, "copy", "loss kto puts prompts and answers together"),
        ({"kind": "kto"}, {"lora": {}}, 100, "adapter_off", "without its adapters"),
        ({"kind": "kto", "loss": "apo_zero_unpaired"}, {}, 100, "precomputed", "every row once"),
    ],
)
def test_the_cheapest_that_is_right_is_chosen_and_says_why(algorithm, others, num_seen, expected, why):
    choice = choose_reference(
        make_config(algorithm={"kind": "dpo", **algorithm}, **others), num_rows=100, num_seen=num_seen
    )
    assert choice.kind == expected
    assert why in str(choice)


# --- made once ------------------------------------------------------------------------------------------------------


class Place:
    """One process that makes log-probs ahead with a fake backend, and what it said."""

    def __init__(self, folder: Path, *, model: Any = "m", precision: str = "fp32", writes: bool = True) -> None:
        self.backend = FakeBackend()
        self.told: list[str] = []
        self.warnings: list[str] = []
        self.settings = PrecomputeSettings(
            folder, model, precision, writes, lambda answer: [answer], self.told.append, self.warnings.append
        )

    def add(self, rows: Any) -> Sequence[Datum]:
        return add_reference(rows, "train", self.backend.forward, self.settings)

    @property
    def num_computed(self) -> int:
        return sum(len(call.batch) for call in self.backend.calls_of("forward"))


def values_of(rows: Sequence[Datum]) -> list[list[list[float]]]:
    return [[list(map(float, c.values[REFERENCE])) for c in datum.completions] for datum in rows]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("bf16", np.float32), ("fp64", np.float64)])
def test_rows_come_with_the_log_probs_of_the_reference(precision, dtype, tmp_path):
    rows, place = make_pairs(), Place(tmp_path, precision=precision)
    found = place.add(rows)
    expected = FakeBackend().forward(rows)
    assert values_of(found) == [[list(map(float, np.array(c, dtype=dtype))) for c in row] for row in expected]
    assert [d.origin for d in found] == [d.origin for d in rows]
    assert [d.origin for d in found[3:5]] == ["f:4", "f:5"]
    assert found[-1].origin == "f:300"
    assert list(found.lengths) == rows.lengths  # type: ignore[attr-defined]
    assert place.told == ["reference of train: 0 of 300 rows", "reference of train: 256 of 300 rows"]
    assert len(Batches(found, make_config().batch, seed=0, shuffle=True).batch_at(0)[0]) == 16


def test_they_are_computed_once(tmp_path):
    rows = make_pairs()
    first, second = Place(tmp_path), Place(tmp_path)
    assert values_of(first.add(rows)) == values_of(second.add(rows))
    assert (first.num_computed, second.num_computed) == (300, 0)
    assert has_all(second.settings, [rows, Pairs()])


@pytest.mark.parametrize("change", ["model", "precision", "rows"])
def test_those_of_another_model_precision_or_rows_are_never_used(change, tmp_path):
    rows = make_pairs()
    Place(tmp_path).add(rows)
    settings = {"model": {"model": {"model.safetensors": "other"}}, "precision": {"precision": "bf16"}, "rows": {}}
    place = Place(tmp_path, **settings[change])
    if change == "rows":
        rows.digest = "other pairs"  # type: ignore[misc]
    assert not has_all(place.settings, [rows])
    place.add(rows)
    assert (place.num_computed, place.warnings) == (300, [])


def entry_in(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def flip_a_byte(entry: Path) -> None:
    raw = bytearray((entry / "values.bin").read_bytes())
    raw[100] ^= 1
    (entry / "values.bin").write_bytes(raw)


def cut_short(entry: Path) -> None:
    (entry / "values.bin").write_bytes((entry / "values.bin").read_bytes()[:-4])


def claim_other_model(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["identity"]["model"] = "another"
    (entry / "manifest.json").write_text(json.dumps(manifest))


def claim_fewer_rows(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["num_rows"] -= 1
    (entry / "manifest.json").write_text(json.dumps(manifest))


def lose_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_byte, "its bytes are not those that were written"),
        (cut_short, "its bytes are not those that were written"),
        (claim_other_model, "it was made from something else"),
        (claim_fewer_rows, "its rows are not these"),
        (lose_the_manifest, "No such file"),
    ],
)
def test_a_damaged_entry_is_computed_again_and_says_so(damage, words, tmp_path):
    rows = make_pairs()
    good = values_of(Place(tmp_path).add(rows))
    damage(entry_in(tmp_path))
    place = Place(tmp_path)
    assert values_of(place.add(rows)) == good
    assert place.num_computed == 300
    assert any(words in warning and "computed again" in warning for warning in place.warnings)
    assert Place(tmp_path).settings.find(rows) is not None


@pytest.mark.parametrize("dtype", ["<i4", "<f2", "O", None])
def test_values_are_read_as_what_was_asked_for_whatever_a_manifest_says(dtype, tmp_path):
    rows = make_pairs()
    good = values_of(Place(tmp_path).add(rows))
    manifest = json.loads((entry_in(tmp_path) / "manifest.json").read_text())
    (entry_in(tmp_path) / "manifest.json").write_text(json.dumps({**manifest, "dtype": dtype}))
    assert values_of(Place(tmp_path).add(rows)) == good


def test_a_killed_writer_leaves_nothing_that_is_used(tmp_path):
    rows, place = make_pairs(), Place(tmp_path)
    place.backend = FakeBackend(failures={("forward", 0): KeyboardInterrupt()})  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        place.add(rows)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "abc.making-1").mkdir()  # as a kill -9 leaves it
    assert not has_all(Place(tmp_path).settings, [rows])


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path):
    """One that holds its folder lives, however old its files look: the clock may have been set meanwhile."""
    for name, age_s in (("dead", 2 * 3600), ("alive", 5), ("held", 2 * 3600)):
        folder = tmp_path / f"{name}.making-1"
        folder.mkdir()
        (folder / "values.bin").write_bytes(b"1234")
        then = time.time() - age_s
        os.utime(folder / "values.bin", (then, then))
    lock = os.open(tmp_path / "held.making-1", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    Place(tmp_path).add(make_pairs(2))
    os.close(lock)
    assert not (tmp_path / "dead.making-1").exists()
    assert (tmp_path / "alive.making-1").exists()
    assert (tmp_path / "held.making-1").exists()


def test_all_compute_together_one_of_a_machine_writes_and_all_read(tmp_path):
    rows = make_pairs(10)
    other = Place(tmp_path, writes=False)
    with pytest.raises(ValueError, match=r"cannot be read from .*: set data.cache_dir"):
        other.add(rows)
    assert (other.num_computed, list(tmp_path.iterdir())) == (10, [])
    Place(tmp_path).add(rows)
    assert len(other.add(rows)) == 10


def test_it_is_computed_again_where_one_process_of_several_lacks_it(tmp_path):
    rows, place = make_pairs(10), Place(tmp_path)
    place.add(rows)
    answers = iter([[True, False], [True, True]])
    lacking = PrecomputeSettings(tmp_path, "m", "fp32", True, lambda _: next(answers), print, print)
    add_reference(rows, "train", place.backend.forward, lacking)
    assert place.num_computed == 20


def test_log_probs_that_are_not_finite_are_refused(tmp_path):
    store = ReferenceStore(tmp_path)
    with pytest.raises(ValueError, match="not finite"):
        store.write({"dtype": "<f4"}, make_pairs(1), [[[[float("nan")], [0.0]]]])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to .*file.* set data.cache_dir to another folder"):
        Place(tmp_path / "file" / "inside").add(make_pairs(2))


def test_the_files_of_a_model_are_told_apart_by_content_and_not_by_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "README.md").write_text(name)
    assert describe_files(tmp_path / "a") == describe_files(tmp_path / "b")
    shutil.copy(tmp_path / "a" / "README.md", tmp_path / "b" / "model.safetensors")
    assert describe_files(tmp_path / "a") != describe_files(tmp_path / "b")


# --- pairs as labels ------------------------------------------------------------------------------------------------


def test_a_pair_is_two_labelled_rows():
    pairs = make_pairs(5)
    rows = AsLabelled(pairs)
    assert len(rows) == len(list(rows)) == len(rows[:]) == 10
    for i, pair in enumerate(pairs):
        for side, label in ((0, 1.0), (1, 0.0)):
            row = rows[2 * i + side]
            assert (row.prompt, row.origin) == (pair.prompt, pair.origin)
            (answer,) = row.completions
            assert answer.tokens == pair.completions[side].tokens
            assert set(answer.values["label"]) == {label}
    assert list(rows.lengths) == [d.num_tokens for d in rows]
    assert rows.digest != pairs.digest
    with pytest.raises(IndexError):
        rows[10]
