"""The dashboard: one document for every route of the page, its scripts and styles, and plotly's script for the charts.

Everything here is public and the same for everybody: what is shown comes from the API, which asks for tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

_STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Our own files are asked for again each time, and cost nothing if they are the same; plotly's is large and seldom new.
_ASK_EACH_TIME, _KEEP_A_DAY = "no-cache", "public, max-age=86400"
CHART_SCRIPT = "plotly.min.js"
PLACES = ("/", "/jobs/{job_id}", "/compare", "/submit")

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    content: bytes
    compressed: bytes
    tag: str
    media_type: str
    caching: str


@cache
def read_asset(name: str) -> Asset | None:
    path = _chart_script() if name == CHART_SCRIPT else _STATIC / name
    if path is None or path.name != name or path.suffix not in _TYPES or not path.is_file():
        return None
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    caching = _KEEP_A_DAY if name == CHART_SCRIPT else _ASK_EACH_TIME
    return Asset(content, gzip.compress(content, 6, mtime=0), tag, _TYPES[path.suffix], caching)


def _chart_script() -> Path | None:
    """Where the installed package has it. The package itself is not imported."""
    spec = importlib.util.find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) / "package_data" / CHART_SCRIPT if folders else None


def _answer(name: str, request: Request) -> Response:
    asset = read_asset(name)
    if asset is None:
        raise HTTPException(404, f"the page has no file {name}")
    headers = {"ETag": asset.tag, "Cache-Control": asset.caching, "Vary": "Accept-Encoding"}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = asset.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["Content-Encoding"] = asset.compressed, "gzip"
    return Response(content, headers=headers, media_type=asset.media_type)


def show_page(request: Request) -> Response:
    return _answer("index.html", request)


def get_icon(request: Request) -> Response:
    """Browsers ask for it under this name beside answers of the API."""
    return _answer("icon.svg", request)


def get_static(name: str, request: Request) -> Response:
    return _answer(name, request)


for _place in PLACES:
    router.add_api_route(_place, show_page, methods=["GET", "HEAD"], response_model=None)
router.add_api_route("/favicon.ico", get_icon, methods=["GET", "HEAD"], response_model=None)
router.add_api_route("/static/{name}", get_static, methods=["GET", "HEAD"], response_model=None)
