"""The shader of a product of matrices by tiles.

    C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]

A workgroup computes a tile of C. It copies some columns of A and B to its memory, and each thread
multiplies some of their rows, in registers. The copy is transposed, in blocks of 4 × 4: rows are
neighbours. A gap after each column keeps the threads that store it in different banks. The next
columns are loaded before the products, and arrive while these run.

With tiles of float16, copies and products are such, two at once where the card can; their sums over
the columns of a copy are added up in float32. Rows of A then have scales (wgsl/halves.py).

The sum over k may be taken in parts, by workgroups of their own (`PER_PART` of k each): a small C
of a long sum would leave most of a large card idle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pyggml.backends.webgpu.wgsl.shader import QUADS

QUAD = 4


@dataclass(frozen=True, slots=True)
class ShaderTile:
    """What a workgroup has: m × n numbers of C, each thread each_m × each_n of them.

    depth    columns of A and B that it copies at once
    quads    the WGSL type of four numbers there
    """

    m: int
    n: int
    depth: int
    each_m: int = 8
    each_n: int = 8
    quads: str = QUADS

    @property
    def threads(self) -> int:
        return self.m * self.n // (self.each_m * self.each_n)


@dataclass(frozen=True, slots=True)
class FactorReading:
    """How a factor is read: whether its neighbours in memory follow k or the rows, and in quads.

    has_all    whether no quad past its end is asked for
    """

    along_k: bool
    in_quads: bool
    has_all: bool = False


def factor_start(name: str) -> str:
    """The WGSL of the first element of batch z of a factor."""
    outer = f"z / INNER / {name}_REPEAT0 * {name}_STEP0"
    return f"{outer} + z % INNER / {name}_REPEAT1 * {name}_STEP1"


def quad_function(name: str, rows: str, reading: FactorReading, quads: str = QUADS) -> str:
    """The WGSL of `x_quad(start, row, k, stop)`: four neighbours from there on, 0 past the end.

    name: of the tensor; in capitals, of its constants. rows: the number of its rows.
    """
    x = name.upper()
    at = f"start + row * {x}_ROW + k * {x}_K"
    head = f"fn {name}_quad(start: u32, row: u32, k: u32, stop: u32) -> {quads} {{"
    if reading.in_quads:
        ends = f"if (row >= {rows} || k >= stop) {{ return {quads}(); }}"
        return f"""{head}
    {"" if reading.has_all else ends}
    return {name}_at(({at}) >> 2u);
}}"""
    ones = (f"row, k + {i}u" if reading.along_k else f"row + {i}u, k" for i in range(QUAD))
    return f"""
