"""Images in rows: parts of a message's content in the forms that people write, and a row's column of images."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.sources.rows import DataError, Row, json_type

IMAGE = "\uf8d2"
"""Stands for an image in the text of a message; as a key of a message, for its images. A private-use character."""
COLUMNS = ("images", "image")
_IN_TEXT = "<image>"  # how LLaVA and ShareGPT rows mark the place of an image
_PART_TYPES = ("image", "image_url", "input_image")
_PLACES = ("path", "url", "image", "image_url", "file")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where a row says an image is: a path, an address, or the bytes of a file."""

    place: str = ""
    content: bytes = b""


def read_part(part: object, where: str) -> str:
    """Of a content that may only be text."""
    if not isinstance(part, dict):
        raise DataError(f'{where} is {json_type(part)}: it must be {{"type": "text", "text": ...}}')
    if part.get("type") in _PART_TYPES:
        raise DataError(
            f"{where} is an image: images are learned from by sft, with a vision-language model (Pillow must be "
            "installed: pip install 'lockstep[vision]', and the model's folder have its preprocessor_config.json)"
        )
    if part.get("type") != "text":
        raise DataError(f"{where} has the type {part.get('type')!r}: only text and images are supported")
    if not isinstance(part.get("text"), str):
        raise DataError(f"{where}: its text is {json_type(part.get('text'))}: it must be a string")
    return str(part["text"])


def read_parts(parts: Sequence[object], where: str) -> tuple[str, list[ImageSource | None]]:
    """(the text with IMAGE for each image, the images; None: the next one of the row's column)."""
    text, images = "", list[ImageSource | None]()
    for number, part in enumerate(parts, start=1):
        if isinstance(part, dict) and part.get("type") in _PART_TYPES:
            images.append(_read_image_part(part, where.format(number)))
            text += IMAGE
        else:
            text += _checked(read_part(part, where.format(number)), where.format(number))
    return text, images


def _read_image_part(part: Mapping[str, Any], where: str) -> ImageSource | None:
    source = part.get("source")
    if isinstance(source, dict):  # Anthropic's: {"type": "base64", "media_type": ..., "data": ...}
        part = {"base64": source.get("data"), "url": source.get("url")}
    if isinstance(part.get("base64"), str):
        return _decode(part["base64"], where)
    if isinstance(part.get("bytes"), bytes):
        return ImageSource(content=part["bytes"])
    given = [part[key] for key in _PLACES if part.get(key) is not None]
    return read_image(given[0], where) if given else None


def read_image(value: object, where: str) -> ImageSource:
    """A path, an address, a data: address, or a table's image: an object with "bytes" and "path"."""
    if isinstance(value, dict):
        content, place = value.get("bytes"), value.get("path") or value.get("url")
        if isinstance(content, bytes) and content:
            return ImageSource(place if isinstance(place, str) else "", content)
        value = place
    if isinstance(value, bytes) and value:
        return ImageSource(content=value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} is an image without a place: write its path, or its content as base64")
    if value.startswith("data:"):
        head, comma, body = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{where}: its data: address is not base64: write data:image/png;base64,...")
        return _decode(body, where)
    return ImageSource(value)


def _decode(text: str, where: str) -> ImageSource:
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where}: its image is not base64 ({error}): encode the file's bytes again") from error
    if not content:
        raise DataError(f"{where}: its image is empty: remove the row, or add the image")
    return ImageSource(content=content)


def gather_images(
    row: Row, messages: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Mapping[str, object], ...], tuple[ImageSource, ...]]:
    """The messages with IMAGE for each image in their text, and the images in that order.

    Those of the row's column stand where messages have an image part without a place of its own, or "<image>"; where
    no message says, before the first user message.
    """
    column = list(_read_column(row))
    if not column and not any(message.get(IMAGE) for message in messages):
        _refuse_empty_places(row, messages)
        return tuple(_without(message) for message in messages), ()
    for number, message in enumerate(messages, start=1):
        if IMAGE not in message:
            _checked(message.get("content") or "", f"{row.origin}: message {number}")
    if column and not any(message.get(IMAGE) for message in messages):
        messages = _place_column(messages, len(column))
    unused, images = iter(column), list[ImageSource]()
    for message in messages:
        for image in message.get(IMAGE, ()):
            following = next(unused, None) if image is None else image
            if following is None:
                raise DataError(
                    f"{row.origin}: messages have more places for images than its column has images ({len(column)})"
                )
            images.append(following)
    left = len(list(unused))
    if left:
        raise DataError(f"{row.origin}: {left} of the {len(column)} images in its column have no place in its messages")
    return tuple(_without(message) for message in messages), tuple(images)


def _refuse_empty_places(row: Row, messages: Sequence[Mapping[str, Any]]) -> None:
    """Of a row whose column is there and empty: its marks are no text."""
    key = next((key for key in COLUMNS if key in row.fields), None)
    marked = sum(str(message.get("content") or "").count(_IN_TEXT) for message in messages)
    if key is not None and marked:
        raise DataError(
            f"{row.origin}: {_IN_TEXT} stands {marked} times in its messages, and its {key!r} is empty: add the "
            f"images, or remove the marks; if they are text, remove {key!r} from the row"
        )


def _place_column(messages: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, object]]:
    placed = []
    for message in messages:
        text = message.get("content") or ""
        found = text.count(_IN_TEXT)
        # The line break after a mark, or before a mark at the end, belongs to the mark.
        text = text.replace(f"{_IN_TEXT}\n", IMAGE)
        if text.endswith(last := f"\n{_IN_TEXT}"):
            text = text.removesuffix(last) + IMAGE
        text = text.replace(_IN_TEXT, IMAGE)
        placed.append({**message, "content": text, IMAGE: [None] * found} if found else message)
    if not any(message.get(IMAGE) for message in placed):
        first = next((i for i, message in enumerate(placed) if message["role"] == "user"), 0)
        text = placed[first].get("content") or ""
        placed[first] = {**placed[first], "content": IMAGE * count + text, IMAGE: [None] * count}
    return placed


def refuse_images(row: Row) -> None:
    """Of a row that is not learned with images: rather than without them."""
    if any(row.fields.get(key) for key in COLUMNS):
        raise DataError(
            f"{row.origin}: its images cannot be learned from: images are for sft with a vision-language model. To "
            "train on the text alone, remove them from the row"
        )


def _read_column(row: Row) -> Iterator[ImageSource]:
    key = next((key for key in COLUMNS if row.fields.get(key) is not None), None)
    if key is None:
        return
    value = row.fields[key]
    for number, image in enumerate(value if isinstance(value, (list, tuple)) else [value], start=1):
        yield read_image(image, f"{row.origin}: image {number} of {key!r}")


def _without(message: Mapping[str, object]) -> Mapping[str, object]:
    return {key: value for key, value in message.items() if key != IMAGE} if IMAGE in message else message


def _checked(text: str, where: str) -> str:
    if IMAGE in text:
        raise DataError(f"{where} has the private-use character U+F8D2, which stands for images here: remove it")
    return text
