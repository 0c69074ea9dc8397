"""Parameters of tests, some of which are among the quick ones."""

import pytest


def cases(every, quick):
    """Parameters for pytest.mark.parametrize; those of `quick` run in `pytest -m quick` too."""
    every, quick = list(every), set(quick)
    assert quick <= set(every), f"no case of this test: {quick - set(every)}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.quick] if case in quick else [],
        )
        for case in every
    ]
