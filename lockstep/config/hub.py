"""Whether the Hugging Face Hub answers. Where it does not, its libraries try again for most of a minute."""

from __future__ import annotations

import functools
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

_ANSWER_TIMEOUT_S = 5.0
_KNOWN_FOR_S = 60.0
"""A start asks several times; a server that runs for days must not go by what was true once."""


def is_only_here(source: str) -> bool:
    """Whether a model is one of the Hub's, and can only be what was downloaded of it before."""
    return not Path(source).exists() and not is_hub_reachable()


def is_hub_reachable() -> bool:
    """The one that the environment names. True where the libraries themselves are told not to ask it."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return _is_up_at(url, int(time.monotonic() // _KNOWN_FOR_S))


@functools.lru_cache(maxsize=8)
def _is_up_at(url: str, _: int) -> bool:
    return is_hub_up(url)


def is_hub_up(url: str) -> bool:
    """In a thread, because name resolution has no time limit."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(_answers(url)), daemon=True)
    thread.start()
    thread.join(_ANSWER_TIMEOUT_S + 1)
    return bool(answers) and answers[0]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ANSWER_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code < 500  # a proxy, or a Hub in trouble
    except urllib.error.URLError as error:
        # Certificates may be set for the library alone.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True
