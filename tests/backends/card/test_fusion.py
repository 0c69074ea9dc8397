"""Nodes that one kernel computes: the numbers of each node by itself."""

import numpy as np
import pytest
from card_patterns import numbers, patterns, sample_of

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import rewrites
from pyggml.backends.cuda.code.cluster_ptx import has_clusters
from pyggml.backends.cuda.runtime.device import CudaBackend
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import zeros
from pyggml.ops import add_inplace, out_prod, scale
from pyggml.quants import dequantize
from pyggml.runtime import Devices, bind, schedule

# A norm before digits: x is known to a unit of float32's last place there, and where x lies between
# two steps of a digit, that unit decides. Of 800 drawn launches every sixth had such an x, and none
# was further off than 1.8e-5 of its row's greatest number; without the low digits of one group the
# least is 8e-4.
OF_DIGITS = {
    "rms_norm_mul+mul_mat+mul_mat+mul_mat",
    "rms_norm_mul+mul_mat+mul_mat+swiglu",
    "rms_norm_mul+mul_mat",
}
# Likewise where a key lies between two float16: their distance is at most 2^-10 of it, and moved a
# row of the attention by 1.3e-3 of its greatest number at most, in 800 drawn rows.
OF_HALVES = {
    "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows",
    "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows+flash_attn_ext",
}
# Rounded to bfloat16 after a sum in another order: then a number may be its neighbour.
OF_BF16 = {
    "gated_gradients+saved+gradient_of_a+add+gradient_of_b+add+gradient_of_b+add",
    "rms_norm_mul+rms_norm_mul_back+add+wide_gradient",
    "rms_norm_mul_back+add+wide_gradient",
    "add+cpy+rms_norm_mul+wide_rows",
}
OF_ROWS = dict.fromkeys(OF_DIGITS, 4e-5) | dict.fromkeys(OF_HALVES, 3e-3)
OF_ROWS |= dict.fromkeys(OF_BF16, 8e-3)
OF_EXPERTS = {"mul_mat_id+mul_mat_id+swiglu+mul", "mul_mat_id+mul_mat_id+swiglu"}
OF_CLUSTERS = {"rms_norm_mul+mul_mat+soft_max+top_k+get_rows+repeat_back+clamp+div"}
OF_CLUSTERS |= {name for name in OF_BF16 if "norm" in name}
# A's digits are the same ones with and without what follows the product.
IN_BF16 = OF_DIGITS | OF_EXPERTS | {"mul_mat+add"}
ON_A_CARD = (
    IN_BF16
    | OF_BF16
    | OF_CLUSTERS
    | {
        "mul_mat+scale",
        "out_prod+scale",
        "rms_norm_mul+rope_apply",
        "rope_apply_back+rms_norm_mul_back",
        "rope_apply_back+rms_norm_mul_back+rms_norm_mul_back_w",
        "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows+flash_attn_ext",
    }
)


def ops_of(program, card):
    return [t.op.name for t in program.schedule.plans[card].graph.nodes]


def results(card, graph, changed=()):
    """The results of the second of two runs, and the leaves that it changes."""
    program = bind(schedule(graph, Devices([card, CPU()])))
    program()
    for t in changed:
        write(t, np.ones(t.shape, np.float32))
    program()
    found = ((t.dtype, program.read(t)) for t in graph.outputs)
    return program, [dequantize(x, "BF16") if kind is BF16 else x for kind, x in found]


@pytest.mark.parametrize("name", patterns())
def test_a_pattern_gives_the_numbers_of_its_nodes(name, card, monkeypatch):
    if SIMULATED and name in ON_A_CARD:
        pytest.skip("the simulator has no cuBLAS, no warps, and no products of bytes")
    card = CudaBackend(card.index, "bf16") if name in IN_BF16 else card
    if name in OF_CLUSTERS and not has_clusters():
        pytest.skip("the card, or the one that it stands for, has no clusters")
    graph, changed = sample_of(name)
    program, found = results(card, graph, changed)
    assert name in ops_of(program, card)
    monkeypatch.setattr(rewrites, "FUSIONS", ())
    for a, b in zip(found, results(card, graph, changed)[1], strict=True):
        if name in OF_ROWS:
            assert (abs(a - b) <= OF_ROWS[name] * abs(b).max(axis=-1, keepdims=True)).all()
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_result_that_others_read_is_made(card):
    total, a, b = zeros((5, 7)), numbers(3, 7), numbers(3, 5)
    product = out_prod(a, b)
    graph = Graph.of(add_inplace(total, product), scale(product, 2.0))
    program, (first, second) = results(card, graph, [total])
    assert "out_prod_add" not in ops_of(program, card)
    np.testing.assert_allclose(second, 2 * (first - 1), rtol=1e-5, atol=1e-5)


def test_a_product_whose_source_is_changed_before_the_sum_stays_apart(card):
    total, other, x = zeros((5, 7)), zeros((3, 7)), numbers(3, 5)
    product = out_prod(other, x)
    changed = add_inplace(other, numbers(3, 7))
    graph = Graph.of(changed, add_inplace(total, product))
    nodes = (product, changed, graph.outputs[1])
    graph = Graph(nodes, graph.leaves, graph.outputs)
    program, (_, found) = results(card, graph, [total, other])
    assert ops_of(program, card) == ["out_prod", "add", "add"]
    np.testing.assert_allclose(found, 1 + x.data.T @ np.ones((3, 7)), rtol=1e-5)


def test_what_a_fused_node_writes_is_read_on_another_device(card, monkeypatch):
    """Keys and values that the card put into the caches, by an attention that the host computes."""
    heads_alone = "+".join(("rms_norm_mul", "rope_apply") * 2 + ("set_rows",) * 2)
    plain = CudaBackend.refusal

    def refusal(self, node):
        lacks = node.op.name == "flash_attn_ext"
        return "the host shall have it" if lacks else plain(self, node)

    monkeypatch.setattr(CudaBackend, "refusal", refusal)
    graph, changed = sample_of(f"{heads_alone}+flash_attn_ext")
    with pytest.warns(RuntimeWarning, match="flash_attn_ext"):
        program, found = results(card, graph, changed)
    assert heads_alone in ops_of(program, card)
    program = bind(schedule(graph, Devices([CPU()])))
    for t in changed:
        write(t, np.ones(t.shape, np.float32))
    program()
    for a, b in zip(found, graph.outputs, strict=True):
        np.testing.assert_allclose(a, program.read(b), atol=3e-3 * abs(program.read(b)).max())
