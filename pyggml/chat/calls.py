"""The form in which a template reads calls of tools.

OpenAI's API has the arguments of a call as a text, and null as the content beside it. Templates
were written for that, or for what else their authors had: arguments as an object, an empty content,
none. Which one is found by trying: the first form of which the template writes every word.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PROBE_NAME, _ARGUMENT, _VALUE = "zqname", "zqargument", "zqvalue"
PROBE_ARGUMENTS = {_ARGUMENT: _VALUE}
_REPR = f"{{'{_ARGUMENT}'"  # an object as Python writes it, which no model is to read
_ABSENT = "absent"


def probe_call(i: int = 0) -> dict[str, Any]:
    """A call of unlikely words, with the i-th of unlikely ids."""
    function = {"name": PROBE_NAME, "arguments": dict(PROBE_ARGUMENTS)}
    return {"id": f"zqid1234{i}", "type": "function", "function": function}


def probe_tool(name: str, about: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A tool whose parameters have these properties, and what `more` of its schema says."""
    parameters = {"type": "object", "properties": properties, **more}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Form:
    """as_text: arguments are their JSON. empty: the content beside calls where it has no word; ""
    also where that is how it was given."""

    as_text: bool
    empty: str | None

    def write(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in this form."""
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return message
        changed = {**message, "tool_calls": [self._call(call) for call in calls]}
        if not message.get("content") and self.empty != "":
            changed["content"] = None
            if self.empty == _ABSENT:
                del changed["content"]
        return changed

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
            return call
        if self.as_text:
            text = json.dumps(arguments, ensure_ascii=False)
            return {**call, "function": {**function, "arguments": text}}
        return call

    def fits(self, render: Callable[[Mapping[str, Any]], str]) -> bool:
        """Whether a template writes a call of this form with every word, and as JSON."""
        from pyggml.errors import TemplateError

        asked = {"role": "user", "content": "zqasked"}
        calling = self.write({"role": "assistant", "content": "", "tool_calls": [probe_call()]})
        try:
            inputs = {"tools": None, "documents": None, "add_generation_prompt": False}
            text = render({"messages": [asked, calling], **inputs})
        except TemplateError:
            return False
        return all(word in text for word in (PROBE_NAME, _ARGUMENT, _VALUE)) and _REPR not in text


AS_GIVEN = Form(as_text=False, empty="")
FORMS = tuple(Form(as_text, empty) for empty in ("", None, _ABSENT) for as_text in (False, True))
