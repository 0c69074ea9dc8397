"""Fuzzing that coverage guides: `python -m attacks.guided TARGET [libFuzzer's options]`.

Atheris runs it. An input that reaches new lines of the parser joins those that are changed, and is
kept in `reached/TARGET`, where the command was started. `-runs=N` and `-max_total_time=SECONDS` end
it.
`python -m attacks.fuzz TARGET --keep reached/TARGET` puts the fewest of them into the corpus.
"""

import sys
from pathlib import Path

import atheris

# Numba compiles the bytecode of kernels, which must be left as it is: these rooms hold them.
_ROOT = Path(__file__).parents[1]
_KERNELS = ("backends", "jit", "kernels", "ops", "quants", "eager", "backward")


def _modules(room: str) -> list[str]:
    """The names of all modules of a room of pyggml."""
    files = (_ROOT / "pyggml" / room).rglob("*.py")
    parts = (file.relative_to(_ROOT).with_suffix("").parts for file in files)
    return [".".join(p for p in names if p != "__init__") for names in parts]


_LEFT = [module for room in _KERNELS for module in _modules(room)]

with atheris.instrument_imports(include=["pyggml"], exclude=_LEFT):
    from attacks.fuzz import CORPUS, MOST_INPUT, Tally, check, warm_up
    from attacks.targets import TARGETS


def main() -> None:
    """Fuzz one target; libFuzzer ends the process."""
    target, tally = TARGETS[sys.argv[1]], Tally()
    with atheris.instrument_imports(include=["pyggml"], exclude=_LEFT):
        warm_up(target)

    def one(data: bytes) -> None:
        check(target, data, tally)
        for what in tally.failures:
            raise AssertionError(what)

    corpus, reached = CORPUS / target.name, Path("reached") / target.name
    for folder in (corpus, reached):
        folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        (reached / f"seed-{i}").write_bytes(data)
    options = [f"-max_len={MOST_INPUT}", *sys.argv[2:]]
    atheris.Setup([sys.argv[0], *options, str(reached), str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
