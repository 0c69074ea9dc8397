"""The WebGPU device against the host, on whatever adapter there is: software Vulkan will do."""

import re
import sys
from pathlib import Path
from typing import ClassVar

import dice
import numpy as np
import pytest
from extras import need
from packed_blocks import scaled_blocks
from processes import printed

from pyggml import ops
from pyggml.backends.cpu import CPU
from pyggml.errors import DeviceError, PyggmlError
from pyggml.extras import how_to_install
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, DTYPES, F16, F32
from pyggml.graph.tensor import as_leaf, leaf
from pyggml.look.check import in_float64
from pyggml.ops import OPS
from pyggml.quants import QUANTS, quantize
from pyggml.runtime import Devices, results
from pyggml.runtime.choice import backends_of

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
# fmt: off
WITHOUT_A_KERNEL = {
    "acc", "accumulate", "advance", "arange", "argmax", "clip_factor", "conv_2d_back_w",
    "conv_2d_direct", "conv_transpose_2d", "count_equal", "cpy_into", "cumsum",
    "cumsum_back", "diag", "diag_back", "gated_delta_net", "gated_delta_net_back",
    "gated_linear_attn", "get_rows_back_add", "group_norm", "group_norm_back", "im2col",
    "im2col_back", "likeliest", "opt_step_adamw_clipped", "opt_step_lion_clipped",
    "opt_step_sgd_clipped",
    "pad",
    "pad_back", "pad_reflect_1d", "pad_reflect_1d_back", "pool_avg", "pool_avg_back", "pool_max",
    "pool_max_back", "linear_cross_entropy_back_w", "mul_mat_gated",
    "rescale_back_linear_cross_entropy",
    "rescale_back_out_prod_id", "roll", "roll_back", "rwkv_wkv6", "rwkv_wkv7", "set",
    "solve_tri", "solve_tri_t", "ssm_scan", "ssm_scan_back",
    "timestep_embedding", "tri", "upscale", "upscale_back", "view_back", "wkv_back",
}
# fmt: on
OPS_THERE = sorted(n for n, op in OPS.items() if not op.is_view and n not in WITHOUT_A_KERNEL)
pytestmark = pytest.mark.filterwarnings("ignore:webgpu leaves")


def test_the_package_does_not_import_wgpu():
    code = "import sys, pyggml, pyggml.model; sys.exit('wgpu' in sys.modules)"
    printed(code)


def test_without_wgpu_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wgpu", None)
    message = f"no WebGPU device: wgpu is missing, wanted {how_to_install('webgpu')}"
    with pytest.raises(DeviceError, match=re.escape(message)):
        backends_of("webgpu")


# -- ops ----------------------------------------------------------------------------------------


def test_a_wgpu_that_lacks_a_part_is_a_sentence(monkeypatch):
    wgpu = pytest.importorskip("wgpu")

    def lacks(**_):
        raise ModuleNotFoundError("No module named 'cffi'")

    monkeypatch.setattr(wgpu.gpu, "request_adapter_sync", lacks)
    with pytest.raises(DeviceError, match="^no WebGPU device: No module named 'cffi'; wanted"):
        backends_of("webgpu")


def test_these_ops_have_kernels(gpu):
    from pyggml.backends.webgpu.runtime.table import kernels

    assert set(kernels()) == set(OPS_THERE)


@pytest.mark.parametrize("name", OPS_THERE)
def test_the_kernel_agrees_with_the_reference(name, gpu):
    agrees(name, gpu)


def test_halves_are_rounded_with_the_host_s_dice(gpu):
    dice.expect_the_host_s(gpu)


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy_rows",
        "linear_soft_cross_entropy",
        "norm_back",
        "rms_norm",
        "soft_max",
        "sum_rows",
    ],
)
def test_the_kernel_agrees_without_subgroups(name, plain):
    agrees(name, plain)


