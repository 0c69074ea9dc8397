"""Rows read from a table by their numbers, and rows written into one: see ops/layout/rows.py
and set_rows.py.

Ids are data. A kernel leaves out those that are no row, and notes the fault.
"""

from collections.abc import Iterator, Sequence
from math import prod

from pyggml.backends.webgpu.ops.layout import TO_F16
from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers, unread
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch
from pyggml.backends.webgpu.wgsl.weights import QUAD, weight_source
from pyggml.graph.dtypes import BF16, F16, F32, I32, DType
from pyggml.graph.tensor import Shape, Tensor

_PLAIN = (F32, I32, F16, BF16)
_FIRST_ID = "(b / INNER % IDS_OUTER * IDS_INNER + b % INNER % IDS_INNER) * N_IDS"  # of batch b
_GET = """
    let row = i / N;
    let b = row / N_IDS;
    let wanted = ids_at(FIRST_ID + row % N_IDS);
    if (wanted < 0 || u32(wanted) >= N_ROWS) {
        put_fault(0u, i32(NO_ROW));
    } else {
        let from_ = b * N_ROWS + u32(wanted);
        if (from_ >= FIRST_ROW && from_ - FIRST_ROW < ROWS_HERE) {
            let at = from_ - FIRST_ROW;
            let j = i % N;
            PUT
        }
    }
""".replace("FIRST_ID", _FIRST_ID)


def _batches(batch: Shape, ids: Shape) -> dict[str, int]:
    """How the ids of each batch are found: they may be fewer, and are then repeated."""
    sizes, of_ids = ((1,) * (2 - len(batch)) + s for s in (batch, ids[: len(batch)]))
    n_ids = prod(ids[len(batch) :])
    return {"INNER": sizes[1], "IDS_OUTER": of_ids[0], "IDS_INNER": of_ids[1], "N_IDS": n_ids}


def no_such_row(site: ShaderSite, n_rows: int) -> tuple[BufferRange, int]:
    """The cell and the number of the fault of an id that is none of so many rows."""
    assert site.node.op is not None
    return site.fault(f"{site.node.op.name}: an id is no row of a table of {n_rows} rows")


# -- get_rows -----------------------------------------------------------------------------------


def _unpack_functions(dtype: DType) -> tuple[str, str, int]:
    """WGSL: functions, and how unit j of row `at` of the table `w` is put; numbers of a unit.

    N counts the units of a row.
    """
    if dtype in _PLAIN:
        return "", "put_y(i, w_at(at * N + j));", 1
    n, size = dtype.block // QUAD, dtype.block_bytes
    of_unit = f"(at * (N / {n}u) + j / {n}u) * {size}u, j % {n}u * {QUAD}u"
    put = f"for (var c = 0u; c < {QUAD}u; c++) {{ put_y({QUAD}u * i + c, four[c]); }}"
    return weight_source(dtype.name), f"let four = weights({of_unit}); {put}", QUAD


