"""What `pyggml-finetune --demo` trains, on what, and how: no file and no network is needed."""

from pathlib import Path

from pyggml.errors import ConfigError

BASE = Path(__file__).with_name("base.gguf")
TEXT = Path(__file__).with_name("shakespeare.txt")
OUTPUT = Path("demo-adapter.gguf")
PROMPT = "ROMEO:\n"
# Parameters of the command line: enough steps that the text changes, few enough for three minutes.
SETTINGS = {
    "ctx": 128,
    "batch": 4,
    "max_steps": 120,
    "lr": 2e-3,
    "warmup_steps": 5,
    "val_windows": 8,
    "val_every": 40,
}


def check() -> None:
    """ConfigError if this installation came without the demo's files."""
    missing = [p.name for p in (BASE, TEXT) if not p.is_file()]
    if missing:
        raise ConfigError(f"{BASE.parent}: lacks {' and '.join(missing)}, which --demo needs")