def agrees(name, gpu):
    """Hold a kernel to the reference of its op, on all its samples."""
    op, computed = OPS[name], 0
    for twice in zip(*(op.samples(np.random.default_rng(5)) for _ in range(2)), strict=True):
        (sources, others), (sample, _) = ([as_leaf(a) for a in s.arrays] for s in twice), twice
        node, of_host = (op(*each, **sample.params) for each in (sources, others))
        if gpu.refusal(node):
            continue
        wanted = op.ref(*(in_float64(s).copy() for s in sources), **sample.params)
        found = results(Graph.of(node, *node.saved), Devices([gpu, CPU()]))
        theirs = results(Graph.of(of_host, *of_host.saved), Devices([CPU()]))
        if node.dtype in (F16, BF16) or node.dtype.quantised:
            np.testing.assert_array_equal(found[0], theirs[0])
        else:
            near(found[0], wanted, node)
        if node.saved:
            for mine, other in zip(found[1:], theirs[1:], strict=True):
                near(mine, other, node)
        computed += 1
    assert computed


def near(found, wanted, node):
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest, err_msg=repr(node))


TYPES_THERE = sorted(QUANTS)
TYPES = sorted(QUANTS.keys() - {"F32"})


def packed_weights(name, rows, n, rng):
    """Random bytes, with scales that are numbers; of plain types, random numbers."""
    dtype = DTYPES[name]
    if not dtype.quantised:
        return quantize(rng.normal(size=(rows, n)).astype(np.float32), name).view(dtype.numpy)
    raw = rng.integers(0, 256, (rows, dtype.row_bytes(n)), np.uint8)
    raw &= 0xBF  # no half and no E8M0 is infinite or NaN
    return raw.view(dtype.numpy)


IN_PARTS = ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "IQ3_S"]
WAYS = [(name, "whole") for name in TYPES] + [(name, "in parts") for name in IN_PARTS]


@pytest.mark.parametrize(("name", "parts"), WAYS)
def test_packed_weights_multiply_as_on_the_host(name, parts, gpu, narrow):
    device, (n, k, m) = (gpu if parts == "whole" else narrow), (150, 256, 15)
    rng = np.random.default_rng(7)
    w = leaf(packed_weights(name, n, k, rng), "w", DTYPES[name])
    x, dy = (leaf(rng.normal(size=(m, d)).astype(np.float32)) for d in (k, n))
    there = leaf(rng.normal(size=(m, n)).astype(np.float32))
    nodes = [
        ops.mul_mat(w, x),
        ops.mul_mat_add(there, w, x),
        ops.out_prod(w, ops.transpose(dy)),
    ]
    for node in nodes:
        assert device.refusal(node) is None
        (found,) = results(Graph.of(node), Devices([device, CPU()]))
        (wanted,) = results(Graph.of(node), Devices([CPU()]))
        near(found, wanted, node)


ATTENTION = [  # queries, keys, heads, key heads, numbers of a head, cap
    (70, 70, 4, 2, 64, 0.0),
    (40, 150, 2, 1, 128, 3.0),
    (35, 66, 2, 2, 200, 0.0),
    (20, 50, 2, 1, 6, 0.0),
]


@pytest.mark.parametrize("size", ATTENTION, ids=str)
def test_attention_by_tiles_is_that_of_the_host(size, gpu):
    t, s, h, hk, d, cap = size
    rng = np.random.default_rng(3)
    q, k, v, do = (
        leaf(rng.normal(size=shape).astype(np.float32))
        for shape in ((t, h, d), (s, hk, d), (s, hk, d), (t, h, d))
    )
    stop = np.minimum(np.arange(t) + s - t + 1, s)
    start = np.maximum(stop - 33, 0)
    start[3] = stop[3]  # sees no key
    span = leaf(np.stack([start, stop], axis=1).astype(np.int32))
    p = {"scale": d**-0.5, "cap": cap, "max_bias": 0.0, "masked": False, "longest": 0}

    def both(node):
        assert gpu.refusal(node) is None
        graph = Graph.of(node, *node.saved)
        found, wanted = (results(graph, Devices(some)) for some in ([gpu, CPU()], [CPU()]))
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(
                mine, other, rtol=1e-5, atol=2e-6 * np.abs(other[other < 1e29]).max()
            )
        return wanted

    o, lse = both(OPS["flash_attn_ext"](q, k, v, span, **p))
    both(OPS["flash_attn_back"](q, k, v, span, leaf(o), leaf(lse), do, **p))


