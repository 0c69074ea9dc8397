"""docs/architectures.md is what its script writes."""

import importlib.util
from pathlib import Path

from pyggml.models import ARCHITECTURES

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("table", DOCS / "architectures_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compared = module.comparisons()
    assert all(compared[name] for name in ARCHITECTURES), "every architecture has a golden file"
    assert not module.names_without_reason(), "neither loaded nor left out with a reason"
    assert not module.names_without_class(), "neither transformers' class nor a reason"
    assert len(module.NAMES) == len(set(module.NAMES)) == 153
    assert set(ARCHITECTURES) <= set(module.NAMES), "llama.cpp's names"
    page = (DOCS / "architectures.md").read_text("utf-8")
    assert page == module.text(), "run python docs/architectures_table.py"
