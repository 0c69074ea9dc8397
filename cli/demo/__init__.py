"""What `pyggml-finetune --demo` trains, on what, and how: no file and no network is needed.

base.gguf         Qwen 3's architecture, 2.3 million weights as Q8_0, a vocabulary of 1,024 tokens;
                  made by examples/pretrain.py from Sherlock Holmes stories (public domain)
shakespeare.txt   Richard II from its third act on, and Romeo and Juliet (public domain)

The base model goes on in prose, whatever the prompt; after the demo it writes speakers and verse.
"""

from importlib.resources import files
from pathlib import Path

from pyggml.errors import ConfigError

_FOLDER = Path(str(files(__name__)))
BASE = _FOLDER / "base.gguf"
TEXT = _FOLDER / "shakespeare.txt"
OUTPUT = Path("demo-adapter.gguf")
PROMPT = "ROMEO:\n"  # the base model takes it for a word of a story, the tuned one for a speaker

# Arguments of LoraConfig.
DEMO_LORA = {
    "rank": 16,  # a new form and new words to learn; a tenth as many numbers as the model has
    "alpha": 32.0,  # twice the rank, as with the default settings
}
# Arguments of DataConfig.
DEMO_DATA = {
    "ctx": 128  # what the base model was trained with; some ten lines of verse
}
# Arguments of TrainConfig; a step takes 0.14 s on two cores, so all of them a minute.
DEMO_TRAIN = {
    "batch": 4,  # 512 tokens: half as many steps with twice as many got less far
    "max_steps": 400,  # the loss still falls, but slowly
    "lr": 5e-3,  # small models bear and want more than the default
    "warmup_steps": 10,
    "val_every": 100,
    "val_windows": 16,
}
# The same by the names that the command line has for them.
SETTINGS = {
    "lora_rank": DEMO_LORA["rank"],
    "lora_alpha": DEMO_LORA["alpha"],
    **DEMO_DATA,
    **DEMO_TRAIN,
}


def check() -> None:
    """ConfigError if this installation came without the demo's files."""
    missing = [p.name for p in (BASE, TEXT) if not p.is_file()]
    if missing:
        raise ConfigError(f"{BASE.parent}: lacks {' and '.join(missing)}, which --demo needs")
