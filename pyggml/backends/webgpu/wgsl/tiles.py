"""The shader of a product of float32 matrices by tiles.

    C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]

A workgroup computes a tile of C. It copies some columns of A and B to its memory, and each thread
multiplies some of their rows, in registers. The copy is transposed: rows are neighbours. A gap
after each column keeps the threads that store it in different banks. The next columns are loaded
before the products, and arrive while these run.

The sum over k may be taken in parts, by workgroups of their own (`PER_PART` of k each): a small C
of a long sum would leave most of a large card idle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

QUAD = 4


@dataclass(frozen=True, slots=True)
class ShaderTile:
    """What a workgroup has: m × n numbers of C, each thread each_m × each_n of them.

    depth    columns of A and B that it copies at once
    """

    m: int
    n: int
    depth: int
    each_m: int = 8
    each_n: int = 8

    @property
    def threads(self) -> int:
        return self.m * self.n // (self.each_m * self.each_n)


@dataclass(frozen=True, slots=True)
class FactorReading:
    """How a factor is read: whether its neighbours in memory follow k or the rows, and in quads."""

    along_k: bool
    in_quads: bool


def factor_start(name: str) -> str:
    """The WGSL of the first element of batch z of a factor."""
    outer = f"z / INNER / {name}_REPEAT0 * {name}_STEP0"
    return f"{outer} + z % INNER / {name}_REPEAT1 * {name}_STEP1"


def quad_function(name: str, rows: str, reading: FactorReading) -> str:
    """The WGSL of `x_quad(start, row, k, stop)`: four neighbours from there on, 0 past the end.

    name: of the tensor; in capitals, of its constants. rows: the number of its rows.
    """
    x = name.upper()
    at = f"start + row * {x}_ROW + k * {x}_K"
    head = f"fn {name}_quad(start: u32, row: u32, k: u32, stop: u32) -> vec4<f32> {{"
    if reading.in_quads:
        return f"""{head}
    if (row >= {rows} || k >= stop) {{ return vec4<f32>(); }}
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


def _places(size: int, tile: ShaderTile, reading: FactorReading) -> Iterator[tuple[str, str]]:
    """(row, column) of the quads that a thread copies, in the tile; the first of each quad."""
    for i in range(size * tile.depth // QUAD // tile.threads):
        e = f"(me + {i * tile.threads}u)"
        if reading.along_k:
            yield f"({e} / {tile.depth // QUAD}u)", f"({e} % {tile.depth // QUAD}u * {QUAD}u)"
        else:
            yield f"({e} % {size // QUAD}u * {QUAD}u)", f"({e} / {size // QUAD}u)"


def _loads(name: str, size: int, tile: ShaderTile, reading: FactorReading) -> Iterator[str]:
    first = {"a": "first_m", "b": "first_n"}[name]
    for i, (row, column) in enumerate(_places(size, tile, reading)):
        yield f"{name}{i} = {name}_quad({name}_start, {first} + {row}, k + {column}, stop);"


def _stores(name: str, size: int, tile: ShaderTile, reading: FactorReading) -> Iterator[str]:
    step = size // QUAD + 1
    memory = {"a": "left", "b": "right"}[name]
    for i, (row, column) in enumerate(_places(size, tile, reading)):
        if not reading.along_k:
            yield f"{memory}[{column} * {step}u + {row} / {QUAD}u] = {name}{i};"
            continue
        for c in range(QUAD):
            quad = f"({column} + {c}u) * {step}u + {row} / {QUAD}u"
            yield f"{memory}[{quad}][{row} % {QUAD}u] = {name}{i}[{c}];"


def _bands(size: int, each: int) -> Iterator[int]:
    """Where the bands of a tile begin, in each of which a thread has one quad of rows."""
    yield from range(0, size, size // (each // QUAD))


def _multiplies(tile: ShaderTile) -> Iterator[str]:
    """Thread (x, y) has quads y and x of the bands: row i of its own is in band i / 4."""
    of_left, of_right = tile.m // QUAD + 1, tile.n // QUAD + 1
    for k in range(tile.depth):
        yield "{"
        for i, first in enumerate(_bands(tile.m, tile.each_m)):
            yield f"let l{i} = left[{k * of_left + first // QUAD}u + y];"
        for j, first in enumerate(_bands(tile.n, tile.each_n)):
            yield f"let r{j} = right[{k * of_right + first // QUAD}u + x];"
        for i in range(tile.each_m):
            for j in range(tile.each_n // QUAD):
                yield f"s{i}_{j} = fma(vec4(l{i // QUAD}[{i % QUAD}]), r{j}, s{i}_{j});"
        yield "}"


def _puts(tile: ShaderTile, in_quads: bool) -> Iterator[str]:
    bands = list(_bands(tile.m, tile.each_m))
    for i in range(tile.each_m):
        yield f"row = first_m + {bands[i // QUAD] + i % QUAD}u + {QUAD}u * y;"
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


@cache
def product_source(tile: ShaderTile, a: FactorReading, b: FactorReading, c_in_quads: bool) -> str:
    """A whole shader that names a, b, c and the constants of a product."""
    loads = [*_loads("a", tile.m, tile, a), *_loads("b", tile.n, tile, b)]
    stores = [*_stores("a", tile.m, tile, a), *_stores("b", tile.n, tile, b)]
    kept = [line.split(" ")[0] for line in loads]
    sums = [f"s{i}_{j}" for i in range(tile.each_m) for j in range(tile.each_n // QUAD)]
    wide = tile.n // tile.each_n  # threads along n
    lines = [
        quad_function("a", "M", a), quad_function("b", "N", b), _put(c_in_quads),
        f"var<workgroup> left: array<vec4<f32>, {tile.depth * (tile.m // QUAD + 1)}>;",
        f"var<workgroup> right: array<vec4<f32>, {tile.depth * (tile.n // QUAD + 1)}>;",
        f"@compute @workgroup_size({tile.threads})",
        "fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {",
        f"let x = me % 8u + me / 32u % {wide // 8}u * 8u;",  # 32 threads in step: 8 by 4 of them
        f"let y = me / 8u % 4u + me / {4 * wide}u * 4u;",
        f"let first_n = at.x * {tile.n}u + P[0].x * 0u;",
        f"let first_m = at.y * {tile.m}u;",
        "let z = at.z / PARTS;",
        f"let a_start = {factor_start('A')};",
        f"let b_start = {factor_start('B')};",
        "var k = at.z % PARTS * PER_PART;",
        "let stop = min(k + PER_PART, K);",
        *(f"var {name} = vec4<f32>();" for name in (*kept, *sums)),
        *loads,
        "while (k < stop) {",
        *stores,
        "workgroupBarrier();",
        f"k += {tile.depth}u;",
        *loads,  # zeros past the end
        *_multiplies(tile),
        "workgroupBarrier();",
        "}",
        "var row = 0u; var column = 0u;",
        *_puts(tile, c_in_quads),
        "}",
    ]  # fmt: skip
    return "\n".join(lines)
