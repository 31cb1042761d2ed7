"""The data section: where rows come from, how they are read, what is learned of them.

`data.train` takes a path, or a source with settings of its own, or a list of either. What a source leaves out it
takes from the data section.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lockstep.config.schema import PositiveInt, Section, check_code_name

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "unpaired"]
PARTS = ("train", "validation", "test")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
# What a source and the data section both have: the section's is the default of every source.
_SHARED = ("format", "columns", "roles", "input_template", "output_template", "converter")


def _check_converter(value: str) -> str:
    check_code_name(value, "data.converter", "write module:function, for example convert:to_messages")
    return value


Converter = Annotated[str, AfterValidator(_check_converter)]


class SourceConfig(Section):
    """Some rows, and how to read them."""

    path: str
    """A file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, also .gz), a folder, a glob, or a Hub data set."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often each row comes in an epoch: 2 is twice, 0.5 is half of the rows, chosen by seed."""
    split: str = "train"
    """Which split of a Hub data set."""
    subset: str | None = None
    """Which configuration of a Hub data set."""
    revision: str | None = None
    """Which branch, tag or commit of a Hub data set."""
    options: dict[str, Any] = Field(default={})
    """Of a reasoning_gym:NAME task, for grpo: size (number of rows), seed, and the settings of the task itself."""
    format: Format | None = None
    """As in data."""
    columns: dict[str, str] | None = None
    """As in data."""
    roles: dict[str, str] | None = None
    """As in data."""
    input_template: str | None = None
    """As in data."""
    output_template: str | None = None
    """As in data."""
    converter: Converter | None = None
    """As in data."""


def _as_sources(value: object) -> object:
    sources = [value] if isinstance(value, (str, Mapping, SourceConfig)) else value
    if not isinstance(sources, (list, tuple)):
        return sources
    return [{"path": source} if isinstance(source, str) else source for source in sources]


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Section):
    train: Sources
    """A file, a folder, a glob or a Hub data set; or a source {path, weight, split, ...}; or a list of these."""
    validation: Sources = ()
    """Held-out rows, named like train."""
    test: Sources = ()
    """Rows for `lockstep eval` after the run, named like train. Never looked at in training."""
    validation_fraction: Fraction = 0.0
    """Share of the training rows held out when no validation file is given."""
    test_fraction: Fraction = 0.0
    """Share of the training rows set aside for `lockstep eval` when no test file is given."""
    format: Format = "auto"
    """auto: recognised from the first row of each file."""
    columns: dict[str, str] = Field(default={})
    """What the format calls a column: what the file calls it. For example {prompt: question, completion: answer}."""
    roles: dict[str, str] = Field(default={})
    """What the file calls a role: the role. For example {bot: assistant}. Common tags are known."""
    input_template: str | None = None
    """The prompt as text with {columns}, for rows of any shape. Needs output_template."""
    output_template: str | None = None
    """The answer as text with {columns}."""
    converter: Converter | None = None
    """module:function of yours. It gets a row as a dict and returns one of a known format, or None to leave it out."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """assistant: every answer. last: the last answer of each row. all: every token, prompts too."""
    max_length: PositiveInt = 2048
    """Tokens in one row."""
    truncate: Literal["prompt_left", "right", "drop", "error"] = "prompt_left"
    """Rows longer than max_length. prompt_left: cut the prompt's start, and an answer's end only if it cannot fit.
    right: cut the end. drop: leave the row out. error: stop."""
    on_bad_row: Literal["error", "skip"] = "error"
    """skip: leave rows out that cannot be used, and write them to skipped.jsonl with the reason."""
    chat_template: Literal["auto", "none"] | str = "auto"
    """auto: the tokenizer's own, if it has one. none: plain text. Otherwise a Jinja file."""
    template_options: dict[str, Any] = Field(default={})
    """Passed to the chat template. For example {enable_thinking: false}."""
    shuffle: bool = True
    """A new order in every epoch, from seed alone. Without it: the order of the files."""
    image_folder: str | None = None
    """Where the images are that rows name by path. Default: the folder of the file that names them. None outside of it
    is read."""
    image_urls: bool | Literal["private"] = False
    """Also fetch images that rows name by an http or https address, once, when rows are compiled. private: from this
    machine and its network too."""
    procs: PositiveInt | Literal["auto"] = "auto"
    """Processes that tokenise. auto: one for each core, fewer for few rows."""
    cache_dir: str | None = None
    """Where compiled rows are kept. Default: $LOCKSTEP_CACHE/data, or ~/.cache/lockstep/data."""

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        if not self.train:
            raise ValueError("train names no file: give at least one")
        for part in ("validation", "test"):
            if getattr(self, part) and getattr(self, f"{part}_fraction"):
                raise ValueError(f"give either {part} files or {part}_fraction, not both")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction and test_fraction leave nothing to train on")
        for part in PARTS:
            for source in self.sources(part):
                if (source.input_template is None) != (source.output_template is None):
                    raise ValueError(f"input_template and output_template go together ({source.path} has only one)")
        return self

    def sources(self, part: str) -> tuple[SourceConfig, ...]:
        """The sources of train, validation or test, with what they leave out filled in."""
        shared = {key: getattr(self, key) for key in _SHARED}
        return tuple(
            source.model_copy(update={key: value for key, value in shared.items() if getattr(source, key) is None})
            for source in getattr(self, part)
        )


def is_local(path: str, directory: Path) -> bool:
    """Whether a source's path is of this machine; if not, it is the name of a Hub data set."""
    return (
        path.startswith((".", "/", "~"))
        or path.removesuffix(".gz").endswith(SUFFIXES)
        or any(sign in path for sign in "*?[")
        or (directory / path).exists()
    )
