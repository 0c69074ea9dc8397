"""Products: mul_mat, out_prod, and the two that add to what is there.

    C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]      mul_mat(w, x): A = x, B = w
                                                     out_prod(a, b): A = bᵀ, B = aᵀ

Packed weights are multiplied as they are read if A has few rows; else some rows of them at a time
are unpacked first: to float32 or, with compute "f16", to float16; then, if the device computes in
float16, A is rounded too. A factor with few rows has a shader of its own; all else goes by tiles.
A matrix B that is larger than a binding is taken some
rows at a time: along n their products are parts of C, along k they add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyggml.backends.kit.products import Factor, SizedProduct, gaps_in, sides_of
from pyggml.backends.webgpu.runtime.kernel import ShaderSite, unread
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.few import AT_ONCE, few_source, rows_of_group
from pyggml.backends.webgpu.wgsl.packed import (
    MOST_ROWS,
    ROWS_OF_GROUP,
    dots_source,
    halves_source,
    unpack_groups,
    unpack_source,
)
from pyggml.backends.webgpu.wgsl.shader import (
    LINE,
    TRUE_HALF_QUADS,
    BufferRange,
    Dispatch,
    Shaders,
)
from pyggml.backends.webgpu.wgsl.tiles import QUAD, FactorReading, ShaderTile, product_source
from pyggml.graph.dtypes import F16, F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

LARGE, SMALL = ShaderTile(128, 64, 16), ShaderTile(64, 64, 16, each_n=4)
OF_HALVES = ShaderTile(64, 64, 32, each_n=4, quads=TRUE_HALF_QUADS)
FEW = 16  # rows of a factor
_MANY_GROUPS, _MANY_OF_HALVES = 256, 512  # keep a large card busy
_TILES_OF_LARGE = 512  # of C, from which on large ones are faster
_LEAST_K = 128  # of a part of a sum
_UNPACKED_BYTES = 64 << 20  # of weights that are unpacked at once
_SUMS_BYTES = 32 << 20  # of parts of sums
_MOST_TILES = 65535

_TOTAL = """
    let c_index = i / N * C_ROW + C_FIRST + i % N;
    var sum = 0.0;
    if (ADDS) { sum = c_at(c_index); }
    for (var p = 0u; p < PARTS; p++) { sum += x_at(p * M * N + i); }
    put_c(c_index, sum);
"""


class ThinFactors(NamedTuple):
    """Thin float32 factors whose product is added: t (m, rank), and u, a factor of columns."""

    rank: int
    of_u: Factor
    t: BufferRange
    u: BufferRange


@dataclass(frozen=True, slots=True)
class ShaderProblem(SizedProduct):
    """c_row: numbers from row to row of C; c_first: C's first column."""

    c_row: int = 0
    c_first: int = 0
    adds: bool = False

    @property
    def n_batches(self) -> int:
        return self.batches[0] * self.batches[1]

    @property
    def b_rows(self) -> tuple[int, int]:
        """Rows of the matrix B as it lies in memory, and numbers of each."""
        return (self.n, self.k) if self.b.k == 1 else (self.k, self.n)


class ShaderOperands(NamedTuple):
    """The memory of a product: C, A, B, scratch of `scratch_bytes` or more; and if A and B are
    float16, the scales of A's rows."""

    c: BufferRange
    a: BufferRange
    b: BufferRange
    scratch: BufferRange
    scales: BufferRange | None = None


def multiply(
    p: ShaderProblem, o: ShaderOperands, shaders: Shaders, beside: ThinFactors | None = None
) -> list[Dispatch]:
    """The dispatches of a product."""
    p = replace(p, c_row=p.c_row or p.n)
    if beside and not _takes_along(p, shaders):
        thin = replace(p, k=beside.rank, a=Factor(beside.rank, 1), b=beside.of_u, adds=True)
        of_thin = o._replace(a=beside.t, b=beside.u)
        return [*multiply(p, o, shaders), *_dense(thin, of_thin, shaders)]
    if p.b.dtype is F32 and o.b.n_bytes <= shaders.limit:
        return _dense(p, o, shaders)
    parts = _parts(p, o, shaders)
    if _is_dot(p):
        return [_dots(*part, shaders) for part in parts]
    calls = []
    for part, here in parts:
        if p.b.dtype is F32:
            calls += _dense(part, here, shaders)
            continue
        if _is_by_halves(part, shaders):
            calls += _by_halves(part, here, shaders, beside)
            continue
        y, rest = _cut_unpacked(part, here.scratch, shaders)
        name, n = p.b.dtype.name, part.b_rows[0] * part.b_rows[1]
        views, groups = {"y": y.in_quads, "w": here.b}, unpack_groups(name, n)
        calls.append(shaders.dispatch(unpack_source(name), views, groups, {"N": n}))
        dense = replace(part, b=replace(part.b, dtype=F32))
        here = here._replace(b=replace(y, is_written=False), scratch=rest)
        calls += _dense(dense, here, shaders)
    return calls


