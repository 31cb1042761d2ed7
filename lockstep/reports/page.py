"""What pages and terminals share: the shell of every HTML page (one file, no outside resource), and number formats."""

from __future__ import annotations

import re
from html import escape

__all__ = ["escape", "format_bytes", "format_count", "format_duration", "inline_svg", "page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #5f6872; --paper: #fff; --shade: #f5f6f8; --line: #dfe3e8;
  --accent: #2a6fb0; --good: #17713a; --good-shade: #e2f4e7; --bad: #a8321f; --bad-shade: #fbe9e6;
  --warn: #7a5200; --warn-shade: #fff4d6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --quiet: #9aa4af; --paper: #14171a; --shade: #1d2126;
  --line: #333a42; --accent: #6cb0ee; --good: #7ed69b; --good-shade: #16331f; --bad: #f0917f; --bad-shade: #3b1d18;
  --warn: #f0c869; --warn-shade: #372c10 } }
* { box-sizing: border-box }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1240px; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem }
a { color: var(--accent) }
svg { max-width: 100%; height: auto }
.quiet { color: var(--quiet) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .4rem 1.1rem .4rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--quiet); font-weight: 600 }
.number { text-align: right }
.facts th, .facts td { border: 0; padding: .12rem 1.4rem .12rem 0; font-weight: 400 }
.facts th { min-width: 7rem }
.facts td { overflow-wrap: anywhere }
.warnings { background: var(--warn-shade); color: var(--warn); border-radius: 8px; list-style: none }
.warnings { padding: .7rem 1rem; margin: 0 0 1.2rem; overflow-wrap: anywhere }
.warnings li + li { margin-top: .35rem }
@media (max-width: 640px) { .facts th, .facts td { display: block; padding-right: 0 } .facts th { padding-top: .4rem } }
@media (max-width: 640px) { body { font-size: 14px; padding: 1.25rem .9rem 3rem } h1 { font-size: 1.25rem } }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Lockstep</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(title: str, body_html: str, style: str = "") -> str:
    """A whole document. `title` is text and is escaped; `body_html` is not: escape what comes from outside."""
    return _PAGE.format(title=escape(title), style=_STYLE + style, body=body_html)


def inline_svg(document: str) -> str:
    """The picture alone: without the XML prologue and matplotlib's metadata."""
    return re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)


def format_count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_bytes(count: float) -> str:
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"
