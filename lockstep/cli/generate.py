"""`lockstep generate` and `lockstep chat`: text from a run, a model folder or a Hub id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.display import make_console, quieten_libraries, track_progress
from lockstep.cli.options import MaxTokens, Source, Temperature, app

if TYPE_CHECKING:
    from lockstep.inference.engine import LocalEngine


@app.command()
def chat(
    source: Source,
    system: Annotated[str | None, typer.Option(help="A system message that starts the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a model. Also reads one turn per line from a pipe."""
    from lockstep.inference.chat import converse
    from lockstep.types import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    converse(_load_engine(source), params, system)


def _load_engine(source: str, batch: int = 1) -> LocalEngine:
    path = Path(source).expanduser()
    if not path.exists() and (("/" in source and path.parent.is_dir()) or source.count("/") > 1):
        raise ValueError(f"there is no run or model {source}")  # rather than wait for the Hub to say so
    with make_console(stderr=True).status(f"loading {source}"):
        from lockstep.inference.engine import LocalEngine

        quieten_libraries()
        return LocalEngine.load(path if path.exists() else source, batch_size=batch)


@app.command()
def generate(
    source: Source,
    prompts: Annotated[Path, typer.Option(help="Text, one prompt per line; or .jsonl rows with prompt or messages.")],
    out: Annotated[Path | None, typer.Option(help="Write the rows here instead of printing them.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts computed at a time.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="For a temperature above 0: the same seed gives the same answers.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Text prompts as they are, without the chat template.")] = False,
) -> None:
    """Answer a file of prompts: JSONL rows with prompt, completion and finish_reason."""
    from lockstep.inference.chat import answer_prompts, open_output, read_prompts
    from lockstep.types import SamplingParams

    rows = read_prompts(prompts)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_output(out) as file:
        answers = answer_prompts(_load_engine(source, batch), rows, params, batch, raw=raw)
        for answer in track_progress(answers, "generating", total=len(rows)):
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            file.flush()