def scratch_bytes(p: ShaderProblem, shaders: Shaders) -> int:
    """Bytes that `multiplied` needs: unpacked weights, and parts of sums."""
    n_rows, n_columns = p.b_rows
    is_packed = p.b.dtype is not F32
    if _is_dot(p):
        return 0
    most = min(n_rows, _rows_at_once(p, shaders)) if is_packed else n_rows
    unpacked = round_up(_weight_bytes(shaders) * most * n_columns, LINE) if is_packed else 0
    rest = n_rows % most or most if most else 0
    problems = (replace(p, n=n) if p.b.k == 1 else replace(p, k=n) for n in (most, rest))
    return unpacked + max(
        _sums_bytes(part, shaders) + _halves_bytes(part, shaders) for part in problems
    )


def _cut(scratch: BufferRange, n_bytes: int, kind: str) -> tuple[BufferRange, BufferRange]:
    """So many bytes of scratch, to be written, and what follows them."""
    used = round_up(n_bytes, LINE)
    rest = replace(scratch, start=scratch.start + used, n_bytes=scratch.n_bytes - used)
    return replace(scratch, n_bytes=n_bytes, kind=kind, is_written=True), rest


def _cut_unpacked(
    p: ShaderProblem, scratch: BufferRange, shaders: Shaders
) -> tuple[BufferRange, BufferRange]:
    """Cut off scratch where the weights lie unpacked; that, and what follows."""
    n_bytes = round_up(_weight_bytes(shaders) * p.b_rows[0] * p.b_rows[1], 16)
    return _cut(scratch, n_bytes, "f16" if shaders.in_f16 else "f32")


def _weight_bytes(shaders: Shaders) -> int:
    """Bytes of an unpacked weight."""
    return (F16 if shaders.in_f16 else F32).block_bytes


