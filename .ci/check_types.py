"""mypy from the checkout: `python .ci/check_types.py [FILE...]`, without files all of pyggml.

lora/ and cli/ stand at the root of the checkout and are installed as pyggml.lora and pyggml.cli,
which mypy cannot be told. So it looks at a tree of links in .mypy_cache, where they lie in pyggml.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".mypy_cache" / "installed"
INSIDE = ("lora", "cli")  # of pyggml, once installed


def link_tree() -> None:
    """pyggml/ as an installation has it, of links to the checkout."""
    shutil.rmtree(TREE, ignore_errors=True)
    (TREE / "pyggml").mkdir(parents=True)
    for source in (*(ROOT / "pyggml").iterdir(), *(ROOT / name for name in INSIDE)):
        (TREE / "pyggml" / source.name).symlink_to(source, source.is_dir())


def installed(file: str) -> str:
    """lora/trainer/loop.py -> pyggml/lora/trainer/loop.py."""
    path = Path(file).resolve().relative_to(ROOT)
    return str(Path("pyggml", path) if path.parts[0] in INSIDE else path)


def main(files: list[str]) -> int:
    wanted = [installed(f) for f in files] or ["--package", "pyggml"]
    link_tree()
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *wanted],
        cwd=TREE,
        env=os.environ | {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    inside = "|".join(INSIDE)
    sys.stdout.write(re.sub(rf"^pyggml/({inside})/", r"\1/", done.stdout, flags=re.M))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
