"""pyggml is imported from a checkout that nothing installed, from a wheel and from an editable
installation; whichever it is, pyggml, pyggml.lora and pyggml.cli come from the same one."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHERE = """
import importlib.util, json
files = [importlib.import_module(f"pyggml{name}").__file__ for name in ("", ".lora", ".cli")]
others = ("tests", "docs", "pyggml", "lora.cli")
strangers = [name for name in others if importlib.util.find_spec(f"pyggml.{name}")]
print(json.dumps([files, strangers]))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder of links to all that is installed here but for pyggml."""
    folder = tmp_path_factory.mktemp("packages")
    for home in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(home).iterdir():
            if "pyggml" not in path.name:
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a checkout has of the package, and a folder that looks like a package."""
    folder = tmp_path_factory.mktemp("another") / "checkout"
    for name in ("pyggml", "lora", "cli"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests/test_nothing.py").write_text("")  # setuptools would take it along
    return folder


@pytest.fixture(scope="module")
def python(packages):
    """(arguments, folder, *more of the path) -> what Python says, without its site-packages."""

    def run(arguments, cwd, *path):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, packages)))}
        done = subprocess.run(
            [sys.executable, "-S", *arguments], cwd=cwd, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def installed(checkout, python, tmp_path_factory):
    """("wheel" or "editable") -> a folder with what pip would unpack in site-packages."""

    def build(kind):
        folder = tmp_path_factory.mktemp(kind)
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
        name = python(["-c", code], checkout).splitlines()[-1]
        with zipfile.ZipFile(folder / name) as file:
            file.extractall(folder)
        return folder

    return build


def homes(pyggml, beside):
    """What WHERE prints of a package here with lora/ and cli/ there, and nothing else."""
    return [[f"{folder}/__init__.py" for folder in (pyggml, beside / "lora", beside / "cli")], []]


def test_a_checkout_needs_no_installation(python):
    assert json.loads(python(["-c", WHERE], ROOT)) == homes(ROOT / "pyggml", ROOT)
    said = python(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_sizes.py"], ROOT)
    assert " passed" in said
    assert "finetune [OPTIONS]" in python(["-m", "pyggml.cli", "finetune", "--help"], ROOT)


def test_what_a_wheel_holds_is_all_that_is_imported(python, installed, checkout, tmp_path):
    folder = installed("wheel")
    assert json.loads(python(["-c", WHERE], tmp_path, folder)) == homes(
        folder / "pyggml", folder / "pyggml"
    )
    assert "finetune [OPTIONS]" in python(
        ["-m", "pyggml.cli", "finetune", "--help"], tmp_path, folder
    )
    assert json.loads(python(["-c", WHERE], ROOT, folder)) == homes(ROOT / "pyggml", ROOT)


def test_a_wheel_and_an_sdist_hold_what_is_needed_and_no_more(python, checkout):
    code = """
from setuptools import build_meta
print(build_meta.build_sdist("made"), build_meta.build_wheel("made"), sep="\\n")
"""
    build = checkout / "made"
    said = python(["-W", "error::UserWarning", "-c", code], checkout)
    assert "ignored" not in said, said
    sdist, wheel = (build / name for name in said.splitlines()[-2:])
    with tarfile.open(sdist) as file:
        inside = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    roots = {path.parts[0] for path in inside if path.parts}
    assert roots == {
        *("pyggml", "lora", "cli", "pyggml.egg-info", "pyproject.toml", "setup.cfg"),
        *("LICENSE", "README.md", "MANIFEST.in", "PKG-INFO"),
    }
    with zipfile.ZipFile(wheel) as file:
        licences = {Path(name).stem for name in file.namelist() if "/licenses/" in name}
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    in_tree = set()
    for package, home in (("pyggml", "pyggml"), ("pyggml/lora", "lora"), ("pyggml/cli", "cli")):
        files = [p for p in (checkout / home).rglob("*") if p.is_file()]
        in_tree |= {f"{package}/{p.relative_to(checkout / home)}" for p in files}
    assert names == in_tree
    # Of each library that the pages bring; of pyggml itself, LICENSE.
    assert licences == {"LICENSE", "uPlot", "marked", "DOMPurify", "regenerator-runtime"}


def test_an_editable_installation_is_its_checkout(python, installed, checkout, tmp_path):
    folder = installed("editable")
    code = f"import site; site.addsitedir({str(folder)!r})\n{WHERE}"
    assert json.loads(python(["-c", code], tmp_path)) == homes(checkout / "pyggml", checkout)
    assert json.loads(python(["-c", code], ROOT)) == homes(ROOT / "pyggml", ROOT), (
        "never half of another"
    )
