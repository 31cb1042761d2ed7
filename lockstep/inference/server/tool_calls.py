"""Calls of tools in what a model says: JSON between <tool_call> tags, as Hermes, Qwen and many others write them."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from lockstep.types import Tokenizer

_TAG = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def why_no_tools(template: str | None, tokenizer: Tokenizer) -> str | None:
    """None where the template shows tools to the model and asks for calls that can be read."""
    if not template or not re.search(r"\btools\b", template):
        return "the chat template of this model does not show tools to it"
    if _TAG not in template:
        return f"the chat template of this model does not ask for calls between {_TAG} tags, and no others can be read"
    if _TAG in tokenizer.all_special_tokens:
        return f"the tokenizer of this model hides {_TAG} from its text"
    return None


def read_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(what was said beside them, the calls). Where any is not what a call must be, the text is left as it is."""
    calls = []
    for found in _CALL.finditer(text):
        try:
            call = json.loads(found[1])
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return text, []
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return (_CALL.sub("", text).strip() or None, calls) if calls else (text, [])
