"""docs/ops.md says what the registry says; every op of ggml is there or left out for a reason."""

import importlib.util
from pathlib import Path

import pytest

from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp, GGMLUnaryOp
from pyggml.ops import OPS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("ops_table", DOCS / "ops_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(script):
    assert (DOCS / "ops.md").read_text(encoding="utf-8") == script.table(), (
        "run python docs/ops_table.py"
    )


def test_every_op_is_here_or_left_out_for_a_reason(script):
    here = {(type(op.ggml), op.ggml) for op in OPS.values()}
    for e in (*GGMLOp, *GGMLUnaryOp, *GGMLGLUOp):
        ways = ((type(e), e) in here, e.name in script.BUILT, e.name in script.LEFT_OUT)
        is_group = e.name in ("NONE", "UNARY", "GLU")
        assert sum(ways) == 1 or is_group, (e, ways)


def test_facts_are_about_ops_that_exist(script):
    names = {e.name for e in (*GGMLOp, *GGMLUnaryOp, *GGMLGLUOp)}
    facts = (script.UPSTREAM_GRADIENTS, script.QVAC_GRADIENTS, script.NOT_IN_QVAC, script.FAULTS)
    assert set().union(script.BUILT, script.LEFT_OUT, *facts) <= names
