"""What answers under each name: a model, with adapters or without, and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyggml.cli.commands.serve.chats import ChatWriter
from pyggml.cli.commands.serve.controls import Controls
from pyggml.cli.web.errors import ApiError, unknown_model
from pyggml.errors import PyggmlError
from pyggml.model import Model
from pyggml.models.embedder import Embedder


@dataclass(eq=False, slots=True)
class Voice:
    """n_ctx      most tokens of a prompt and its answer
    controls   control vectors that requests may name
    notes      what is to be said of its chats at the start
    embedders  by whether they rank, once they are asked for
    """

    name: str
    model: Model
    chats: ChatWriter
    n_ctx: int
    controls: Controls = field(default_factory=Controls)
    notes: Sequence[str] = ()
    embedders: dict[bool, Embedder] = field(default_factory=dict)

    def with_adapters(
        self,
        name: str,
        files: Sequence[tuple[Path, float]],
        chats: ChatWriter,
        notes: Sequence[str] = (),
    ) -> Voice:
        """One of the same weights with these adapters. Raises AdapterError."""
        model = self.model.with_adapter_files(*files)
        return replace(self, name=name, model=model, chats=chats, notes=notes, embedders={})


class Voices(Mapping[str, Voice]):
    """Voices by name, each opened when it is asked for, and anew after it was closed.

    One thread asks, adds and drops; another may close, and any look at the names.
    """

    def __init__(self) -> None:
        self._openers, self._open = dict[str, Callable[[], Voice]](), dict[str, Voice]()

    def __getitem__(self, name: str) -> Voice:
        voice = self._open.get(name)
        if voice is None:
            voice = self._open[name] = self._openers[name]()
        return voice

    def __contains__(self, name: object) -> bool:
        return name in self._openers

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._openers))

    def __len__(self) -> int:
        return len(self._openers)

    def is_open(self, name: str) -> bool:
        return name in self._open

    @property
    def of_open_models(self) -> list[Voice]:
        return [*self._open.values()]

    def ask(self, name: str | None) -> Voice:
        """The voice of a name; None: the first. Raises ApiError for a name that is none, and for a
        file that can no longer be opened."""
        name = next(iter(self)) if name is None else name
        if name not in self:
            raise unknown_model(name, tuple(self))
        try:
            return self[name]
        except PyggmlError as error:
            raise ApiError(503, f"{name} cannot be opened: {error}", "model") from None

    def add(self, name: str, opener: Callable[[], Voice]) -> Voice:
        """Open a further one; where that raises, it is not there."""
        voice = opener()
        self._open[name] = voice
        self.offer(name, opener)
        return voice

    def offer(self, name: str, opener: Callable[[], Voice]) -> None:
        """A further one, which is opened when it is asked for."""
        self._openers[name] = opener

    def drop(self, name: str) -> None:
        del self._openers[name]
        self._open.pop(name, None)

    def keep(self, models: Sequence[Model]) -> list[str]:
        """Close the voices of other weights than these; their names."""
        kept = [model.parts for model in models]
        names = [
            v.name for v in self.of_open_models if not any(v.model.parts is parts for parts in kept)
        ]
        for name in names:
            self._open.pop(name, None)
        return names