def parts_of(
    table: Tensor, view: BufferRange, limit: int
) -> Iterator[tuple[int, int, BufferRange]]:
    """(first row, rows, their memory) of parts that a binding holds."""
    n_rows, row_bytes = prod(table.shape[:-1]), table.dtype.row_bytes(table.shape[-1])
    most = n_rows if view.n_bytes <= limit else max((limit - limit // 64) // row_bytes, 1)
    for first in range(0, n_rows, most):
        rows = min(most, n_rows - first)
        here = BufferRange(view.buffer, view.start + first * row_bytes, rows * row_bytes, "u8")
        yield first, rows, here


def _get_rows(site: ShaderSite) -> Sequence[Dispatch]:
    table, ids = site.node.src
    *batch, n_rows, n = table.shape
    cell, no_row = no_such_row(site, n_rows)
    functions, put, unit = _unpack_functions(table.dtype)
    body, calls = _GET.replace("PUT", put), list[Dispatch]()
    for first, rows, rows_of_table in parts_of(table, site.src[0], site.shaders.limit):
        constants = _batches(tuple(batch), ids.shape) | {
            "N": n // unit, "N_ROWS": n_rows, "NO_ROW": no_row, "FIRST_ROW": first,
            "ROWS_HERE": rows,
        }  # fmt: skip
        w = numbers(rows_of_table, table.dtype) if table.dtype in _PLAIN else rows_of_table
        n_units = site.node.n_elements // unit
        calls += site.each(body, "w ids", constants, n_units, functions, w=w, fault=cell)
    return calls


# -- get_rows_back ------------------------------------------------------------------------------

# A thread has a column of one batch, and adds in the order of ids: each run gives the same.
_ADD = """
    let b = i / N;
    let j = i % N;
    for (var row = 0u; row < N_ROWS; row++) { put_y((b * N_ROWS + row) * N + j, 0.0); }
    for (var k = 0u; k < N_IDS; k++) {
        let wanted = ids_at(FIRST_ID + k);
        if (wanted < 0 || u32(wanted) >= N_ROWS) {
            put_fault(0u, i32(NO_ROW));
        } else {
            let at = (b * N_ROWS + u32(wanted)) * N + j;
            put_y(at, y_at(at) + dy_at((b * N_IDS + k) * N + j));
        }
    }
""".replace("FIRST_ID", _FIRST_ID)


def _get_rows_back(site: ShaderSite) -> Sequence[Dispatch]:
    dy, ids = site.node.src
    batch, n_rows, n = site.node.params["batch"], site.node.params["n_rows"], dy.shape[-1]
    cell, no_row = no_such_row(site, n_rows)
    constants = {"N": n, "N_ROWS": n_rows, "NO_ROW": no_row, **_batches(batch, ids.shape)}
    return site.each(_ADD, "dy ids", constants, prod(batch) * n, fault=cell)


# -- set_rows -----------------------------------------------------------------------------------

_CHECK = """
    let wanted = ids_at(i);
    if (wanted < 0 || u32(wanted) >= N_ROWS) { put_fault(0u, i32(NO_ROW)); }
    for (var other = i / N_IDS * N_IDS; other < i; other++) {
        if (ids_at(other) == wanted) { put_fault(0u, i32(TWICE)); }
    }
"""
# Of each row N words; a word is a number, or two of float16.
_SET = """
    let row = i / N;
    let b = row / N_IDS;
    let wanted = ids_at(FIRST_ID + row % N_IDS);
    if (wanted >= 0 && u32(wanted) < N_ROWS) {
        put_y((b * N_ROWS + u32(wanted)) * N + i % N, WORD);
    }
""".replace("FIRST_ID", _FIRST_ID)
_TWO_F16 = "to_f16(x_at(2u * i)) | (to_f16(x_at(2u * i + 1u)) << 16u)"


def _set_rows(site: ShaderSite) -> Sequence[Dispatch]:
    dst, _, ids = site.node.src
    batch = dst.shape[: len(ids.shape) - 1]
    per_word = 2 if dst.dtype is F16 else 1
    n_rows, n = dst.shape[len(batch)], prod(dst.shape[len(batch) + 1 :]) // per_word
    cell, no_row = no_such_row(site, n_rows)
    _, twice = site.fault("set_rows: an id is named twice")
    _, x, numbers_ = site.src
    check = {"N_IDS": ids.shape[-1], "N_ROWS": n_rows, "NO_ROW": no_row, "TWICE": twice}
    constants = _batches(batch, ids.shape) | {"N": n, "N_ROWS": n_rows}
    put = _SET.replace("WORD", _TWO_F16 if per_word == 2 else "bitcast<u32>(x_at(i))")
    rows, total = {"y": site.out.of("u32"), "x": x, "ids": numbers_}, site.node.src[1].n_elements
    return [
        site.shaders.each(_CHECK, ids.n_elements, {"ids": numbers_, "fault": cell}, check),
        site.shaders.each(put, total // per_word, rows, constants, TO_F16),
    ]


def _unset(node: Tensor) -> str | None:
    dst, x, ids = node.src
    if dst.dtype not in (F32, F16) or x.dtype is not F32:
        return f"rows of {dst.dtype} are packed by none of its shaders"
    row = prod(dst.shape[len(ids.shape) :])
    if dst.dtype is F16 and (row % 2 or (dst.offset - dst.root.offset) % 4):
        return "rows of float16 that share words"
    return None


declare("get_rows", _get_rows, lacks=lambda node: unread(node.src[0], *_PLAIN), tiled=(0,))
declare("get_rows_back", _get_rows_back)
declare("set_rows", _set_rows, lacks=_unset, mixed=(0, 3))
