"""Which chat template a command uses: the one that it is told, else that with which an adapter was
trained, else the model's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pyggml.chat import (
    BUILT_IN,
    MODEL,
    ChatTemplate,
    carried_metadata,
    carries_template,
    find_template,
    write_alike,
)
from pyggml.cli.terminal.help import F, grouped_option
from pyggml.cli.terminal.options import Adapter
from pyggml.cli.terminal.places import FileWord
from pyggml.cli.terminal.show import note, say
from pyggml.errors import TemplateError
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer


def chat_template_options(group: str = "text", common: bool = True) -> Callable[[F], F]:
    """--chat-template and --chat-template-kwargs."""
    template = grouped_option(
        group,
        "--chat-template",
        f"chat template: model is the one in its file; {', '.join(BUILT_IN)}; or a file "
        "(default: as the adapter was trained, else model)",
        type=FileWord(),
        metavar="WORD",
        common=common,
        brief="chat template, a name or a file",
    )
    inputs = grouped_option(
        group,
        "--chat-template-kwargs",
        'further inputs of the chat template: {"enable_thinking": false}',
        metavar="JSON",
        default="",
        show_default=False,
        common=False,
    )
    return lambda function: template(inputs(function))


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """A template, and where it came from.

    template   as `find_template` takes it
    by         the adapter that decided, where the model itself writes chats in another way
    differing  adapters that were trained with another template
    """

    template: str
    by: Path | None
    differing: tuple[Path, ...]

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        notes = []
        if self.by is not None:
            notes.append(
                f"chats are written as {self.by.name} was trained; --chat-template model takes the "
                "model's own way"
            )
        return notes + [
            f"{path.name} was trained with another chat template: --chat-template {path} takes it"
            for path in self.differing
        ]

    def say_notes(self) -> None:
        """Print them beside the output."""
        for text in self.notes:
            note(text)

    @property
    def metadata(self) -> dict[str, str | None]:
        """The keys with which a file that is made of the adapters carries it."""
        return carried_metadata(Path(self.template)) if self.template != MODEL else {}

    def say(self) -> None:
        """Print what became of the adapters' templates in a file that is made of them."""
        if self.by is not None:
            say(f"chats are written as {self.by.name} was trained")
        for path in self.differing:
            say(f"{path.name} was trained with another chat template")


def choose_template(
    tokenizer: Tokenizer, adapters: Iterable[Adapter], told: str | None
) -> TemplateChoice:
    """The template of a model with these adapters, whatever their weights. told: the user's choice.

    Without one the last adapter that carries a template decides: it was trained on top of the
    others, if on any.
    """
    carriers = [path for path, _ in adapters if carries_template(path)]
    by = carriers[-1] if carriers and told is None else None
    name = told or (str(by) if by else MODEL)
    differing = tuple(path for path in carriers if not _are_alike(tokenizer, str(path), name))
    if by is not None and _are_alike(tokenizer, name, MODEL):
        by = None
    return TemplateChoice(name, by, differing)


def template_for(
    model: Model, adapters: Iterable[Adapter], told: str | None, names: str = ""
) -> ChatTemplate:
    """The template of a model with these adapters; what a user should know of it is printed."""
    choice = choose_template(model.tokenizer, adapters, told)
    choice.say_notes()
    return find_template(model.tokenizer, choice.template, names=names)


def own_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of the model's own file; None if it has none."""
    try:
        return find_template(tokenizer)
    except TemplateError:
        return None


def _are_alike(tokenizer: Tokenizer, a: str, b: str) -> bool:
    """Whether both are there, and write chats alike with the same further inputs."""
    if a == b:
        return True
    try:
        first, second = (find_template(tokenizer, name) for name in (a, b))
    except TemplateError:
        return False
    return first.names == second.names and write_alike(first, second)
