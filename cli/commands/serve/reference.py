"""Every field that OpenAI's reference has of a chat's completion, and what is made of it here.

`params` reads the answered ones; the others are read from this table, and docs/serving.md has it as
it is written here (`python -m pyggml.cli.commands.serve.reference`).
"""

import json
from collections.abc import Mapping
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
    "prediction": ((), "wanted none: no text is predicted by the client"),
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


def read_rest(f: Fields) -> None:
    """Note the fields that are refused or ignored."""
    for name, (values, why) in REFUSED.items():
        f.only(name, values, why)
    f.ignore(*IGNORED)


def table() -> str:
    """Markdown."""
    rows = [(name, "answered", about) for name, about in ANSWERED.items()]
    for name, (values, why) in REFUSED.items():
        kept = f"; `{json.dumps(values[0])}` is accepted" if values else ""
        rows.append((name, "refused", f"{why}{kept}"))
    rows += [(name, "ignored", about) for name, about in IGNORED.items()]
    lines = [f"| `{name}` | {how} | {about} |" for name, how, about in sorted(rows)]
    return "\n".join(["| field | | |", "|---|---|---|", *lines])


if __name__ == "__main__":
    import click

    click.echo(table())
