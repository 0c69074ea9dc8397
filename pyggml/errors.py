"""Errors that a user can cause. Each is one sentence: the thing, what was found, what was
wanted."""

from collections.abc import Callable, Iterable, Sequence

Fault = str | tuple[str, str]  # a sentence, or a setting and what is wrong with it


def suggestion(word: str, choices: Iterable[str]) -> str:
    """ ": did you mean 'lr'?" for a word that is nearly one of these, else ""."""
    import difflib  # 10 ms that no command waits for whose words are right

    near = difflib.get_close_matches(word, [*choices], 1)
    return f": did you mean {near[0]!r}?" if near else ""


def first_of(faults: Sequence[str], most: int) -> str:
    """The first `most` faults in one text, and how many more there are."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "; ".join([*faults[:most], *more])


def first_names(names: Sequence[str], most: int = 1) -> str:
    """The first `most` names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def cause_of(error: Exception) -> str:
    """Why the system refuses a file, without the file's name."""
    return str(getattr(error, "strerror", None) or error)


class PyggmlError(Exception):
    """Base of every error that input can cause; the command line prints it and exits with 2.

    faults   one or more sentences; a pair such as ("rank", "is 0, wanted 1 to 9") names a setting
    about    the text before them, such as a path and a colon
    """

    def __init__(self, faults: str | Iterable[Fault] = "", about: str = "") -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        self.about = about
        super().__init__(self.message(str))

    def message(self, named: Callable[[str], str]) -> str:
        """The message, with other names for settings, such as those of a command line."""
        parts = [f if isinstance(f, str) else f"{named(f[0])} {f[1]}" for f in self.faults]
        return self.about + "; ".join(dict.fromkeys(parts))


class ShapeError(PyggmlError):
    """Tensors whose shapes or types do not fit an op."""


class GraphError(PyggmlError):
    """Nodes without a possible order."""


class NoGradientError(PyggmlError):
    """An op between a parameter and the loss has no gradient."""


class GGUFError(PyggmlError):
    """A GGUF file that is damaged, hostile or not GGUF at all."""


class FileChangedError(GGUFError):
    """A file that was changed while it was in use."""


class QuantError(PyggmlError):
    """A tensor type that cannot be unpacked, or numbers that cannot be quantised."""


class TokenizerError(PyggmlError):
    """A vocabulary or pre-tokenizer that is not supported."""


class TemplateError(PyggmlError):
    """A chat template that is faulty, costs too much, or refuses these messages."""


class ModelError(PyggmlError):
    """A model whose architecture, hyperparameters or tensors do not fit together."""


class ConfigError(PyggmlError):
    """A setting out of range, or settings that exclude each other."""


class DataError(PyggmlError):
    """Training text that is empty, unreadable, malformed or too short."""


class NotFiniteError(DataError):
    """Numbers of a model that are none (NaN) or infinite: its weights or its adapter make them."""


class AdapterError(PyggmlError):
    """An adapter that does not fit the model it is used with."""


class CheckpointError(PyggmlError):
    """A checkpoint that is damaged or belongs to another run."""


class DeviceError(PyggmlError):
    """A device that is missing or too old, or refuses a call."""


class DeviceMemoryError(DeviceError):
    """A device that has less memory free than is asked of it."""


class DeviceLostError(DeviceError):
    """A device that failed while it computed: its numbers are gone."""
