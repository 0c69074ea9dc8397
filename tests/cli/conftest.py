"""A tiny random llama model with a vocabulary of bytes, a text, and the commands, in-process."""

import signal
from dataclasses import dataclass
from functools import cache

import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

from pyggml.cli import __main__ as cli
from pyggml.lora import Trainer
from pyggml.lora.data import languages

# A process that trains once lets go of it; unpacking it in each run takes half as long as the run.
languages._identifier = cache(languages._identifier)


@pytest.fixture(scope="session")
def model_with(tmp_path_factory):
    """Writes the tiny model with changed metadata (None removes a key); its path."""

    def make(**changes):
        metadata = VOCABULARY | {key.replace("__", "."): v for key, v in changes.items()}
        path = tmp_path_factory.mktemp("model") / "tiny.gguf"
        return write_llama(path, len(TOKENS), n_layer=2, seed=5, keys=metadata)

    return make


@pytest.fixture(scope="session")
def tiny(model_with):
    return model_with()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """500 bytes, of which each line repeats the last."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the path to the other thing\n" * 18)
    return path


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def row(self, label):
        """The first line of the table that starts with this word."""
        found = next(x for x in self.out.splitlines() if x.startswith(label + " "))
        return found[len(label) :].strip()


@pytest.fixture
def pyggml(capsys):
    """Runs `pyggml ARGUMENTS` in this process."""

    def call(*arguments):
        code = cli.main([str(a) for a in arguments])
        return Ended(code, *capsys.readouterr())

    return call


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Hints name the commands, as where pyggml is installed."""
    monkeypatch.setattr("pyggml.cli.terminal.hints.shutil.which", lambda name: f"/bin/{name}")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """Where these tests keep tokens: not in the user's cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("pyggml.cli.commands.finetune.job.user_cache", lambda: folder)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """A run that shows what it learned writes this many tokens, of 60."""
    monkeypatch.setattr("pyggml.cli.terminal.samples.N_TOKENS", 8)


@pytest.fixture
def finetune(pyggml, tiny, text, tmp_path):
    """Runs a short `pyggml finetune` over the tiny model; options given later win."""

    def call(*arguments, model=tiny, data=text, output=tmp_path / "adapter.gguf", rank=2):
        short = ("--ctx", 16, "--max-steps", 4, "--prompt", "the ")
        short += () if rank is None else ("--lora-rank", rank)
        files = () if data is None else ("-f", data)
        return pyggml("finetune", "-m", model, *files, "-o", output, *short, *arguments)

    return call


@pytest.fixture
def ctrl_c():
    """As in a terminal, even if the tests run in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def signal_after(ctrl_c, monkeypatch):
    """signal_after(step, n): n times SIGINT when this step has just been made."""

    def plant(step, n=1):
        whole = Trainer._step

        def made(self):
            report = whole(self)
            for _ in range(n if report.step == step else 0):
                signal.raise_signal(signal.SIGINT)
            return report

        monkeypatch.setattr(Trainer, "_step", made)

    return plant
