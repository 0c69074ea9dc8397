"""What kernels compute on an ARM processor, without waiting for Numba to compile under an emulator.

usage: python arm_numbers.py make CPU ISA FILE      on any machine (as machine_code.py)
       python arm_numbers.py check FILE             on an ARM machine

`make` compiles the kernels of every weight type to object files and writes them with random blocks
and what NumPy makes of these. `check` runs them: unpacked weights must be those to the bit, rows of
bytes, in float32 and tiles of bytes the products to float32's rounding, likewise pairs of bfloat16.
"""

import ctypes
import pickle
import sys
from pathlib import Path

import numpy as np

DEPTH, ROWS, LIMIT = 768, 8, 1e-11  # numbers of a row, a multiple of every block; rows; NMSE
TILED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4")


# -- on any machine -------------------------------------------------------------------------------


def make(cpu, isa, path):
    import machine_code

    machine_code.pretend(cpu, isa)
    from pyggml.jit.isa import CHOSEN
    from pyggml.kernels.gemm import int8_tile, int_pack
    from pyggml.kernels.gemm.tile import BYTE_TILE, PAIR_TILE
    from pyggml.quants.unpack import WHOLE_TYPES

    cases = {name: _case(name) | {"packed": int_pack.packed_bytes(name, DEPTH)}
             for name in WHOLE_TYPES}  # fmt: skip
    objects = {}
    for key, what in _kernels(WHOLE_TYPES).items():
        name = f"kernel{len(objects)}"
        objects[key] = name, len(what[2]), machine_code.object_code(what, name, cpu)
    sizes = {n: getattr(int8_tile, n) for n in ("MR", "PANEL", "WORDS", "BLOCKS", "ROW_WORDS")}
    sizes |= {"square": bool(BYTE_TILE.square), "pairs": PAIR_TILE.shape}
    Path(path).write_bytes(pickle.dumps((CHOSEN.name, sizes, cases, objects)))


def _kernels(whole):
    """(kernel, …) -> (intrinsic, constants, addresses)"""
    from pyggml.graph.dtypes import dtype
    from pyggml.kernels.gemm import activations, dots, int8_tile, int_dots, int_pack, panels
    from pyggml.quants import unpack

    def of(intrinsic, n, *constants):
        return intrinsic, [*constants], [None] * n

    found = {
        ("tile",): of(int8_tile.byte_product, 9),
        ("columns",): of(int8_tile.quantize_columns, 4),
        ("x",): of(activations.quantize, 6),
        ("pairs",): of(panels.pair_product, 7),
    }
    for i, name in enumerate(whole):
        found["unpack", name] = of(unpack._unpack_blocks, 3, dtype(name).number)
        for n in (1, 4):
            found["pack", name, n] = of(int_pack.pack_token, 4, i, n)
            found["bytes", name, n] = of(int_dots.int_dots, 6, i, n)
        if name in unpack.DIRECT_TYPES:
            found["floats", name] = of(dots.row_dots, 7, unpack.DIRECT_TYPES.index(name))
        if name in TILED:
            found["panel", name] = of(int8_tile.unpack_bytes, 3, int8_tile.KINDS.index(name))
    return found


