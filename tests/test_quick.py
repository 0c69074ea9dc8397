"""The list of `pytest -m quick` is held to the tests that there are."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from quick import QUICK

HERE = Path(__file__).parent


def test_every_folder_of_tests_has_some():
    folders = {p.parent.relative_to(HERE).as_posix() for p in HERE.rglob("test_*.py")}
    folders.remove("backends/card")  # collected on a card, or in a process of its own
    assert folders == {Path(file).parent.as_posix() for file in QUICK}


def test_every_pattern_names_a_test(request):
    config = request.config
    if config.args != [str(config.rootpath / p) for p in config.getini("testpaths")] and (
        config.args != config.getini("testpaths")
    ):
        pytest.skip("only some of the tests were collected")
    if config.option.keyword or config.option.markexpr not in ("quick", ALL):
        pytest.skip("only some of the tests were selected")
    names = defaultdict(set)
    for item in request.session.items:
        names[item.path.relative_to(HERE).as_posix()].add(item.name)
    for file, patterns in QUICK.items():
        assert (HERE / file).exists()
        if file not in names:  # a package of an extra is missing, and the whole file is skipped
            continue
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names[file]), f"{file}: {pattern}"


ALL = "not interop and not slow"
