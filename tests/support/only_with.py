"""Command lines of ours where the packages of an installation with some extras are all there is.

    python only_with.py EXTRA,EXTRA < JSON: argument lists > JSON: (exit code, what it said) of each

Whatever else is installed is not found, neither what other extras bring nor what tests want.
"""

import contextlib
import io
import json
import re
import sys
import tomllib
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?")


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installation(extras):
    """The names of all distributions that pip installs for pyggml with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    names = set()
    while wanted:
        name, more = _REQUIREMENT.match(wanted.pop()).groups()
        new = {(plain(name), extra) for extra in ("", *(more or "").split(","))} - names
        names |= new
        for _, extra in new:
            with contextlib.suppress(PackageNotFoundError):
                wanted += [r for r in requires(name) or () if applies(r, extra)]
    return {name for name, _ in names}


def applies(requirement, extra):
    """Whether a requirement is one of its package, or of this extra of it."""
    of = re.search(r"""extra *== *['"]([\w-]+)""", requirement)
    return of is None if not extra else of is not None and of[1] == extra


class Only:
    """Finds no module of any other distribution."""

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

    def __init__(self, distributions):
        self.hidden = {
            module
            for module, owners in packages_distributions().items()
            if not {plain(owner) for owner in owners} & {*distributions, "pyggml"}
        }

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in self.hidden
        return None if hidden else PathFinder.find_spec(name, path, target)


def main(extras):
    sys.meta_path[sys.meta_path.index(PathFinder)] = Only(installation(extras))
    from pyggml.cli import __main__ as cli

    ended = []
    for name, *arguments in json.loads(sys.stdin.read()):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            sys.stdin = io.StringIO("")
            code = cli.finetune(arguments) if name == "pyggml-finetune" else cli.main(arguments)
        ended.append((code, said.getvalue()))
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main([extra for extra in sys.argv[1].split(",") if extra])