def _rows_at_once(p: ShaderProblem, shaders: Shaders) -> int:
    """Rows of a matrix B that are in one binding, and unpacked in one more."""
    n_columns = p.b_rows[1]
    limit = shaders.limit
    most = limit // p.b.dtype.row_bytes(n_columns)
    if p.b.dtype is not F32:
        most = min(most, min(limit, _UNPACKED_BYTES) // (_weight_bytes(shaders) * n_columns))
    return max(most // 16 * 16, 1)


def _parts(
    p: ShaderProblem, o: ShaderOperands, shaders: Shaders
) -> Iterator[tuple[ShaderProblem, ShaderOperands]]:
    """The product of some rows of a single matrix B at a time."""
    (n_rows, n_columns), a, b = p.b_rows, o.a, o.b
    row_bytes, most = p.b.dtype.row_bytes(n_columns), _rows_at_once(p, shaders)
    for first in range(0, n_rows, most):
        rows = min(most, n_rows - first)
        rows_of_b = BufferRange(b.buffer, b.start + first * row_bytes, rows * row_bytes, b.kind)
        if p.b.k == 1:
            yield replace(p, n=rows, c_first=p.c_first + first), o._replace(b=rows_of_b)
        else:
            here = BufferRange(a.buffer, a.start + 4 * first * p.a.k, a.n_bytes - 4 * first * p.a.k)
            part = replace(p, k=rows, adds=p.adds or first > 0)
            yield part, o._replace(a=here, b=rows_of_b)


# -- shaders ------------------------------------------------------------------------------------


def _dense(
    p: ShaderProblem, o: ShaderOperands, shaders: Shaders, beside: ThinFactors | None = None
) -> list[Dispatch]:
    if min(p.m, p.n) <= FEW:
        return [_few(p, o, shaders)]
    tile, n_parts = _tile_of(p, shaders.limit, o.scales is not None)
    if n_parts == 1:
        return [_tiles(p, tile, 1, o, shaders, beside)]
    n_bytes = F32.block_bytes * n_parts * p.m * p.n
    sums = replace(o.scratch, n_bytes=n_bytes, kind="f32", is_written=True)
    own = replace(p, c_row=p.n, c_first=0, adds=False)
    constants = {
        "M": p.m, "N": p.n, "PARTS": n_parts, "C_ROW": p.c_row, "C_FIRST": p.c_first,
        "ADDS": p.adds,
    }  # fmt: skip
    views = {"c": o.c.for_writing(), "x": replace(sums, is_written=False)}
    total = shaders.each(_TOTAL, p.m * p.n, views, constants)
    return [_tiles(own, tile, n_parts, o._replace(c=sums), shaders, beside), total]


def _is_by_halves(p: ShaderProblem, shaders: Shaders) -> bool:
    """Whether the product with packed weights is one of float16."""
    is_tiled = p.b.dtype is not F32 and p.n_batches == 1 and min(p.m, p.n) > FEW
    return shaders.in_f16 and shaders.has_f16 and is_tiled and p.b_rows[1] % QUAD == 0


def _takes_along(p: ShaderProblem, shaders: Shaders) -> bool:
    """Whether one dispatch makes all of C, and adds what is beside."""
    return _is_by_halves(p, shaders) and p.b_rows[0] <= _rows_at_once(p, shaders)


def _halves_bytes(p: ShaderProblem, shaders: Shaders) -> int:
    """Bytes of A in float16 and of its rows' scales."""
    if not _is_by_halves(p, shaders):
        return 0
    numbers = F16.block_bytes * p.m * round_up(p.k, QUAD)
    return round_up(numbers, LINE) + round_up(F32.block_bytes * p.m, LINE)


def _by_halves(
    p: ShaderProblem, o: ShaderOperands, shaders: Shaders, beside: ThinFactors | None
) -> list[Dispatch]:
    """A product with packed weights, both of whose factors are rounded to float16."""
    k, name = round_up(p.k, QUAD), p.b.dtype.name
    y, rest = _cut_unpacked(p, o.scratch, shaders)
    x, rest = _cut(rest, F16.block_bytes * p.m * k, "f16")
    scales, rest = _cut(rest, F32.block_bytes * p.m, "f32")
    reading, n = _reading(p.a, p.m, p.k, o.a), p.b_rows[0] * p.b_rows[1]
    reading = FactorReading(True, reading.in_quads and reading.along_k)
    groups = unpack_groups(name, n)
    constants = {
        "N": n, "UNPACKING": groups, "M": p.m, "K": p.k, "QUADS": k // QUAD, "A_ROW": p.a.row,
        "A_K": p.a.k,
    }  # fmt: skip
    views = {
        "y": y.in_quads, "w": o.b, "x": x.in_quads, "a": _quads(o.a, reading), "scales": scales,
    }  # fmt: skip
    source = halves_source(name, reading)
    rounded = shaders.dispatch(source, views, groups + p.m, constants)
    own = replace(p, a=Factor(k, 1), b=replace(p.b, dtype=F32))
    x, y, scales = (replace(view, is_written=False) for view in (x, y, scales))
    return [rounded, *_dense(own, ShaderOperands(o.c, x, y, rest, scales), shaders, beside)]


def _tile_of(p: ShaderProblem, limit: int, by_halves: bool) -> tuple[ShaderTile, int]:
    """The tile, and the number of parts of the sum over k, that keep the card busy."""
    large, small = (-(-p.m // t.m) * -(-p.n // t.n) * p.n_batches for t in (LARGE, SMALL))
    if large >= _TILES_OF_LARGE and not by_halves:
        return LARGE, 1
    tile, n_groups = (OF_HALVES, _MANY_OF_HALVES) if by_halves else (SMALL, _MANY_GROUPS)
    if p.n_batches > 1:
        return tile, 1
    most = min(limit, _SUMS_BYTES) // (F32.block_bytes * p.m * p.n)
    return tile, max(min(-(-n_groups // small), p.k // _LEAST_K, most), 1)


def _sums_bytes(p: ShaderProblem, shaders: Shaders) -> int:
    if min(p.m, p.n) <= FEW:
        return 0
    parts = _tile_of(p, shaders.limit, _is_by_halves(p, shaders))[1]
    return F32.block_bytes * parts * p.m * p.n if parts > 1 else 0


def _steps(name: str, f: Factor) -> dict[str, int | float]:
    """Constants of a factor."""
    constants: dict[str, int | float] = {f"{name}_ROW": f.row, f"{name}_K": f.k}
    for i in (0, 1):
        constants |= {f"{name}_STEP{i}": f.batches[i], f"{name}_REPEAT{i}": f.repeats[i]}
    return constants


def _tiles(
    p: ShaderProblem, tile: ShaderTile, n_parts: int, o: ShaderOperands, shaders: Shaders,
    beside: ThinFactors | None,
) -> Dispatch:  # fmt: skip
    (c, a, b, _, scales), per_part = o, round_up(-(-p.k // n_parts), tile.depth)
    constants: dict[str, int | float] = {
        "M": p.m, "N": p.n, "K": p.k, "INNER": p.batches[1], "C_ROW": p.c_row, "ADDS": p.adds,
        "C_FIRST": p.c_first, "PARTS": n_parts, "PER_PART": per_part,
        **_steps("A", p.a), **_steps("B", p.b),
    }  # fmt: skip
    of_a, of_b = _reading(p.a, p.m, p.k, a), _reading(p.b, p.n, p.k, b)
    if scales:  # rows of A end in zeros
        of_a = replace(of_a, in_quads=True)
    ends = p.m % tile.m or p.n % tile.n or p.k % per_part
    if of_a.in_quads and of_b.in_quads and not ends:
        of_a, of_b = replace(of_a, has_all=True), replace(of_b, has_all=True)
    c_in_quads = c.has_quads and not any(size % 4 for size in (p.n, p.c_row, p.c_first))
    views = {"c": c.in_quads if c_in_quads else c, "a": _quads(a, of_a), "b": _quads(b, of_b)}
    views["c"] = views["c"].for_writing()
    if scales:
        views |= {"scales": scales, "a": a.of(TRUE_HALF_QUADS), "b": b.of(TRUE_HALF_QUADS)}
    thin = None
    if beside:
        of_t, rank = Factor(beside.rank, 1), beside.rank
        thin = _reading(of_t, p.m, rank, beside.t), _reading(beside.of_u, p.n, rank, beside.u)
        constants |= {"RANK": rank, **_steps("T", of_t), **_steps("U", beside.of_u)}
        views |= {"t": _quads(beside.t, thin[0]), "u": _quads(beside.u, thin[1])}
    groups = (-(-p.n // tile.n), -(-p.m // tile.m), p.n_batches * n_parts)
    source = product_source(tile, of_a, of_b, c_in_quads, thin)
    return shaders.dispatch(source, views, groups, constants)


def _reading(f: Factor, n_rows: int, k: int, view: BufferRange) -> FactorReading:
    along_k = f.row != 1 or f.k == 1
    length, other = (k, f.row) if along_k else (n_rows, f.k)
    together = 1 in (f.row, f.k) and not any(n % 4 for n in (length, other, *f.batches))
    return FactorReading(along_k, together and view.has_quads)


def _quads(view: BufferRange, reading: FactorReading) -> BufferRange:
    return view.in_quads if reading.in_quads else view


def _few(p: ShaderProblem, o: ShaderOperands, shaders: Shaders) -> Dispatch:
    many, few = (p.a, p.m, o.a), (p.b, p.n, o.b)
    if p.n > p.m:
        many, few = few, many
    steps = (p.c_row, 1) if p.n <= p.m else (1, p.c_row)
    constants: dict[str, int | float] = {
        "N_L": many[1], "N_F": few[1], "K": p.k, "INNER": p.batches[1], "ADDS": p.adds,
        "C_L": steps[0], "C_F": steps[1], "C_FIRST": p.c_first, "C_BATCH": p.m * p.c_row,
        **_steps("L", many[0]), **_steps("F", few[0]),
    }  # fmt: skip
    of_l, of_f = (_reading(factor, n, p.k, view) for factor, n, view in (many, few))
    if not of_l.along_k and of_f.along_k:
        of_f = replace(of_f, in_quads=False)  # its k are taken one by one
    if of_l.along_k and not of_f.along_k:
        of_l = replace(of_l, in_quads=False)
    groups = (-(-many[1] // rows_of_group(of_l.along_k)), -(-few[1] // AT_ONCE), p.n_batches)
    views = {"c": o.c.for_writing(), "l": _quads(many[2], of_l), "f": _quads(few[2], of_f)}
    return shaders.dispatch(few_source(of_l, of_f), views, groups, constants)


def _is_dot(p: ShaderProblem) -> bool:
    """Whether packed weights are multiplied as they are read."""
    return p.b.dtype is not F32 and p.m <= MOST_ROWS and p.b.k == 1 and p.n_batches == 1


def _dots(p: ShaderProblem, o: ShaderOperands, shaders: Shaders) -> Dispatch:
    constants = {
        "M": p.m, "N": p.n, "K": p.k, "A_ROW": p.a.row, "A_K": p.a.k, "C_ROW": p.c_row,
        "C_FIRST": p.c_first, "ADDS": p.adds, "ROW_BYTES": p.b.dtype.row_bytes(p.k),
    }  # fmt: skip
    of_a = _reading(p.a, p.m, p.k, o.a)
    of_a = replace(of_a, along_k=True, in_quads=of_a.along_k and of_a.in_quads)
    views = {"c": o.c.for_writing(), "a": _quads(o.a, of_a), "w": o.b}
    source = dots_source(p.b.dtype.name, p.m, of_a)
    return shaders.dispatch(source, views, -(-p.n // ROWS_OF_GROUP), constants)


# -- ops ----------------------------------------------------------------------------------------


def _bind(site: ShaderSite, adds: bool = False) -> list[Dispatch]:
    (b, a), p = site.src[-2:], ShaderProblem(*sides_of(site.node), adds=adds)
    return multiply(p, ShaderOperands(site.out, a, b, site.scratch), site.shaders)


def _bind_added(site: ShaderSite) -> Sequence[Dispatch]:
    return _onto_first(site, _bind(site, adds=True))


def _onto_first(site: ShaderSite, product: list[Dispatch]) -> Sequence[Dispatch]:
    """A product that adds to the first source."""
    y, x = site.out, site.src[0]
    if site.in_place or (y.buffer is x.buffer and y.start == x.start):
        return product
    n, views = site.node.n_elements, {"y": y, "x": x}
    return [site.shaders.each("put_y(i, x_at(i));", n, views), *product]


def _scratch(node: Tensor, shaders: Shaders) -> int:
    return scratch_bytes(ShaderProblem(*sides_of(node)), shaders)


def _lacks(node: Tensor) -> str | None:
    b, c = node.src[-2], node
    lacks = unread(b) or (gaps_in(b) if b.dtype is not F32 else None)
    if lacks:
        return lacks
    if b.dtype is not F32 and len(b.shape) > 2:
        return f"{b!r} has batches"
    if any(t.dtype is not F32 for t in (*node.src[:-2], node.src[-1], c)):
        return "a factor of another type than F32"
    if -(-c.shape[-2] // SMALL.m) > _MOST_TILES:
        return f"{c.shape[-2]:,} rows"
    return None


for _name in ("mul_mat", "out_prod"):
    declare(_name, _bind, lacks=_lacks, scratch=_scratch, tiled=(0,))
for _name in ("mul_mat_add", "out_prod_add"):
    declare(_name, _bind_added, lacks=_lacks, scratch=_scratch, tiled=(1,))

# -- with thin factors beside them: see ops/product/low_rank --------------------------------------


def _low_rank(node: Tensor) -> tuple[ShaderProblem, Factor]:
    """The product with the weight, and the thin factor of its columns."""
    *so_far, _, t, w, x = node.src
    assert node.op is not None
    (m, n), k, forward = node.shape, x.shape[1], node.op.name.startswith("mul_mat")
    of_w = Factor(k, 1, dtype=w.dtype) if forward else Factor(1, n, dtype=w.dtype)
    p = ShaderProblem(m, n, k, Factor(k, 1), of_w, adds=bool(so_far))
    return p, Factor(t.shape[1], 1) if forward else Factor(1, n)


def _bind_low_rank(site: ShaderSite) -> Sequence[Dispatch]:
    (p, of_u), (u, t, w, x) = _low_rank(site.node), site.src[-4:]
    beside = ThinFactors(site.node.src[-3].shape[1], of_u, t, u)
    o = ShaderOperands(site.out, x, w, site.scratch)
    product = multiply(p, o, site.shaders, beside)
    return _onto_first(site, product) if p.adds else product


def _low_rank_scratch(node: Tensor, shaders: Shaders) -> int:
    return scratch_bytes(_low_rank(node)[0], shaders)


def _low_rank_lacks(node: Tensor) -> str | None:
    if node.saved:
        return "a rounded copy of the result"
    return gaps_in(*node.src) or _lacks(node)


for _name, _w in (
    ("mul_mat_low_rank", 2), ("out_prod_low_rank", 2), ("out_prod_low_rank_add", 3),
):  # fmt: skip
    declare(_name, _bind_low_rank, lacks=_low_rank_lacks, scratch=_low_rank_scratch, tiled=(_w,))
