"""Writes docs/images/architecture.svg: the rooms by layer. Run it after adding a room: `python docs/picture.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "images" / "architecture.svg"
WIDTH, HEIGHT, EDGE, GAP = 980, 728, 20, 10
LEFT = 680  # where the column of rooms with torch ends
RIGHT = 728  # where the column of rooms without torch begins
ROW = 62

# Rows of rooms from top to bottom: (name, what it is, kind, relative width). A row imports from the rows below it.
TRAINING = [
    [
        ("verification", "drives train's loops in every layout", "torch", 33),
        ("train", "a loop per algorithm: sft, dpo, grpo; run.py composes", "torch", 47),
    ],
    [
        ("rollouts", "orchestrator, buffer, engines, rewards", "torch", 31),
        ("evaluation", "how good are answers?", "torch", 18),
        ("tenants", "one base, many adapters", "torch", 18),
        ("plan", "what will it cost?", "torch", 14),
    ],
    [
        ("inference", "engine, KV cache, sampling", "torch", 33),
        ("backend", "forward_backward, optim_step: torch, DeepSpeed, remote", "torch", 47),
    ],
    [
        ("algorithms", "losses, advantages", "core", 21),
        ("data", "rows to packed batches", "core", 21),
        ("model", "tokens to log-probs", "core", 19),
        ("parallel", "mesh, sharding, traffic", "core", 19),
    ],
]
CONTROL = [
    ("service", "HTTP: jobs, Llama Stack, Tinker", "control"),
    ("launch", "starts, watches and ends runs", "control"),
    ("reports", "pages and pictures", "control"),
]

STYLE = """
  text { font-family: system-ui, "DejaVu Sans", sans-serif; fill: #1c2430; }
  .name { font-size: 16px; font-weight: 600; }
  .what { font-size: 11.5px; fill: #48566a; }
  .note { font-size: 12px; fill: #48566a; }
  .page { fill: #ffffff; stroke: #d5dbe4; }
  .torch { fill: #e3ecfb; stroke: #7e9fd6; }
  .core { fill: #e4f3ea; stroke: #79b592; }
  .base { fill: #f3eee2; stroke: #bfa66b; }
  .control { fill: #f0e8f7; stroke: #a68bc6; }
  .disk { fill: #fdeceb; stroke: #d1867f; }
  .arrow { stroke: #48566a; stroke-width: 1.6; fill: none; }
  .head { fill: #48566a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8edf5; } .what, .note { fill: #b4c0d0; }
    .page { fill: #141a22; stroke: #364252; }
    .torch { fill: #1d2f4d; stroke: #5f86c4; } .core { fill: #18382a; stroke: #55987a; }
    .base { fill: #3a3220; stroke: #a58d55; } .control { fill: #33254a; stroke: #8f73b5; }
    .disk { fill: #452321; stroke: #b96f68; }
    .arrow { stroke: #b4c0d0; } .head { fill: #b4c0d0; }
  }
"""


def box(x: float, y: float, width: float, name: str, what: str, kind: str, height: float = ROW) -> str:
    middle = x + width / 2
    return (
        f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
        f'<text class="name" x="{middle:.0f}" y="{y + 27:.0f}" text-anchor="middle">{escape(name)}</text>'
        f'<text class="what" x="{middle:.0f}" y="{y + 46:.0f}" text-anchor="middle">{escape(what)}</text>'
    )


def draw() -> str:
    parts = [f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12"/>']
    whole, step = WIDTH - 2 * EDGE, ROW + GAP + 14
    parts.append(box(EDGE, EDGE, whole, "cli", "one file for each command; nothing imports it", "control"))
    top = EDGE + step
    for number, row in enumerate(TRAINING):
        unit = (LEFT - EDGE - GAP * (len(row) - 1)) / sum(share for *_, share in row)
        x = float(EDGE)
        for name, what, kind, share in row:
            parts.append(box(x, top + number * step, share * unit, name, what, kind))
            x += share * unit + GAP
    for number, (name, what, kind) in enumerate(CONTROL):
        parts.append(box(RIGHT, top + number * step, WIDTH - EDGE - RIGHT, name, what, kind))
    note = top + 3 * step
    for number, line in enumerate(
        ("No torch in this column.", "A run is started by name:", "python -m lockstep.train.worker")
    ):
        parts.append(f'<text class="note" x="{RIGHT + 4}" y="{note + 16 + 18 * number}">{line}</text>')
    bottom = top + 5 * step
    what = "starts, calls, watches and ends processes, on this machine or on Ray"
    parts.append(box(EDGE, bottom - step, whole, "processes", what, "core"))
    parts.append(
        box(EDGE, bottom, whole, "types · config · rundir", "the base: standard library, pydantic, yaml", "base")
    )
    parts.append(
        box(
            EDGE,
            bottom + step,
            whole,
            "the run directory",
            "config.yaml · status.json · metrics.jsonl · events.jsonl · logs/ · checkpoints/step-N/ · export/",
            "disk",
            ROW + 22,
        )
        + f'<text class="what" x="{WIDTH / 2:.0f}" y="{bottom + step + 68}" text-anchor="middle">'
        "the contract: rank 0 writes while ranks live, then the launcher; command, service and pages read</text>"
    )
    middle = (LEFT + RIGHT) / 2
    # launch starts the ranks of train: up and to the left, but not by an import
    start = f"M {RIGHT} {top + step + 20} H {middle} V {top + 30} H {LEFT + 9}"
    words = f"translate({middle - 8} {top + 2 * step + 66}) rotate(-90)"
    parts += [
        f'<path class="arrow" stroke-dasharray="5 4" d="{start}"/>',
        f'<path class="head" d="M {LEFT + 1} {top + 30} l 11 -5 v 10 z"/>',
        f'<path class="arrow" d="M {middle} {top + 2 * step} V {bottom - step - 18}"/>',
        f'<path class="head" d="M {middle} {bottom - step - 8} l -5 -11 h 10 z"/>',
        f'<text class="note" text-anchor="middle" transform="{words}">imports point down</text>',
    ]
    label = (
        "Lockstep's rooms by layer: cli above everything; training rooms in four layers; service, launch and reports "
        "beside them without torch; types, config and rundir below; the run directory is the contract between them."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
