"""What a guide in docs/ says to write, written: into a file beside the checkout, or into a copy.

A file beside it is a plugin of pytest's, imported before all tests, in which the new thing enters
its table; the kernels of the checkout stay compiled. In a copy all are compiled anew.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def blocks_of(page):
    """The Python of a page, block by block."""
    return PYTHON.findall((DOCS / page).read_text("utf-8"))


def copy_of(folder, *parts):
    """The checkout's pyproject.toml and these folders of it, in this folder."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for part in parts:
        left_out = shutil.ignore_patterns("__pycache__", "golden")
        shutil.copytree(ROOT / part, folder / part, ignore=left_out)
    if "tests" in parts:
        (folder / "tests/golden").symlink_to(ROOT / "tests/golden", target_is_directory=True)
    return folder


def edit(file, before, after):
    """Replace what stands once in a file."""
    text = file.read_text("utf-8")
    assert text.count(before) == 1, f"{file.name} has {before!r} {text.count(before)} times"
    file.write_text(text.replace(before, after), "utf-8")


def run_tests(tree, *arguments, plugins=None, **environment):
    """pytest in a tree, with the modules of a folder as its plugins; how many tests passed."""
    paths = [plugins] if plugins else []
    names = (
        [part for each in sorted(plugins.glob("*.py")) for part in ("-p", each.stem)]
        if plugins
        else []
    )
    paths += [] if (tree / "pyggml").exists() else [ROOT]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *names, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    return int(re.search(r"(\d+) passed", run.stdout)[1])
