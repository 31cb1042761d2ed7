"""What the sections of the configuration are made of: their base class, kinds of numbers, and the error of them all."""

from __future__ import annotations

import re
import sys
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run. The message says what, where and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        str_min_length=1,
    )


_CODE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_code_name(value: str, key: str, known: str) -> None:
    """Raise ValueError unless it is module:name of a module that is not Python's own.

    None of Python's own functions is a reward, an environment or a converter, and some run the text they are given.
    """
    if ":" not in value:
        raise ValueError(f"{key} {value!r} is unknown: {known}")
    if not _CODE_NAME.fullmatch(value):
        raise ValueError(f"{key} {value!r}: write module:name, for example my_module:my_function")
    package = value.partition(":")[0].partition(".")[0]
    if package in sys.stdlib_module_names:
        raise ValueError(
            f"{key} {value!r}: {package} is a module of Python itself: name a function of your own, in a file of "
            "another name"
        )
