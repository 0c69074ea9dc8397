"""`pyggml serve`: the options, and what starts the server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.terminal.chat_templates import chat_template_options
from pyggml.cli.terminal.generation import sampling_of, sampling_options
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.options import (
    CONTROL_ALIASES,
    ONE_MODEL,
    Adapter,
    AdapterFile,
    check_control_layers,
    compute_options,
    control_layers_option,
    draft_option,
    given_settings,
    pooling_option,
    settings_options,
)
from pyggml.cli.terminal.places import InputPath, Reads, WordType
from pyggml.cli.web.listening import check_packages, is_loopback, listening
from pyggml.errors import ConfigError
from pyggml.files import in_characters, read_bytes
from pyggml.generation import Context

_MOST_BYTES = 1 << 20  # of a file of keys
Named = tuple[str, Adapter]


class NamedAdapter(Reads, WordType):
    """A name for clients of an adapter or a control vector, and its file: shakespeare=a.gguf:0.5;
    without a name, a."""

    name, of = "adapter", tuple

    def read(self, value: Any) -> Named:
        name, equals, rest = str(value).partition("=")
        if not equals or Path(value).exists():
            name, rest = "", value
        file = AdapterFile().convert(rest, None, None)
        return in_characters(name or file[0].stem), file


@grouped_command(
    "serve",
    "pyggml serve -m model.gguf --web",
    "pyggml serve -m model.gguf --lora mine=adapter.gguf --lora theirs=other.gguf:0.5",
    "PYGGML_API_KEY=secret pyggml serve -m model.gguf --host 0.0.0.0 --parallel 4",
    params=[
        *settings_options(Limits, {}),
        *settings_options(Context, {}),
        *sampling_options(without=["seed", "logprobs"]),
    ],
    quiet="address or settings",
)
@grouped_option("model", "-m --model", **ONE_MODEL, type=MODEL)
@grouped_option(
    "model",
    "--models",
    "serve the models of this folder by their names, beside that of -m or instead of it; each "
    "is opened when it is asked for, and they take turns",
    type=InputPath(),
    metavar="FOLDER",
    common=False,
)
@grouped_option(
    "model",
    "--lora",
    "adapter that clients ask for as the model NAME; a NAME that is given again combines its "
    "adapters: their updates add up",
    type=NamedAdapter(),
    multiple=True,
    metavar="NAME=ADAPTER[:WEIGHT]",
)
@grouped_option(
    "model",
    "--adapters",
    "let clients load the adapters of this folder, and drop them, while the server runs: "
    "/v1/adapters",
    type=InputPath(),
    metavar="FOLDER",
    common=False,
)
@grouped_option(
    "model",
    "--control-vector",
    "control vector to add after blocks; requests name others of these, by NAME and scale; 0 "
    "leaves one to them",
    type=NamedAdapter(),
    multiple=True,
    metavar="NAME=FILE[:SCALE]",
    common=False,
    aliases=CONTROL_ALIASES,
)
@control_layers_option
@draft_option
@grouped_option(
    "model",
    "--alias",
    "the name of the model without adapters (default: its file's)",
    metavar="NAME",
    common=False,
)
@chat_template_options("model", common=False)
@compute_options
@grouped_option("server", "--host", "address  [default: 127.0.0.1]", default="127.0.0.1")
@grouped_option(
    "server",
    "--port",
    "port; 0 takes a free one  [default: 8080]",
    type=click.IntRange(0, 65535),
    default=8080,
    metavar="N",
)
@pooling_option("server", common=False)
@grouped_option("server", "--web", "a chat page at /", is_flag=True)
@grouped_option(
    "server",
    "--api-key",
    "key that clients must send, needed where others can connect; may be given several "
    "times, or as PYGGML_API_KEY, which other users of this machine do not see",
    multiple=True,
    envvar="PYGGML_API_KEY",
    metavar="KEY",
    brief="key that clients must send",
)
@grouped_option(
    "server",
    "--api-key-file",
    "file of keys, one a line, besides those of --api-key; # begins a comment",
    type=InputPath(),
    common=False,
)
@grouped_option(
    "server",
    "--log-requests",
    "print a line of JSON for each request: path, status, times, tokens; no text of anyone",
    is_flag=True,
    common=False,
)
@grouped_option(
    "server",
    "--allow-host",
    "name by which clients may call this server, besides the address",
    multiple=True,
    metavar="NAME",
    common=False,
)
@grouped_option(
    "server",
    "--allow-origin",
    "site whose pages may call this server, such as https://example.org (default: none)",
    multiple=True,
    metavar="URL",
    common=False,
)
def command(**given: Any) -> int:
    """Answer OpenAI's clients: chats, texts, streams, adapters by name."""
    check_packages("serve", "starlette", "uvicorn")
    limits = Limits(**given_settings(Limits, {}, given))
    context = Context(**given_settings(Context, {}, given))
    sampling = sampling_of(given)
    check_control_layers(given["control_vector_layers"], given["control_vector"])
    given["api_key"] = (*given["api_key"], *keys_of(given["api_key_file"]))
    _check_access(given["host"], given["api_key"])
    for name in ("adapters", "models"):
        if given[name] is not None and not given[name].is_dir():
            raise ConfigError([(name, f"is {given[name]}, wanted a folder")])
    _check_models(given)
    with listening(given["host"], given["port"]) as opened:
        from pyggml.cli.commands.serve.startup import run

        return run(opened, sampling, limits, context, given)


def _check_models(given: Mapping[str, Any]) -> None:
    """ConfigError without a model, and for what wants one of its own."""
    if given["model"] is None and given["models"] is None:
        raise ConfigError("no model is given, wanted -m FILE or --models FOLDER")
    for name in ("lora", "control_vector", "draft", "alias") if given["model"] is None else ():
        if given[name]:
            raise ConfigError([(name, "belongs to one model, wanted -m FILE beside it")])


def keys_of(path: Path | None) -> tuple[str, ...]:
    """The keys of a file. ConfigError for one without any, or that cannot be read."""
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in read_bytes(path, _MOST_BYTES).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise ConfigError(
            [("api_key_file", f"is {path}, which cannot be read: {reason}")]
        ) from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError([("api_key_file", f"is {path}, which has no key")])
    return keys


def _check_access(host: str, keys: tuple[str, ...]) -> None:
    if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ConfigError([("api_key", "has a character that no header can hold")])
    if not keys and not is_loopback(host):
        raise ConfigError(
            [("host", f"is {host}, where others can connect: wanted --api-key beside it")]
        )
