"""Images of rows: found and read, checked, and their tokens put into the text. Pillow is needed only here."""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import ipaddress
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from lockstep.data.formats.image_parts import ImageSource
from lockstep.data.rendering import Rendered, Span, Variant
from lockstep.data.sources.rows import DataError, SourceFile
from lockstep.types import ImageProcessor, ImageRef, PreparedImage

# Formats that Pillow reads by itself. Others start programs (EPS) or have no use here.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF")
_MAX_BYTES = 64 * 2**20
_MAX_PIXELS = 2**27  # a small file can unpack to any size
FETCH_TIMEOUT_S = 30.0  # for a whole image, with all redirects
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
Fetches = bool | Literal["private"]


class ChangedImage(DataError):
    """A file is no longer what it was when its row was compiled."""


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows as they are compiled. `folder` is data.image_folder, `fetches` data.image_urls."""

    processor: ImageProcessor
    folder: str | None = None
    fetches: Fetches = False

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
            image, content = self.read(source, file, f"{row.origin}: image {number}")
            prepared.append(prepare_image(self.processor, content, f"{row.origin}: image {image.name or number}"))
            images.append(image)
        expanded = _expand(row, variant, [image.text for image in prepared], self.processor.placeholder)
        return replace(row, variants=(expanded,), images=tuple(images)), prepared

    def read(self, source: ImageSource, file: SourceFile, where: str) -> tuple[ImageRef, bytes]:
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
            return _bounded(fetch(address, private=self.fetches == "private"), where)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            reason = getattr(error, "reason", None) or error
            raise DataError(f"{where}: {address[:120]} could not be fetched ({reason})") from error


def fetch(address: str, *, private: bool, timeout_s: float = FETCH_TIMEOUT_S) -> bytes:
    """At most one byte more than an image may have. Follows redirects, to http and https alone.

    `private`: also from this machine and its network, where rows of somebody else could read what only we can reach."""
    deadline, connections = time.monotonic() + timeout_s, list[_Guarded]()

    def connect(kind: type[_Guarded], host: str, **options: Any) -> Any:
        connections.append(kind(host, **{**options, "timeout": timeout_s}))
        # A proxy connects for us, and decides for itself what can be reached.
        connections[-1].check = _allow_all if private or proxies else refuse_private
        return connections[-1]

    scheme, host = urllib.parse.urlsplit(address).scheme, urllib.parse.urlsplit(address).hostname or ""
    proxies = {} if urllib.request.proxy_bypass(host) else urllib.request.getproxies()
    proxies = {scheme: proxies[scheme]} if scheme in proxies else {}
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        _Http(functools.partial(connect, _Guarded)),
        _Https(functools.partial(connect, _GuardedTls)),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    # A server that sends a byte now and then resets the socket's own time limit each time.
    stop = threading.Timer(timeout_s, _shut_all, [connections])
    stop.daemon = True
    stop.start()
    try:
        with opener.open(address, timeout=timeout_s) as answer:
            if int(answer.headers.get("Content-Length") or 0) > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES // 2**20} MiB: make it smaller")
            content: bytes = answer.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not done after {timeout_s:g} s") from None
        raise
    finally:
        stop.cancel()
        _shut_all(connections)
    if time.monotonic() >= deadline:  # what came so far looks like all of it where no length is given
        raise TimeoutError(f"not done after {timeout_s:g} s")
    return content


def _shut_all(connections: Sequence[_Guarded]) -> None:
    for connection in connections:
        connection.shut()


def _allow_all(address: str) -> None:
    pass


def refuse_private(address: str) -> None:
    found = ipaddress.ip_address(address.split("%")[0])
    inner: Any = found
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None
        inner = found.ipv4_mapped or found.sixtofour or translated or found
    if not inner.is_global or inner.is_multicast:
        raise ValueError(
            f"{address} is an address of this machine or its network: to fetch from there, set data.image_urls to "
            "private"
        )


class _Guarded(http.client.HTTPConnection):
    """Connects to addresses that `check` does not refuse: to those that it saw, whatever the name leads to later."""

    check: Callable[[str], None]
    _kept: socket.socket | None = None

    def connect(self) -> None:
        self._create_connection = self._connect_to
        super().connect()

    def _connect_to(self, place: tuple[str, int], *arguments: Any) -> socket.socket:
        found = [str(information[4][0]) for information in socket.getaddrinfo(*place, type=socket.SOCK_STREAM)]
        for address in found:
            self.check(address)
        error = OSError(f"{place[0]} has no address")
        for address in found:
            try:
                connected = socket.create_connection((address, place[1]), *arguments)
            except OSError as failed:
                error = failed
            else:
                self._kept = connected.dup()  # TLS takes the other one over
                return connected
        raise error

    def shut(self) -> None:
        """End it, whoever waits for it."""
        if self._kept is not None:
            with contextlib.suppress(OSError):
                self._kept.shutdown(socket.SHUT_RDWR)
            self._kept.close()


class _GuardedTls(_Guarded, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def __init__(self, connect: Any) -> None:
        super().__init__()
        self._connect = connect

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._connect, request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, connect: Any) -> None:
        super().__init__()
        self._connect = connect

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(self._connect, request)


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
