"""Compiled rows as columns on disk, mapped into memory; views select and repeat rows without copying them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast, overload

import numpy as np
import numpy.typing as npt

from lockstep.data.blocks import BlockDigests, DamagedCache, MappedFile
from lockstep.data.encoder import make_datum
from lockstep.data.image_columns import IMAGE_COLUMNS, ImageColumns, ImageWriter, pack_images
from lockstep.data.images import has_changed
from lockstep.data.sources.rows import SourceFile
from lockstep.types import Completion, Datum, ImageRef

Indices = npt.NDArray[np.int64]
Column = npt.NDArray[Any]
Block = Mapping[str, Column]

# Little-endian, so that machines that share a folder read the same numbers. `tokens` and `learned` have one value
# per token, `pieces` the lengths of a row's prompt and completions, the others one value per row.
COLUMNS = {
    "tokens": "<i4",
    "learned": "|u1",
    "pieces": "<i4",
    "labels": "|i1",  # 1 or 0; -1 where a row has none
    "files": "<i4",
    "numbers": "<i8",  # of the line or row in its file
    "rows_in_line": "<i8",  # where a line holds several rows; -1 where it does not
    "prompt_keys": "<u8",
    "row_keys": "<u8",
    "starts": "<i8",  # where a row's tokens begin; filled in by the writer
}
_DIGESTED = ("tokens", "learned", "pieces", "labels")
_NO_LABEL = _NO_ROW = -1


def pack_block(
    data: Sequence[Datum],
    numbers: Sequence[int],
    rows_in_line: Sequence[int | None],
    prompt_keys: Sequence[int],
    row_keys: Sequence[int],
) -> dict[str, Column]:
    """Data as the columns of one block; all must have the same number of completions."""
    tokens: list[Column] = []
    learned: list[Column] = []
    for datum in data:
        tokens.append(np.asarray(datum.prompt))
        learned.append(np.zeros(len(datum.prompt), dtype=np.uint8))
        for completion in datum.completions:
            tokens.append(np.asarray(completion.tokens))
            learned.append(_as_learned(completion, datum.origin))
    pieces = [[len(datum.prompt), *(len(c.tokens) for c in datum.completions)] for datum in data]
    block = {
        "tokens": np.concatenate(tokens) if tokens else [],
        "learned": np.concatenate(learned) if learned else [],
        "pieces": pieces,
        "labels": [_label_of(datum) for datum in data],
        "numbers": numbers,
        "rows_in_line": [_NO_ROW if row is None else row for row in rows_in_line],
        "prompt_keys": prompt_keys,
        "row_keys": row_keys,
    }
    packed = {name: np.asarray(column, dtype=COLUMNS[name]) for name, column in block.items()}
    return {**packed, **pack_images(data)}


def _as_learned(completion: Completion, origin: str) -> Column:
    weights = np.asarray(completion.weights)
    learned = (weights != 0).astype(np.uint8)
    assert np.array_equal(learned, weights), f"{origin}: weights must be 0 or 1"
    return learned


def _label_of(datum: Datum) -> int:
    labels = [completion.values["label"] for completion in datum.completions if "label" in completion.values]
    return int(labels[0][0]) if labels else _NO_LABEL


class Writer:
    """Appends blocks to the columns of a folder. Its memory does not grow with the number of rows."""

    def __init__(self, folder: Path) -> None:
        self.num_rows = 0
        self.num_tokens = 0
        self._width: int | None = None
        self._columns: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in _DIGESTED}
        self._blocks = {name: BlockDigests() for name in COLUMNS}
        for name in COLUMNS:
            self._columns[name] = (folder / f"{name}.bin").open("wb")
        self._images = ImageWriter(folder)

    def append(self, block: Block, file: int) -> None:
        """`file` is the number of the file these rows are from."""
        pieces = block["pieces"]
        if len(pieces) == 0:
            return
        self._width = self._width or pieces.shape[1]
        assert pieces.shape[1] == self._width, "every row of a split has the same number of completions"
        sizes = pieces.sum(axis=1, dtype=np.int64)
        starts = self.num_tokens + np.cumsum(sizes) - sizes
        per_token = int(sizes.sum())
        for name, column in block.items():
            if name in IMAGE_COLUMNS:
                continue
            expected = per_token if name in ("tokens", "learned") else len(pieces)
            assert len(column) == expected, f"{name} has {len(column)} values for {expected}"
        own = {"files": np.full(len(pieces), file), "starts": starts}
        for name, dtype in COLUMNS.items():
            raw = np.ascontiguousarray(own[name] if name in own else block[name], dtype=dtype).tobytes()
            self._columns[name].write(raw)
            self._blocks[name].update(raw)
            if name in self._digests:
                self._digests[name].update(raw)
        self._images.append(block, len(pieces), self.num_rows)
        self.num_rows += len(pieces)
        self.num_tokens += per_token

    def finish(self) -> dict[str, Any]:
        """Flush to disk; returns this writer's entries of the manifest."""
        for file in self._files():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        blocks = {f"{name}.bin": digests.finish() for name, digests in self._blocks.items()}
        return {
            "num_rows": self.num_rows,
            "width": self._width or 2,
            "digest": self._digest(),
            "blocks": {**blocks, **self._images.finish()},
            "num_images": self._images.num_images,
        }

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[IO[bytes]]:
        return [*self._columns.values(), *self._images.files]

    def _digest(self) -> str:
        """Of what is trained on. Column by column, so that it does not depend on the sizes of blocks."""
        whole = hashlib.sha256(f"{self.num_rows} {self._width};".encode())
        for name in _DIGESTED:
            whole.update(self._digests[name].digest())
        whole.update(self._images.digest())
        return whole.hexdigest()


