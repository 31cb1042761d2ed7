"""The page of `lockstep data`: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from lockstep.reports.page import page

if TYPE_CHECKING:
    from lockstep.data.inspect import DataSheet, HistogramBar, ShownImage, ShownRow, ShownToken
    from lockstep.data.report import FileReport

_STYLE = """
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 3px 12px; align-items: center }
.bars span { font-variant-numeric: tabular-nums; color: var(--quiet) }
.bars i { display: block; height: 14px; background: var(--accent); border-radius: 2px; min-width: 1px }
.row { border: 1px solid var(--line); border-radius: 8px; margin: 1rem 0; overflow: hidden }
.row header { padding: .5rem .8rem; background: var(--shade); border-bottom: 1px solid var(--line) }
.row header small { color: var(--quiet); overflow-wrap: anywhere }
.versions { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
.versions > div { padding: .8rem; min-width: 0 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.65 ui-monospace, monospace; margin: 0 }
.text { color: var(--quiet) }
.text .l { color: var(--learned-ink); background: var(--learned); border-radius: 2px }
.text b { font-weight: 400; text-decoration: underline dotted; text-underline-offset: 3px }
.text s { text-decoration: none; box-shadow: inset -1px 0 var(--edge) }
.key span { padding: 0 .3rem }
.images { display: flex; flex-wrap: wrap; gap: .8rem; padding: .8rem .8rem 0 }
.images figure { margin: 0; max-width: 320px }
.images img { max-width: 100%; border: 1px solid var(--line); border-radius: 4px; display: block }
.images figcaption { color: var(--quiet); font-size: 12px; overflow-wrap: anywhere }
:root { --learned: #d9f2df; --learned-ink: #10451f; --edge: #b9c4bd }
@media (prefers-color-scheme: dark) { :root { --learned: #17402a; --learned-ink: #c9f3d6; --edge: #3d5a48 } }
"""


def data_page(sheet: DataSheet) -> str:
    parts = [
        _warnings(sheet.warnings),
        _facts(sheet.facts()),
        "<h2>Files</h2>" + _files(sheet.files),
        "<h2>Length of training rows, in tokens</h2>" + _bars(sheet.histogram),
        "<h2>Rows as they are learned</h2>",
        '<p class="key text"><span class="l">learned</span><span>context</span><span><b>special token</b></span> '
        "Hover over a token to see its number.</p>",
        *map(_row, sheet.examples),
    ]
    return page(f"{sheet.name}: data", "\n".join(parts), style=_STYLE)


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return f'<ul class="warnings">{items}</ul>' if warnings else ""


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts.items())
    return f'<table class="facts">{rows}</table>'


def _files(files: Sequence[FileReport]) -> str:
    names = ("file", "split", "format", "rows", "tokens", "learned", "prompts cut", "answers cut", "dropped", "skipped")
    head = "".join(f"<th>{name}</th>" for name in names)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_file, files))}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _file(file: FileReport) -> str:
    texts = [file.path, file.split, file.format]
    share = file.num_supervised / max(file.num_tokens, 1)
    numbers = [f"{file.num_rows:,}", f"{file.num_tokens:,}", f"{share:.0%}"]
    numbers += [f"{n:,}" for n in (file.prompts_cut, file.answers_cut, file.dropped, file.skipped)]
    cells = [f"<td>{escape(text)}</td>" for text in texts] + [f'<td class="number">{n}</td>' for n in numbers]
    return f"<tr>{''.join(cells)}</tr>"


def _bars(bars: Sequence[HistogramBar]) -> str:
    most = max(bar.rows for bar in bars)
    cells = []
    for bar in bars:
        width = f"{100 * bar.rows / most:.2f}%"
        cells.append(
            f'<span>{bar.first:,} to {bar.last:,}</span><i style="width:{width}"></i><span>{bar.rows:,}</span>'
        )
    return f'<div class="bars">{"".join(cells)}</div>'


def _row(row: ShownRow) -> str:
    counts = f"{row.num_tokens:,} tokens, {row.num_learned:,} learned"
    versions = "".join(
        f"<div>{f'<h4>{escape(name)}</h4>' if name else ''}{_text(tokens)}</div>"
        for name, tokens in zip(row.names, row.versions)
    )
    return (
        f'<article class="row"><header><strong>{escape(row.why)}</strong> <small>{escape(row.origin)} · {counts}'
        f'</small></header>{_images(row.images)}<div class="versions">{versions}</div></article>'
    )


def _images(images: Sequence[ShownImage]) -> str:
    figures = "".join(
        f'<figure><img src="{escape(image.data_url)}" alt="{escape(image.name)}"><figcaption>{escape(image.name)} · '
        f"{image.width} x {image.height} · {image.num_tokens:,} tokens</figcaption></figure>"
        for image in images
    )
    return f'<div class="images">{figures}</div>' if images else ""


def _text(tokens: Sequence[ShownToken]) -> str:
    parts = []
    for learned, group in groupby(tokens, key=lambda token: token.learned):
        inside = "".join(_token(token) for token in group)
        parts.append(f'<span class="l">{inside}</span>' if learned else inside)
    return f'<p class="text">{"".join(parts)}</p>'


def _token(token: ShownToken) -> str:
    tag = "b" if token.special else "s"
    return f'<{tag} title="{" ".join(map(str, token.ids))}">{escape(token.text)}</{tag}>'
