"""`lockstep generate` and `lockstep chat`: text from a run, a model folder or a Hub id."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.display import make_console, quieten_libraries, track_progress
from lockstep.cli.options import MaxTokens, Source, Temperature, app

if TYPE_CHECKING:
    from lockstep.inference.chat import TextPrompt
    from lockstep.inference.engine import LocalEngine
    from lockstep.types import SamplingParams

_SERVING = "Serving"


def _option(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=_SERVING, **settings)


Serve = Annotated[str | None, _option("Answer OpenAI's API here instead, as 8000.", metavar="[HOST:]PORT")]
Adapters = Annotated[
    list[str] | None,
    _option("Serve this LoRA run or adapter folder too, under this name. Can be repeated.", metavar="NAME=RUN"),
]
ModelName = Annotated[str | None, _option("What requests call the model. Default: the name of its folder.")]
ApiKeyFile = Annotated[Path | None, _option("Requests must send this key. Also $LOCKSTEP_API_KEY.", metavar="FILE")]
Batch = Annotated[int | None, _option("Answers written at once. Default: 16, on a GPU 256.", min=1)]
MaxWaiting = Annotated[int, _option("Answers that may wait; beyond that requests get 429.", min=0)]
Timeout = Annotated[float, _option("Seconds for a request, waiting included.", min=1)]


@app.command()
def chat(
    source: Source,
    system: Annotated[str | None, typer.Option(help="A system message that starts the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 always takes the most likely token. Default: 0.7, and 1 for --serve.", min=0.0),
    ] = None,
    serve: Serve = None,
    adapter: Adapters = None,
    name: ModelName = None,
    api_key_file: ApiKeyFile = None,
    batch: Batch = None,
    max_waiting: MaxWaiting = 256,
    timeout: Timeout = 600.0,
) -> None:
    """Chat with a model. Also reads one turn per line from a pipe. With --serve, others chat with it over HTTP."""
    if serve is None:
        given = (adapter, "--adapter"), (name, "--name"), (api_key_file, "--api-key-file"), (batch, "--batch")
        for value, option in given:
            if value is not None:
                raise ValueError(f"{option} goes with --serve")
        from lockstep.inference.chat import converse
        from lockstep.types import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.7 if temperature is None else temperature)
        converse(load_engine(source), params, system)
        return
    if system is not None:
        raise ValueError("--system does not go with --serve: every request has its own messages")
    from lockstep.cli.chat_server import ServeOptions, serve_model

    serve_model(
        ServeOptions(
            source,
            serve,
            tuple(adapter or ()),
            name,
            api_key_file,
            batch,
            max_tokens,
            temperature,
            max_waiting,
            timeout,
        )
    )


def load_engine(source: str, batch: int | None = 1, report: Callable[[str], None] = warnings.warn) -> LocalEngine:
    """`report`: see LocalEngine."""
    path = Path(source).expanduser()
    if not path.exists() and (("/" in source and path.parent.is_dir()) or source.count("/") > 1):
        # Rather than wait for the Hub to say so.
        raise ValueError(f"there is no run or model {source}: give a run directory, a model folder or a Hub id")
    with make_console(stderr=True).status(f"loading {source}"):
        from lockstep.inference.engine import LocalEngine

        quieten_libraries()
        return LocalEngine.load(path if path.exists() else source, batch_size=batch, report=report)


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
        answers = _answer_about_images(source, prompts, rows, params)
        if answers is None:
            answers = answer_prompts(load_engine(source, batch), rows, params, batch, raw=raw)
        for answer in track_progress(answers, "generating", total=len(rows)):
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            file.flush()


def _answer_about_images(
    source: str, file: Path, rows: Sequence[TextPrompt], params: SamplingParams
) -> Iterator[dict[str, Any]] | None:
    """None where no prompt has an image."""
    if not any(map(_has_image, rows)):
        return None
    from lockstep.evaluation.image_prompts import ImageAnswers

    quieten_libraries()
    return ImageAnswers(source, file).answer(rows, params)


def _has_image(prompt: TextPrompt) -> bool:
    turns: Sequence[Any] = [] if isinstance(prompt.content, str) else prompt.content
    parts = (part for turn in turns if isinstance(turn["content"], list) for part in turn["content"])
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)