fn {name}_one(start: u32, row: u32, k: u32, stop: u32) -> f32 {{
    if (row >= {rows} || k >= stop) {{ return 0.0; }}
    return {name}_at({at});
}}
{head}
    return vec4({", ".join(f"{name}_one(start, {one}, stop)" for one in ones)});
}}"""


def _blocks(
    name: str, size: int, tile: ShaderTile, along_k: bool
) -> Iterator[tuple[str, str, str]]:
    """(condition, row, column) of the blocks of 4 × 4 that a thread copies; its first number. What
    has fewer than threads goes to the first threads for A, to the last for B."""
    n, across = size * tile.depth // QUAD**2, (tile.depth if along_k else size) // QUAD
    for first in range(0, n, tile.threads):
        e = f"(me + {first}u)" if name == "a" else f"({first + tile.threads - 1}u - me)"
        along, other = f"({e} % {across}u * {QUAD}u)", f"({e} / {across}u * {QUAD}u)"
        condition = "" if first + tile.threads <= n else f"if ({e} < {n}u)"
        yield condition, *((other, along) if along_k else (along, other))


def _loads(name: str, size: int, tile: ShaderTile, along_k: bool) -> Iterator[str]:
    first = {"a": "first_m", "b": "first_n"}[name]
    for i, (condition, row, column) in enumerate(_blocks(name, size, tile, along_k)):
        yield f"{condition} {{"
        for c in range(QUAD):
            at = f"{row} + {c}u, k + {column}" if along_k else f"{row}, k + {column} + {c}u"
            yield f"{name}{i}_{c} = {name}_quad({name}_start, {first} + {at}, stop);"
        yield "}"


def _stores(name: str, size: int, tile: ShaderTile, along_k: bool) -> Iterator[str]:
    step, memory = size // QUAD + 1, {"a": "left", "b": "right"}[name]
    for i, (condition, row, column) in enumerate(_blocks(name, size, tile, along_k)):
        yield f"{condition} {{"
        for c in range(QUAD):
            quad = f"{name}{i}_{c}"
            if along_k:
                quad = f"{tile.quads}({', '.join(f'{name}{i}_{r}[{c}]' for r in range(QUAD))})"
            yield f"{memory}[({column} + {c}u) * {step}u + {row} / {QUAD}u] = {quad};"
        yield "}"


def _bands(size: int, each: int) -> Iterator[int]:
    """Where the bands of a tile begin, in each of which a thread has one quad of rows."""
    yield from range(0, size, size // (each // QUAD))


def _multiplies(tile: ShaderTile) -> Iterator[str]:
    """Thread (x, y) has quads y and x of the bands: row i of its own is in band i / 4."""
    of_left, of_right = tile.m // QUAD + 1, tile.n // QUAD + 1
    sums = [f"{i}_{j}" for i in range(tile.each_m) for j in range(tile.each_n // QUAD)]
    into = "s" if tile.quads == QUADS else "h"
    for k in range(tile.depth):
        yield "{"
        for i, first in enumerate(_bands(tile.m, tile.each_m)):
            yield f"let l{i} = left[{k * of_left + first // QUAD}u + y];"
        for j, first in enumerate(_bands(tile.n, tile.each_n)):
            yield f"let r{j} = right[{k * of_right + first // QUAD}u + x];"
        for each in sums:
            i, j = map(int, each.split("_"))
            left = f"{tile.quads}(l{i // QUAD}[{i % QUAD}])"
            yield f"{into}{each} = fma({left}, r{j}, {into}{each});"
        yield "}"
    if into == "h":
        yield from (f"s{each} += {QUADS}(h{each}); h{each} = {tile.quads}();" for each in sums)


def _row(tile: ShaderTile, i: int) -> str:
    """Row i of the thread."""
    band = [*_bands(tile.m, tile.each_m)][i // QUAD]
    return f"first_m + {band + i % QUAD}u + {QUAD}u * y"


def _scales(tile: ShaderTile) -> Iterator[str]:
    for i in range(tile.each_m):
        yield f"{{ let scale = scales_at(min({_row(tile, i)}, M - 1u));"
        yield from (f"s{i}_{j} *= scale;" for j in range(tile.each_n // QUAD))
        yield "}"


def _adds_beside(tile: ShaderTile, along_k: bool) -> Iterator[str]:
    """Add the product with thin factors t and u to the sums, four of their columns at a time."""
    yield "if (at.z % PARTS == 0u) { for (var r = 0u; r < RANK; r += 4u) {"
    for j, first in enumerate(_bands(tile.n, tile.each_n)):
        column = f"first_n + {first}u + {QUAD}u * x"
        for c in range(QUAD):
            at = f"{column} + {c}u, r" if along_k else f"{column}, r + {c}u"
            yield f"let u{j}_{c} = u_quad(0u, {at}, RANK);"
    for i in range(tile.each_m):
        yield f"{{ let t = t_quad(0u, {_row(tile, i)}, r, RANK);"
        for j in range(tile.each_n // QUAD):
            for c in range(QUAD):
                if along_k:
                    yield f"s{i}_{j}[{c}] += dot(t, u{j}_{c});"
                else:
                    yield f"s{i}_{j} = fma(vec4(t[{c}]), u{j}_{c}, s{i}_{j});"
        yield "}"
    yield "} }"


def _puts(tile: ShaderTile, in_quads: bool) -> Iterator[str]:
    for i in range(tile.each_m):
        yield f"row = {_row(tile, i)};"
        for j, first in enumerate(_bands(tile.n, tile.each_n)):
            yield f"column = first_n + {first}u + {QUAD}u * x;"
            if in_quads:
                yield f"put_quad(at.z, row, column, s{i}_{j});"
            else:
                yield from (
                    f"put_one(at.z, row, column + {c}u, s{i}_{j}[{c}]);" for c in range(QUAD)
                )


def _put(in_quads: bool) -> str:
    name, kind, at = (
        ("quad", "vec4<f32>", "(c_index >> 2u)") if in_quads else ("one", "f32", "c_index")
    )
    return f"""
