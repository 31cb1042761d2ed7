"""Images of compiled rows as columns beside the others; text-only data has none of them.

An image is kept as the path that its row gives, or as the bytes of its file where the row itself holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lockstep.data.blocks import BlockDigests, MappedFile
from lockstep.data.images import find_image
from lockstep.data.sources.rows import SourceFile
from lockstep.types import Datum, ImageRef

Column = npt.NDArray[Any]

# `image_ends` has one value per row: how many images there are up to its end. `image_names` and `image_contents` have
# bytes, whose ends are in the columns before them; the others have one value per image.
IMAGE_COLUMNS = {
    "image_ends": "<i8",
    "image_digests": "<u8",
    "image_tokens": "<i4",
    "image_is_path": "|u1",
    "image_times": "<i8",
    "image_name_ends": "<i8",
    "image_names": "|u1",
    "image_content_ends": "<i8",
    "image_contents": "|u1",
}
_DIGESTED = ("image_ends", "image_digests", "image_tokens")


def pack_images(data: Sequence[Datum]) -> dict[str, Column]:
    """The images of some rows, all counted from their beginning; nothing where there are none."""
    images = [image for datum in data for image in datum.images]
    if not images:
        return {}
    names = [image.name.encode("utf-8", errors="surrogateescape") for image in images]
    contents = [b"" if isinstance(image.content, str) else image.content for image in images]
    columns: dict[str, object] = {
        "image_ends": np.cumsum([len(datum.images) for datum in data]),
        "image_digests": [image.digest for image in images],
        "image_tokens": [image.num_tokens for image in images],
        "image_times": [image.modified_ns for image in images],
        "image_is_path": [isinstance(image.content, str) for image in images],
        "image_name_ends": np.cumsum([len(name) for name in names]),
        "image_names": np.frombuffer(b"".join(names), dtype=np.uint8),
        "image_content_ends": np.cumsum([len(content) for content in contents]),
        "image_contents": np.frombuffer(b"".join(contents), dtype=np.uint8),
    }
    return {name: np.asarray(columns[name], dtype=dtype) for name, dtype in IMAGE_COLUMNS.items()}


class ImageWriter:
    """Writes the images of blocks, from the first block that has some."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._digests = {name: hashlib.sha256() for name in _DIGESTED}
        self._blocks = {name: BlockDigests() for name in IMAGE_COLUMNS}
        self.num_images = 0
        self._name_bytes = self._content_bytes = 0

    def append(self, block: Mapping[str, Column], num_rows: int, rows_before: int) -> None:
        """`block` has the images of `num_rows` rows, or nothing."""
        if "image_ends" not in block:
            if self._files:
                self._write("image_ends", np.full(num_rows, self.num_images))
            return
        if not self._files:
            self._files = {name: (self._folder / f"{name}.bin").open("wb") for name in IMAGE_COLUMNS}
            self._write("image_ends", np.zeros(rows_before))
        starts = {
            "image_ends": self.num_images,
            "image_name_ends": self._name_bytes,
            "image_content_ends": self._content_bytes,
        }
        for name in IMAGE_COLUMNS:
            self._write(name, block[name] + starts[name] if name in starts else block[name])
        self.num_images += len(block["image_digests"])
        self._name_bytes += len(block["image_names"])
        self._content_bytes += len(block["image_contents"])

    def _write(self, name: str, values: Column) -> None:
        raw = np.ascontiguousarray(values, dtype=IMAGE_COLUMNS[name]).tobytes()
        self._files[name].write(raw)
        self._blocks[name].update(raw)
        if name in self._digests:
            self._digests[name].update(raw)

    def finish(self) -> dict[str, str]:
        """Digests of blocks by file. Whoever has the files flushes and closes them."""
        return {f"{name}.bin": self._blocks[name].finish() for name in self._files}

    def digest(self) -> bytes:
        """Of what is trained on; nothing without images."""
        return b"".join(digest.digest() for digest in self._digests.values()) if self._files else b""

    @property
    def files(self) -> Sequence[IO[bytes]]:
        return list(self._files.values())


class ImageColumns:
    """The mapped columns of a folder."""

    def __init__(self, folder: Path, blocks: Mapping[str, str], image_folder: str | None) -> None:
        self._image_folder = image_folder
        self._mapped = {
            name: MappedFile(folder / f"{name}.bin", dtype, blocks[f"{name}.bin"])
            for name, dtype in IMAGE_COLUMNS.items()
        }

    def images_of(self, row: int, file: SourceFile, origin: str) -> tuple[ImageRef, ...]:
        first, stop = self._bounds("image_ends", row)
        return tuple(self._image(number, file, origin) for number in range(first, stop))

    def _image(self, number: int, file: SourceFile, origin: str) -> ImageRef:
        name = self._bytes("image_name_ends", "image_names", number).decode("utf-8", errors="surrogateescape")
        content: str | bytes = self._bytes("image_content_ends", "image_contents", number)
        if self._value("image_is_path", number):
            content = str(find_image(name, file, self._image_folder, f"{origin}: image"))
        digest, tokens, time = (self._value(f"image_{key}", number) for key in ("digests", "tokens", "times"))
        return ImageRef(content, digest, tokens, name, time)

    def _bytes(self, ends: str, values: str, number: int) -> bytes:
        return self._mapped[values].part(*self._bounds(ends, number)).tobytes()

    def _bounds(self, ends: str, number: int) -> tuple[int, int]:
        around = self._mapped[ends].part(max(number - 1, 0), number + 1)
        return (0 if number == 0 else int(around[0])), int(around[-1])

    def _value(self, column: str, number: int) -> int:
        return int(self._mapped[column].part(number, number + 1)[0])
