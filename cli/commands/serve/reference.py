"""Every field that OpenAI's reference has of a chat and of a response, and what is made of it here.

`params` and `responses` read the answered ones; the others are read from these tables, and
docs/serving.md has them as they are written here (`python -m pyggml.cli.commands.serve.reference`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyggml.cli.commands.serve.fields import Fields

ANSWERED = {
    "messages": "texts; pictures, sound and files are refused",
    "model": "a name of `/v1/models`; without it the first",
    "frequency_penalty": "as `presence_penalty`, -100 to 100",
    "logit_bias": "by token id or text, at most 1,024",
    "logprobs": "of the model's softmax at temperature 1",
    "max_completion_tokens": "",
    "max_tokens": "the same, by its older name",
    "n": "the prompt is computed once",
    "parallel_tool_calls": "false: at most one call where calls are held to a form",
    "prediction": "a text whose tokens are guessed, as those that `ngram` finds; refused of a "
    "model with states",
    "presence_penalty": "",
    "reasoning_effort": "an input of the chat template; refused where that reads none",
    "response_format": "`text`, `json_object`, `json_schema`, `strict` or not",
    "seed": "",
    "stop": "a text or up to 16 of them",
    "stream": "",
    "stream_options": "`include_usage`; `include_obfuscation` is without effect",
    "temperature": "",
    "tool_choice": "`auto`, `none`, `required`, a function, `allowed_tools`",
    "tools": "functions; those of type `custom` are refused",
    "top_logprobs": "at most 20",
    "top_p": "",
}
# The values that are accepted, and why no others are.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "wanted none: answers are text"),
    "function_call": ((), "wanted tool_choice, its newer name"),
    "functions": ((), "wanted tools, their newer name"),
    "modalities": ((["text"],), "wanted text alone"),
    "store": ((False,), "wanted false: nothing is kept"),
    "verbosity": (("medium",), "wanted medium: a prompt says how long an answer is to be"),
    "web_search_options": ((), "wanted none: nothing is searched"),
}
# They tell the server who asks, or what to keep; no answer depends on them.
IGNORED = {
    "metadata": "",
    "moderation": "no answer is moderated",
    "prompt_cache_key": "prompts that begin alike share the cache anyway",
    "prompt_cache_options": "likewise",
    "prompt_cache_retention": "a prompt stays until its place is used",
    "safety_identifier": "",
    "service_tier": "there is one",
    "user": "",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """The fields of one kind of request.

    answered   field -> what is to be said of it
    refused    field -> the values that are accepted, and why no others are
    ignored    field -> why nothing depends on it
    own        those that a chat has by another name or in another form
    """

    answered: Mapping[str, str]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]
    ignored: Mapping[str, str]
    own: frozenset[str] = frozenset()

    @property
    def fields(self) -> set[str]:
        return {*self.answered, *self.refused, *self.ignored}

    def read_rest(self, f: Fields) -> None:
        """Note the fields that are refused or ignored."""
        for name, (values, why) in self.refused.items():
            f.only(name, values, why)
        f.ignore(*self.ignored)

    def table(self) -> str:
        """Markdown."""
        rows = [(name, "answered", about) for name, about in self.answered.items()]
        for name, (values, why) in self.refused.items():
            kept = f"; `{json.dumps(values[0])}` is accepted" if values else ""
            rows.append((name, "refused", f"{why}{kept}"))
        rows += [(name, "ignored", about) for name, about in self.ignored.items()]
        lines = [f"| `{name}` | {how} | {about} |" for name, how, about in sorted(rows)]
        return "\n".join(["| field | | |", "|---|---|---|", *lines])


CHATS = Reference(ANSWERED, REFUSED, IGNORED)
_OF_RESPONSES = {
    "include": "`message.output_text.logprobs`; `reasoning.encrypted_content` is without effect",
    "input": "a text, or items: messages of text, `function_call`, `function_call_output`, "
    "`reasoning`; others are refused",
    "instructions": "the first message, a system's",
    "max_output_tokens": "",
    "reasoning": "`effort`, an input of the chat template; of `summary` `auto`: thoughts are whole",
    "text": "`format`: `text`, `json_object`, `json_schema`; of `verbosity` `medium`",
    "tool_choice": ANSWERED["tool_choice"],
    "tools": "functions; others are refused: this server runs none",
}
_NOT_KEPT = "wanted none: nothing is kept"
_REFUSED_OF_RESPONSES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "wanted false: an answer comes at once"),
    "context_management": ((), "wanted none: no context is made shorter"),
    "conversation": ((), _NOT_KEPT),
    "max_tool_calls": ((), "wanted none: this server runs no tool"),
    "previous_response_id": ((), _NOT_KEPT),
    "prompt": ((), "wanted input: no prompt is kept"),
    "store": REFUSED["store"],
    "truncation": (("disabled",), "wanted disabled: no input is cut"),
}
_SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_logprobs", "top_p")
RESPONSES = Reference(
    _OF_RESPONSES
    | {name: ANSWERED[name] for name in _SAME}
    | {"stream_options": "`include_obfuscation`, without effect: the last event has the usage"},
    _REFUSED_OF_RESPONSES,
    IGNORED,
    frozenset({*_OF_RESPONSES, *_REFUSED_OF_RESPONSES}),
)


if __name__ == "__main__":
    import click

    click.echo(f"{CHATS.table()}\n\n{RESPONSES.table()}")