fn put_{name}(z: u32, row: u32, column: u32, sum: {kind}) {{
    if (row >= M || column >= N) {{ return; }}
    let c_index = (z * M + row) * C_ROW + C_FIRST + column;
    var value = sum;
    if (ADDS) {{ value += c_at({at}); }}
    put_c({at}, value);
}}"""


def _begin(tile: ShaderTile) -> Iterator[str]:
    """Which tile a workgroup has, and which rows of it a thread."""
    wide = tile.n // tile.each_n  # threads along n
    yield f"""
var<workgroup> left: array<{tile.quads}, {tile.depth * (tile.m // QUAD + 1)}>;
var<workgroup> right: array<{tile.quads}, {tile.depth * (tile.n // QUAD + 1)}>;
@compute @workgroup_size({tile.threads})
fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {{
    let x = me % 8u + me / 32u % {wide // 8}u * 8u;  // 32 threads in step: 8 by 4 of them
    let y = me / 8u % 4u + me / {4 * wide}u * 4u;
    let first_n = at.x * {tile.n}u + P[0].x * 0u;
    let first_m = at.y * {tile.m}u;
    let z = at.z / PARTS;
    let a_start = {factor_start("A")};
    let b_start = {factor_start("B")};
    var k = at.z % PARTS * PER_PART;
    let stop = min(k + PER_PART, K);"""


@cache
def product_source(
    tile: ShaderTile,
    a: FactorReading,
    b: FactorReading,
    c_in_quads: bool,
    beside: tuple[FactorReading, FactorReading] | None = None,
) -> str:
    """A whole shader that names a, b, c and the constants of a product; of float16, scales too.

    beside: how thin factors t and u are read, whose product is added.
    """
    factors = [("a", tile.m, tile, a.along_k), ("b", tile.n, tile, b.along_k)]
    loads, stores = ([line for f in factors for line in of(*f)] for of in (_loads, _stores))
    kept = [line.split(" ")[0] for line in loads if "=" in line]
    sums = [f"s{i}_{j}" for i in range(tile.each_m) for j in range(tile.each_n // QUAD)]
    in_halves = tile.quads != QUADS
    kept += [s.replace("s", "h") for s in sums] if in_halves else []
    lines = [
        quad_function("a", "M", a, tile.quads), quad_function("b", "N", b, tile.quads),
        *(quad_function(*each) for each in zip("tu", "MN", beside or (), strict=False)),
        _put(c_in_quads),
        *_begin(tile),
        *(f"var {name} = {tile.quads}();" for name in kept),
        *(f"var {name} = {QUADS}();" for name in sums),
        *loads,
        "while (k < stop) {",
        *stores,
        f"workgroupBarrier(); k += {tile.depth}u;",
        *(("if (k < stop) {", *loads, "}") if a.has_all else loads),  # else zeros past the end
        *_multiplies(tile),
        "workgroupBarrier(); }",
        *(_scales(tile) if in_halves else ()),
        *(_adds_beside(tile, beside[1].along_k) if beside else ()),
        "var row = 0u; var column = 0u;",
        *_puts(tile, c_in_quads),
        "}",
    ]  # fmt: skip
    return "\n".join(lines)
