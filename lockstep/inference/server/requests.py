"""Bodies of requests: what is understood, what makes no difference, and what is refused rather than ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from lockstep.inference.server.errors import ApiError, bad_request
from lockstep.types import SamplingParams

MAX_CHOICES = 128  # of one request, over all its prompts
MAX_TOP = 20
_MAX_INT = 2**63
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Said for the caller's own purposes.
_HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# With this value a field changes nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


def _as_texts(value: Any) -> object:
    return () if value is None else (value,) if isinstance(value, str) else value


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class SamplingBody(BaseModel):
    """What chat and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None

    model: str
    max_tokens: Annotated[int, Field(ge=0, lt=_MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[tuple[StopText, ...], Field(max_length=16, strict=False), BeforeValidator(_as_texts)] = ()
    seed: Annotated[int, Field(ge=-_MAX_INT, lt=_MAX_INT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """What the types do not say. Raises for a field that would be ignored and is not neutral."""
        for name, value in (self.model_extra or {}).items():
            neutral = name in _HARMLESS or value is None or value in _NEUTRAL.get(name, ())
            if not neutral and not (name == "best_of" and value == (self.n or 1)):
                raise bad_request(f"{name[:100]!r} is not supported here, and it would change the answer", name[:100])
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only for stream: true", "stream_options")

    def params(self, max_tokens: int, temperature: float) -> SamplingParams:
        """With the server's own values for what the request leaves open."""
        return SamplingParams(
            max_tokens=max(max_tokens, 1),
            temperature=self.temperature if self.temperature is not None else temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=self.stop,
            num_samples=self.n or 1,
        )


class ChatBody(SamplingBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs is only for logprobs: true", "top_logprobs")
        if self.max_tokens == 0:
            raise bad_request("max_tokens must be at least 1", "max_tokens")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        if self.tool_choice not in (None, "auto", "none"):
            raise bad_request("tool_choice can only be auto or none: nothing here forces a call", "tool_choice")

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, object]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates read it."""
        return [_read_message(message, number) for number, message in enumerate(self.messages)]


class CompletionBody(SamplingBody):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens 0 is only for echo: true", "max_tokens")
        if self.echo and self.stream:
            raise bad_request("echo is not for stream: true", "echo")
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise bad_request(f"at most {MAX_CHOICES} answers a request: prompts times n", "prompt")

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given, list) and given:
            if _are_tokens(given):
                return [given]
            if all(isinstance(prompt, str) or (isinstance(prompt, list) and _are_tokens(prompt)) for prompt in given):
                return given
        raise bad_request("prompt must be a text, a list of token ids, or a list of such prompts", "prompt")


def _are_tokens(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


Body = TypeVar("Body", bound=SamplingBody)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    try:
        found = json.loads(raw, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise bad_request("the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or "numbers or nesting beyond what JSON parsers take"
        raise bad_request(f"the body is not JSON: {reason}") from error
    if not isinstance(found, dict):
        raise bad_request("the body must be a JSON object")
    if _SURROGATE.search(raw):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise bad_request("the body has half of a surrogate pair, which is no character") from error
    try:
        body = kind.model_validate(found)
    except ValidationError as error:
        raise _explain(error) from error
    body.check()
    return body


def _refuse_constant(name: str) -> None:
    raise json.JSONDecodeError(f"{name} is no JSON number", "", 0)


def _explain(error: ValidationError) -> ApiError:
    """One sentence, on the deepest of the problems: the alternatives of a union all complain."""
    worst = max(error.errors(include_url=False, include_context=False), key=lambda problem: len(problem["loc"]))
    place = ".".join(str(part) for part in worst["loc"] if not _is_alternative(part))[:200]
    if worst["type"] == "missing":
        return bad_request(f"the body has no {place!r}", place)
    return bad_request(f"{place}: {worst['msg'][0].lower()}{worst['msg'][1:]}", place)


def _is_alternative(part: object) -> bool:
    """pydantic names the alternatives of a union in the place of an error."""
    return isinstance(part, str) and (
        "[" in part or part in ("str", "int", "float", "constrained-str", "constrained-int")
    )


def _read_message(message: Mapping[str, object], number: int) -> dict[str, object]:
    place = f"messages.{number}"
    role = message.get("role")
    if not isinstance(role, str) or role not in ("system", "developer", "user", "assistant", "tool"):
        raise bad_request(f"{place}: role must be system, developer, user, assistant or tool", f"{place}.role")
    read = {key: value for key, value in message.items() if value is not None}
    read["role"] = "system" if role == "developer" else role  # OpenAI's newer word for it; templates know the older
    read["content"] = _read_content(message.get("content"), place)
    if calls := read.get("tool_calls"):
        read["tool_calls"] = _read_calls(calls, place)
    elif message.get("content") is None:
        raise bad_request(f"{place} has no content", f"{place}.content")
    return read


def _read_content(content: object, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        other = next((part for part in content if part.get("type") != "text"), None)
        if other is None and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        kind = "without text" if other is None else str(other.get("type"))[:50]
        raise bad_request(f"{place}: a part {kind}: only parts of type text are understood", f"{place}.content")
    raise bad_request(f"{place}: content must be a text, or parts of type text", f"{place}.content")


def _read_calls(calls: object, place: str) -> list[dict[str, object]]:
    """Arguments as templates want them: not as JSON in a text."""
    problem = bad_request(f"{place}: tool_calls must be a list of functions with name and arguments", place)
    if not isinstance(calls, list):
        raise problem
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise problem
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise problem from error
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
