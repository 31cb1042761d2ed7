"""Images of rows: found and read, checked, and their tokens put into the text. Pillow is needed only here."""

from __future__ import annotations

import io
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lockstep.data.formats.image_parts import ImageSource
from lockstep.data.rendering import Rendered, Span, Variant
from lockstep.data.sources.rows import DataError, SourceFile
from lockstep.types import ImageProcessor, ImageRef, PreparedImage

# Formats that Pillow reads by itself. Others start programs (EPS) or have no use here.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF")
_MAX_BYTES = 64 * 2**20
_MAX_PIXELS = 2**27  # a small file can unpack to any size
_FETCH_TIMEOUT_S = 30.0


class ChangedImage(DataError):
    """A file is no longer what it was when its row was compiled."""


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows as they are compiled. `folder` is data.image_folder, `fetches` data.image_urls."""

    processor: ImageProcessor
    folder: str | None = None
    fetches: bool = False

    def add(self, row: Rendered, sources: Sequence[ImageSource], file: SourceFile) -> Rendered:
        """The row with its images, and their placeholders in its text."""
        return self.prepare(row, sources, file)[0]

    def prepare(
        self, row: Rendered, sources: Sequence[ImageSource], file: SourceFile
    ) -> tuple[Rendered, list[PreparedImage]]:
        """Also the images as the model takes them."""
        (variant,) = row.variants
        images, prepared = list[ImageRef](), list[PreparedImage]()
        for number, source in enumerate(sources, start=1):
            image, content = self._read(source, file, f"{row.origin}: image {number}")
            prepared.append(prepare_image(self.processor, content, f"{row.origin}: image {image.name or number}"))
            images.append(image)
        expanded = _expand(row, variant, [image.text for image in prepared], self.processor.placeholder)
        return replace(row, variants=(expanded,), images=tuple(images)), prepared

    def _read(self, source: ImageSource, file: SourceFile, where: str) -> tuple[ImageRef, bytes]:
        if source.content:
            return _refer(source.content, source.content, os.path.basename(source.place)), source.content
        if "://" in source.place:
            content = self._fetch(source.place, where)
            return _refer(content, content, source.place), content
        path = find_image(source.place, file, self.folder, where)
        content = _read_file(path, where)
        return replace(_refer(source.place, content, source.place), modified_ns=_modified_ns(path)), content

    def _fetch(self, address: str, where: str) -> bytes:
        if not self.fetches:
            raise DataError(
                f"{where}: {address[:120]} is an address, and images are not fetched: download it, or set "
                "data.image_urls to true"
            )
        if not address.startswith(("http://", "https://")):
            raise DataError(f"{where}: {address[:120]}: only http and https addresses are fetched")
        try:
            with urllib.request.urlopen(address, timeout=_FETCH_TIMEOUT_S) as answer:
                content: bytes = answer.read(_MAX_BYTES + 1)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise DataError(f"{where}: {address[:120]} could not be fetched ({error})") from error
        return _bounded(content, where)


def find_image(place: str, file: SourceFile, folder: str | None, where: str) -> Path:
    """The file that a row of `file` names. None outside of the folder of images: rows may be of somebody else."""
    root = os.path.abspath(os.path.expanduser(folder) if folder is not None else file.path.parent)
    path = os.path.normpath(os.path.join(root, place))
    if path != root and not path.startswith(root.rstrip(os.sep) + os.sep):
        raise DataError(f"{where}: {place} is outside of {root}: set data.image_folder to a folder that holds it")
    return Path(path)


def _read_file(path: Path, where: str) -> bytes:
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            raise DataError(f"{where}: {path} {what}: put the image there, remove the row, or set data.image_folder")
        with path.open("rb") as stream:
            return _bounded(stream.read(_MAX_BYTES + 1), where)
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: {path} cannot be read: {error}") from error


def _modified_ns(path: str | Path) -> int:
    """-1 where it cannot be told."""
    try:
        return os.stat(path).st_mtime_ns
    except (OSError, ValueError):
        return -1


def has_changed(image: ImageRef) -> bool:
    """Whether the file was written again since its row was compiled."""
    return isinstance(image.content, str) and _modified_ns(image.content) != image.modified_ns


def _bounded(content: bytes, where: str) -> bytes:
    if len(content) > _MAX_BYTES:
        raise DataError(f"{where}: larger than {_MAX_BYTES // 2**20} MiB: make it smaller")
    return content


def _refer(held: str | bytes, content: bytes, name: str) -> ImageRef:
    return ImageRef(held, _digest(content), 0, name)


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def read_image_bytes(image: ImageRef, origin: str) -> bytes:
    """The file's bytes, which must be those that the row was compiled with."""
    if isinstance(image.content, bytes):
        return image.content
    content = _read_file(Path(image.content), f"{origin}: image {image.name}")
    if _digest(content) != image.digest:
        raise ChangedImage(
            f"{origin}: image {image.content} is not what it was when the rows were compiled: put it back; or start "
            "again, and the rows are compiled anew"
        )
    return content


def prepare_image(processor: ImageProcessor, content: bytes, where: str) -> PreparedImage:
    """As the model takes it."""
    image = decode_image(content, where)
    try:
        return processor.prepare(image)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        width, height = image.size
        raise DataError(f"{where} ({width} x {height}): the model's processor does not take it: {error}") from error


def decode_image(content: bytes, where: str) -> Any:
    """A Pillow image in RGB, turned as its camera says. Of several frames the first."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels are too many")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # whatever the readers of broken files raise
        raise DataError(
            f"{where}: not an image that can be read ({error}): replace it, or remove the row (data.on_bad_row: skip "
            "leaves such rows out)"
        ) from error


def _expand(row: Rendered, variant: Variant, texts: Sequence[str], placeholder: str) -> Variant:
    """The variant with each placeholder replaced by an image's text."""
    pieces = variant.text.split(placeholder)
    if len(pieces) - 1 != len(texts):
        raise DataError(
            f"{row.origin}: its text has {placeholder} {len(pieces) - 1} times, for {len(texts)} images: do not write "
            "it in messages; or, if the chat template writes no images, set data.chat_template to one that does"
        )
    text, images, moved = pieces[0], list[tuple[int, int]](), list[tuple[int, int]]()
    old_end = len(pieces[0])
    for replacement, piece in zip(texts, pieces[1:], strict=True):
        images.append((len(text), len(text) + len(replacement)))
        text += replacement + piece
        old_end += len(placeholder)
        moved.append((old_end, images[-1][1] - old_end))  # from there on, characters are this much further
        old_end += len(piece)

    def move(position: int) -> int:
        return position + next((by for start, by in reversed(moved) if position >= start), 0)

    spans = tuple(Span(move(span.start), move(span.end), span.ends_turn) for span in variant.spans)
    return replace(variant, text=text, spans=spans, images=tuple(images))