@pytest.mark.parametrize(("name", "parts"), WAYS)
def test_rows_and_experts_of_packed_tables(name, parts, gpu, narrow):
    device, rng = gpu if parts == "whole" else narrow, np.random.default_rng(8)
    packed = packed_weights(name, 384, 256, rng)
    experts = leaf(packed.reshape(6, 64, -1), "w", DTYPES[name])
    table = leaf(packed, "table", DTYPES[name])
    x, dy = (leaf(rng.normal(size=(5, 2, d)).astype(np.float32)) for d in (256, 64))
    ids = leaf(np.array([[3, 1], [5, 0], [1, 3], [2, 4], [5, 3]], np.int32))
    rows = leaf(rng.integers(0, 384, 11).astype(np.int32))
    nodes = [
        ops.get_rows(table, rows),
        ops.mul_mat_id(experts, x, ids),
        ops.mul_mat_id_back(experts, dy, ids),
    ]
    for node in nodes:
        assert device.refusal(node) is None
        (found,) = results(Graph.of(node), Devices([device, CPU()]))
        (wanted,) = results(Graph.of(node), Devices([CPU()]))
        near(found, wanted, node)


def test_angles_are_exact_at_far_positions(gpu):
    positions = leaf(np.array([0, 1, 99_999, 100_000, 1_000_003, 2**31 - 1, -7], np.int32))
    factors = leaf(np.array([1.0, 0.3, 8.0, 1000.5] * 16, np.float32))
    for sources in ((positions,), (positions, factors)):
        node = ops.rope_table(
            *sources, n_dims=128, freq_base=1e6, freq_scale=0.25, ext_factor=1.0, n_ctx_orig=4096
        )
        assert gpu.refusal(node) is None
        (found,) = results(Graph.of(node), Devices([gpu, CPU()]))
        (wanted,) = results(Graph.of(node), Devices([CPU()]))
        np.testing.assert_allclose(found[:4], wanted[:4], rtol=0, atol=2e-7)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)  # of 2^31 / 0.3 radians


HALVES = [0.0, -1.5, 65504, 65519.9, 65520, -1e6, 6e-8, 2.9e-8]
HALVES += [1.00048828125, 1 / 3, np.inf, np.nan]


@pytest.mark.parametrize("kind", [F16, BF16])
def test_numbers_round_to_16_bits_as_on_the_host(kind, gpu):
    rng = np.random.default_rng(2)
    x = np.concatenate([HALVES, rng.normal(size=81), 2.0 ** rng.uniform(-26, 17, 80)])
    x = x.astype(np.float32)[: x.size // 2 * 2 - 1]  # an odd number of them
    there = ops.cpy(leaf(x), kind)
    back = ops.cpy(there, F32)
    found = results(Graph.of(there, back), Devices([gpu, CPU()]))
    wanted = results(Graph.of(there, back), Devices([CPU()]))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (
            lambda w, x: ops.get_rows(w, leaf(np.array([1, 4], np.int32))),
            "get_rows: an id is no row",
        ),
        (
            lambda w, x: ops.set_rows(w, x, leaf(np.array([2, 2], np.int32))),
            "set_rows: an id is named twice",
        ),
        (
            lambda w, x: ops.mul_mat_id(
                leaf(np.ones((3, 5, 8), np.float32)),
                leaf(np.ones((1, 1, 8), np.float32)),
                leaf(np.array([[0, 3]], np.int32)),
            ),
            "mul_mat_id: an id is not one of 3 experts",
        ),
        (
            lambda w, x: ops.linear_soft_cross_entropy(
                x,
                w,
                leaf(np.array([[0, 1], [4, 3]], np.int32)),
                *(leaf(np.ones(shape, np.float32)) for shape in ((2, 3), 2)),
            ),
            "linear_soft_cross_entropy: a target is outside the vocabulary of 4 tokens",
        ),
    ],
)
def test_wrong_ids_are_reported_once(node, sentence, gpu):
    w, x = (leaf(np.ones((n, 8), np.float32)) for n in (4, 2))
    made, devices = node(w, x), Devices([gpu, CPU()])
    with pytest.raises(PyggmlError, match=sentence):
        results(Graph.of(made), devices)
    (found,) = results(Graph.of(OPS["add"](w, w)), devices)
    assert found.tolist() == [[2.0] * 8] * 4


