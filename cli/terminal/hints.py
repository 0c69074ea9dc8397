"""Command lines that a sentence tells to try: as they work where this process was started."""

import shutil


def program(command: str = "") -> list[str]:
    """The words that start a command; ["pyggml"], or of a checkout that is not installed
    ["python", "-m", "pyggml"]. `finetune` is `pyggml-finetune` where that is installed."""
    if shutil.which("pyggml") is None:
        return ["python", "-m", "pyggml", *filter(None, [command])]
    return ["pyggml-finetune"] if command == "finetune" else ["pyggml", *filter(None, [command])]