class Columns:
    """The mapped columns of one folder, as its manifest describes them. What is read has been verified: columns with a
    value per token block by block, the others whole. Pickled as the folder's name: another process maps it again.

    `discard` is called once damage is found.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        files: Sequence[SourceFile],
        discard: Callable[[], None] | None = None,
        image_folder: str | None = None,
    ) -> None:
        self.folder = folder
        self.num_images: int = manifest.get("num_images", 0)
        self._image_folder = image_folder
        self.num_rows: int = manifest["num_rows"]
        self.width: int = manifest["width"]
        self.digest: str = manifest["digest"]
        self.files = tuple(files)
        self._blocks: Mapping[str, str] = manifest["blocks"]
        self._discard = discard

    def __reduce__(self) -> tuple[object, ...]:
        kept = {"num_rows": self.num_rows, "width": self.width, "digest": self.digest, "blocks": dict(self._blocks)}
        kept["num_images"] = self.num_images
        return Columns, (self.folder, kept, self.files, self._discard, self._image_folder)

    def __getitem__(self, name: str) -> Column:
        """A column with a value per row, whole."""
        if name not in self._whole:
            column = self.part(name, 0, self.num_rows * (self.width if name == "pieces" else 1))
            self._whole[name] = column.reshape(-1, self.width) if name == "pieces" else column
        return self._whole[name]

    def part(self, name: str, start: int, stop: int) -> Column:
        """Of a column with a value per token."""
        with self._discarding():
            return self._mapped[name].part(start, stop)

    def images(self, row: int) -> tuple[ImageRef, ...]:
        if not self.num_images:
            return ()
        with self._discarding():
            return self._mapped_images.images_of(row, self.files[int(self["files"][row])], self.origin(row))

    def check_images(self) -> None:
        """Raises DamagedCache where a file was written again since its row was compiled."""
        with self._discarding():
            for row in range(self.num_rows if self.num_images else 0):
                for image in self.images(row):
                    if has_changed(image):
                        raise DamagedCache(f"{self.origin(row)}: image {image.name} has changed since it was compiled")

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except DamagedCache:
            if self._discard is not None:
                self._discard()
            raise

    def origin(self, row: int) -> str:
        number, in_line = int(self["numbers"][row]), int(self["rows_in_line"][row])
        return self.files[int(self["files"][row])].origin(number, None if in_line == _NO_ROW else in_line)

    @cached_property
    def _mapped(self) -> dict[str, MappedFile]:
        return {
            name: MappedFile(self.folder / f"{name}.bin", dtype, self._blocks[f"{name}.bin"])
            for name, dtype in COLUMNS.items()
        }

    @cached_property
    def _mapped_images(self) -> ImageColumns:
        return ImageColumns(self.folder, self._blocks, self._image_folder)

    @cached_property
    def _whole(self) -> dict[str, Column]:
        return {}


class Rows(Sequence[Datum]):
    """A sequence of data: all rows of the columns, or those in `index`, as often as they are there."""

    def __init__(self, columns: Columns, index: Indices | None = None) -> None:
        self._columns = columns
        self._index = index

    def __len__(self) -> int:
        return self._columns.num_rows if self._index is None else len(self._index)

    @overload
    def __getitem__(self, i: int) -> Datum: ...
    @overload
    def __getitem__(self, i: slice) -> Rows: ...
    def __getitem__(self, i: int | slice) -> Datum | Rows:
        if isinstance(i, slice):
            return self.select(np.arange(*i.indices(len(self)), dtype=np.int64))
        i = int(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self._datum(self._row(i % len(self)))

    def __iter__(self) -> Iterator[Datum]:
        return (self._datum(self._row(i)) for i in range(len(self)))

    def select(self, rows: Indices) -> Rows:
        """A view of these rows of this view."""
        rows = np.asarray(rows, dtype=np.int64)
        return Rows(self._columns, rows if self._index is None else self._index[rows])

    def column(self, name: str) -> Column:
        """One value per row of this view, or per piece. Any column but those with a value per token."""
        assert name not in ("tokens", "learned")
        column = self._columns[name]
        return column if self._index is None else column[self._index]

    @property
    def lengths(self) -> Indices:
        """`num_tokens` of each datum."""
        pieces = self.column("pieces").astype(np.int64)
        prompts, num_completions = pieces[:, 0], pieces.shape[1] - 1
        return cast(Indices, prompts * num_completions + pieces[:, 1:].sum(axis=1))

    @property
    def has_images(self) -> bool:
        """Whether any row of the files has some, also one that is not of this view."""
        return self._columns.num_images > 0

    @property
    def digest(self) -> str:
        """Of tokens, learned masks, labels and their order; not of where the rows came from."""
        if self._index is None:
            return self._columns.digest
        if len(self._index) == 0:
            return hashlib.sha256(b"no rows").hexdigest()
        view = hashlib.sha256(f"view of {self._columns.digest};".encode())
        view.update(np.ascontiguousarray(self._index, dtype="<i8").tobytes())
        return view.hexdigest()

    def origin(self, i: int) -> str:
        return self._columns.origin(self._row(i))

    def _row(self, i: int) -> int:
        """The number of the view's row `i` in the columns."""
        return i if self._index is None else int(self._index[i])

    def _datum(self, row: int) -> Datum:
        columns = self._columns
        start, label = int(columns["starts"][row]), int(columns["labels"][row])
        edges = (np.cumsum(columns["pieces"][row], dtype=np.int64)).tolist()
        tokens, learned = (columns.part(name, start, start + edges[-1]) for name in ("tokens", "learned"))
        answers = ((tokens[a:b], learned[a:b].astype(np.float32)) for a, b in pairwise(edges))
        label_or_none = None if label == _NO_LABEL else label
        return make_datum(tokens[: edges[0]], answers, label_or_none, columns.origin(row), columns.images(row))