@pytest.mark.parametrize("name", [*TYPES_THERE])
def test_every_weight_type_is_unpacked_as_on_the_host(name, gpu):
    rng = np.random.default_rng(9)
    table = leaf(packed_weights(name, 40, 256, rng), "table", DTYPES[name])
    node = ops.get_rows(table, leaf(rng.integers(0, 40, 9).astype(np.int32)))
    assert gpu.refusal(node) is None
    found, wanted = (results(Graph.of(node), Devices(d))[0] for d in ([gpu, CPU()], [CPU()]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ1_M"])
def test_scales_change_and_have_slopes_as_on_the_host(name, gpu):
    nodes = scaled_blocks(name)
    assert [gpu.refusal(node) for node in nodes] == [None] * 3
    on = [Devices([gpu, CPU()]), Devices([CPU()])]
    (changed, *slopes), (bytes_, *wanted) = (results(Graph.of(*nodes), d) for d in on)
    np.testing.assert_array_equal(changed, bytes_)
    for node, mine, theirs in zip(nodes[1:], slopes, wanted, strict=True):
        near(mine, theirs, node)


def test_larger_tensors_than_a_binding_are_named(narrow):
    a = leaf(np.zeros((70, 70), np.float32), "a")
    reason = narrow.refusal(OPS["add"](a, a))
    assert "takes 19,600 bytes, a binding at most 16,384" in reason


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_shader_that_does_not_compile_is_one_sentence(gpu):
    from pyggml.backends.webgpu.runtime.kernel import ShaderKernel

    node = OPS["add"](*(leaf(np.ones(4, np.float32)) for _ in range(2)))
    broken = ShaderKernel(
        lambda site: [site.shaders.dispatch("put_y(0u, nonsense);", {"y": site.out}, 1)]
    )
    before, gpu._kernels = gpu._kernels, {"add": broken}
    try:
        with pytest.raises(DeviceError, match="webgpu has failed: .*nonsense"):
            results(Graph.of(node), Devices([gpu, CPU()]))
    finally:
        gpu._kernels = before
    (found,) = results(Graph.of(node), Devices([gpu, CPU()]))
    assert found.tolist() == [2, 2, 2, 2]


def test_a_buffer_that_no_device_has_is_one_sentence(gpu):
    with pytest.raises(DeviceError, match="a buffer of .* bytes is wanted, the device's largest"):
        gpu.alloc(1 << 50)


def test_memory_that_has_run_out_is_one_sentence(gpu, monkeypatch):
    import wgpu

    def full(**_):
        raise wgpu.GPUOutOfMemoryError("not enough memory left")

    monkeypatch.setattr(gpu.device, "create_buffer", full)
    with pytest.raises(DeviceError, match="^webgpu is out of memory: 4,096 bytes are wanted$"):
        gpu.alloc(4096)


def test_a_device_with_low_limits_is_refused_by_name():
    need("wgpu")
    from pyggml.backends.webgpu.runtime.device import _LIMITS, WebGPUBackend

    class Small:
        info: ClassVar = {"device": "Pocket GPU"}
        limits: ClassVar = {**_LIMITS, "max-storage-buffers-per-shader-stage": 4}

    message = (
        "webgpu: Pocket GPU cannot be used: max-storage-buffers-per-shader-stage is 4, wanted 12"
    )
    with pytest.raises(DeviceError, match=re.escape(message)):
        WebGPUBackend(Small())
