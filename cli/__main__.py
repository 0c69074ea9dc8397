"""`pyggml COMMAND …` and `pyggml-finetune …`; only the command that is called is imported."""

import importlib
import sys
from collections.abc import Sequence

import click

from pyggml import __version__
from pyggml.cli.terminal.exit import run

COMMANDS = {
    "finetune": "train a LoRA adapter for a GGUF model",
    "heal": "give a quantised model back what quantising took",
    "sweep": "fine-tune with several values of settings, and compare",
    "teach": "keep what a teacher says of a text, for finetune --objective distill",
    "generate": "write text that follows a prompt",
    "chat": "talk with a model, by its own chat template",
    "serve": "answer requests of OpenAI's clients, also in a browser",
    "embed": "turn texts into vectors, or score them as answers",
    "eval": "how good models and adapters are, and how they differ",
    "perplexity": "how well a model predicts a text, as llama.cpp computes it",
    "control-vector": "make a control vector of texts of two kinds",
    "imatrix": "measure which columns of a model's matrices matter, for quantize",
    "merge": "add adapters to the weights of a model",
    "ablate": "make the adapter that takes heads and neurons of a model away",
    "compare": "what an adapter, or packing in other types, changes of a model",
    "combine": "make one adapter of several, or one of a lower rank",
    "extract": "make the adapter that turns one model nearly into another",
    "convert-lora": "turn an adapter of PEFT into one of llama.cpp, or back",
    "export-ollama": "write the Modelfile of a model, its adapter and its template",
    "quantize": "pack a model's matrices as another type",
    "tokenizer": "make a vocabulary of a text",
    "new": "write a model of random weights, to be trained from scratch",
    "inspect": "what is in a GGUF file, and what training it would take",
    "view": "browse a model, its graph, its memory plan and its runs in a browser",
    "warmup": "compile all kernels now, so that later commands start at once",
}


class _Commands(click.Group):
    """A group whose help comes from the table above, so that it imports no command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; a near miss gets a suggestion."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib  # 10 ms that no other command waits for

            near = difflib.get_close_matches(name, COMMANDS, 1)
            if near:
                ctx.fail(f"No such command '{name}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def command(name: str) -> click.Command:
    """The click command in pyggml.cli.commands.NAME, with _ for - in the name."""
    module_command = importlib.import_module(
        f"pyggml.cli.commands.{name.replace('-', '_')}"
    ).command
    assert isinstance(module_command, click.Command)
    return module_command


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="pyggml %(version)s")
@click.pass_context
def pyggml(ctx: click.Context) -> None:
    """Fine-tune LoRA adapters on quantised GGUF models, and look inside."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """The command `pyggml`; its exit code."""
    return run(lambda: pyggml, "pyggml", args)


def finetune(args: Sequence[str] | None = None) -> int:
    """The command `pyggml-finetune`; its exit code."""
    return run(lambda: command("finetune"), "pyggml-finetune", args)


if __name__ == "__main__":
    sys.exit(main())