def _case(name):
    """Random blocks whose weights are neither huge nor all tiny, what they unpack to, and x."""
    from pyggml.graph.dtypes import dtype
    from pyggml.quants.readers.arrays import decode
    from pyggml.quants.unpack import LAYOUTS

    rng, kind = np.random.default_rng(5), dtype(name)
    raw = np.zeros((ROWS * DEPTH // kind.block, kind.block_bytes), np.uint8)
    weights, wrong = np.zeros((len(raw), kind.block), np.float32), np.ones(len(raw), bool)
    while wrong.any():
        raw[wrong] = rng.integers(0, 256, raw[wrong].shape, np.uint8)
        decode(LAYOUTS[name], raw, weights)
        most = np.abs(weights).max(axis=1)
        wrong = ~((most > 1e-2) & (most < 1e2))
    x = rng.standard_normal((ROWS, DEPTH)).astype(np.float32)
    return {"raw": raw.reshape(ROWS, -1), "weights": weights.reshape(ROWS, DEPTH), "x": x,
            "block": kind.block}  # fmt: skip


# -- on an ARM machine ----------------------------------------------------------------------------


class Kernels:
    """The object files, loaded: kernels[key](…) with addresses and numbers."""

    def __init__(self, objects):
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        for _, _, code in objects.values():
            self._engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._objects = objects

    def __contains__(self, key):
        return key in self._objects

    def __getitem__(self, key):
        name, n, _ = self._objects[key]
        address = self._engine.get_function_address(name)
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * n)(address)
        return lambda *given: call(*(a.ctypes.data if hasattr(a, "ctypes") else a for a in given))


def rounded(x, axis):
    """Numbers along an axis as bytes with one scale, in float64."""
    most = np.abs(x).max(axis, keepdims=True)
    return np.rint(x * (np.float32(127) / most)) * (most / np.float32(127)).astype(np.float64)


def by_groups(x):
    return rounded(x.reshape(len(x), -1, 32), 2).reshape(x.shape)


def hold(what, found, wanted):
    error = ((found - wanted) ** 2).sum() / (wanted**2).sum()
    assert error < LIMIT, f"{what}: NMSE {error}"


def empty(*shape):
    return np.full(shape, np.nan, np.float32)


def check_rows(kernels, name, case):
    raw, x, weights = case["raw"], case["x"], case["weights"]
    found = empty(ROWS, DEPTH)
    kernels["unpack", name](found, raw, ROWS * DEPTH // case["block"])
    assert found.tobytes() == weights.tobytes(), f"{name} is unpacked otherwise"
    exact = weights.astype(np.float64).T
    for n in (1, 4):
        found, packed = empty(ROWS, ROWS), np.full(n * case["packed"], 255, np.uint8)
        for t in range(0, ROWS, n):
            for i in range(n):
                kernels["pack", name, n](packed, i, x[t + i], DEPTH)
            for row in range(ROWS):
                some = empty(n)
                kernels["bytes", name, n](some, 4, raw[row], packed, 0, DEPTH)
                found[t : t + n, row] = some
        hold(f"rows of {name}, {n} tokens", found, by_groups(x) @ exact)
    if ("floats", name) not in kernels:
        return
    sums, found = np.ascontiguousarray(x.reshape(ROWS, -1, 32).sum(2)), empty(ROWS, ROWS, 4)
    for t in range(ROWS):
        for row in range(ROWS):
            to = found[t, row]
            kernels["floats", name](to, raw[row], raw.shape[1], 1, x[t], sums[t], DEPTH)
    hold(f"rows of {name} in float32", found[..., 0], x.astype(np.float64) @ exact)


def interleaved(words, square):
    """(words, n) of n rows of words, or pairs of words (words / 2, n, 2)."""
    n = 2 if square else 1
    return np.ascontiguousarray(words.reshape(len(words), -1, n).swapaxes(0, 1))


def packed_x(kernels, sizes, x):
    """The words and the terms of MR rows of x."""
    mr, n = sizes["MR"], x.shape[1] // 32
    words, terms = np.zeros((mr, 8 * n), np.int32), empty(n, 3, mr)
    for i in range(mr):
        kernels["x",](words[i], terms.ctypes.data + 4 * i, mr, x[i], n, x[i])
    return interleaved(words, sizes["square"]), terms


def check_tile(kernels, sizes, name, case):
    mr, panel, n_words = (sizes[n] for n in ("MR", "PANEL", "WORDS"))
    x, terms = packed_x(kernels, sizes, case["x"])
    rows = np.zeros((panel, sizes["ROW_WORDS"]), np.int32)
    for i in range(panel):
        kernels["panel", name](rows[i], case["raw"][i], DEPTH // case["block"])
    w = interleaved(rows[:, : DEPTH // 4], sizes["square"])
    of_w = np.ascontiguousarray(rows[:, n_words:].reshape(panel, 2, -1).transpose(1, 2, 0))
    wanted = by_groups(case["x"][:mr]) @ case["weights"][:panel].astype(np.float64).T
    for start in (0, 1):
        found = np.ones((mr, panel), np.float32)
        has_minima = int(of_w[1].any())
        kernels["tile",](x, terms, w, of_w, found, panel, DEPTH // 32, has_minima, 0, start)
        hold(f"a tile of {name}", found, wanted + start)


def check_columns(kernels, sizes):
    rng, panel, n = np.random.default_rng(3), sizes["PANEL"], 1 + sizes["square"]
    w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, panel), (ROWS, 32)))
    x, terms = packed_x(kernels, sizes, dy)
    words, of_w = np.zeros(8 * panel, np.int32), np.zeros((2, sizes["BLOCKS"], panel), np.float32)
    for column in range(0, panel, 4):
        kernels["columns",](words[n * column :], of_w[0, 0, column:], w[0, column:], panel)
    found = empty(sizes["MR"], panel)
    kernels["tile",](x, terms, words, of_w, found, panel, 1, 0, 0, 0)
    hold("columns", found, (by_groups(dy) @ rounded(w, 0))[: len(found)])


def check_pairs(kernels, sizes):
    (mr, panel, _), rng = sizes["pairs"], np.random.default_rng(4)
    for n in (4, 32, 132):
        a, b = (rng.standard_normal((rows, 2 * n)).astype(np.float32) for rows in (mr, panel))
        a, b = ((v.view(np.uint32) >> 16).astype(np.uint16) for v in (a, b))
        packed = (np.ascontiguousarray(v.reshape(len(v), n, 2).swapaxes(0, 1)) for v in (a, b))
        exact = [(v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in (a, b)]
        found, (of_a, of_b) = empty(mr, panel), packed
        kernels["pairs",](of_a, of_b, panel, found, panel, n, 0)
        hold(f"{n} pairs", found, exact[0] @ exact[1].T)


def check(path):
    isa, sizes, cases, objects = pickle.loads(Path(path).read_bytes())
    kernels = Kernels(objects)
    for name, case in cases.items():
        check_rows(kernels, name, case)
        if ("panel", name) in kernels:
            check_tile(kernels, sizes, name, case)
    check_columns(kernels, sizes)
    check_pairs(kernels, sizes)
    sys.stdout.write(f"{isa}: {len(objects)} kernels compute what NumPy does\n")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](*sys.argv[2:])
