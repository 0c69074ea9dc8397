"""Parts of attention's shaders: products of tiles in a workgroup's memory.

A workgroup of 16 × 8 threads (x, y) has a tile of 32 rows (queries, or keys) and walks along
64 columns at a time (keys, or queries). Thread (x, y) has rows 4y … 4y + 3 and columns
4x … 4x + 3 of their products: a vector of four rows for each column.

    mine      16 numbers of each of the rows, turned: [number][row]
    other     16 numbers of each of the columns, turned; or whole columns of some
    weights   a number for each column and row: [column][row]

Rows of `mine` and `weights` end in a gap, so that neighbouring threads store into different banks.
All takes less than the 16 KB of memory that any device gives a workgroup.
"""

import re
from collections.abc import Sequence

from pyggml.backends.webgpu.wgsl.shader import QUADS, BufferRange

THREADS = 128
BLOCK_ROWS, BLOCK_COLUMNS = 32, 64  # of scores, in a workgroup
_DEPTH = 16  # numbers of a head at once
_OTHER = 256  # quads of whole columns at once
QUAD = 4
BAND = 16 * QUAD  # numbers of a head, of which each thread along x has a quad

MEMORY = f"""
var<workgroup> mine: array<vec4<f32>, {_DEPTH * (BLOCK_ROWS // QUAD + 1)}>;
var<workgroup> other: array<vec4<f32>, {max(_DEPTH * (BLOCK_COLUMNS // QUAD + 1), _OTHER + 16)}>;
var<workgroup> weights: array<vec4<f32>, {BLOCK_COLUMNS * (BLOCK_ROWS // QUAD + 1)}>;
"""
MAIN = f"""
@compute @workgroup_size({THREADS})
fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {{
    let x = me % 16u;
    let y = me / 16u;
    let first = at.x * {BLOCK_ROWS}u + P[0].x * 0u;
    let head = at.y;
"""


def bands_of(d: int) -> int:
    return -(-d // BAND)


def columns_at_once(d: int) -> int:
    """Whole columns that lie in `other` at once, a multiple of 4."""
    return _OTHER // -(-d // QUAD) // QUAD * QUAD


def as_quads(view: BufferRange, d: int) -> BufferRange:
    """The view, in quads if the rows of heads of d numbers allow it."""
    return view.of(QUADS) if d % QUAD == 0 and view.has_quads and view.size == 4 else view


def quad_functions(name: str, view: BufferRange, size: str) -> str:
    """`x_quad(row, d, there)`, four numbers of the row at element `row`; for what is written,
    `put_quad_x(row, d, v)`. size: the constant of how many numbers a head has."""
    in_quads = view.kind == QUADS
    ones = (f"{name}_one(row, d + {i}u)" for i in range(QUAD))
    read = f"{name}_at((row + d) / {QUAD}u)" if in_quads else f"vec4({', '.join(ones)})"
    one = f"""
fn {name}_one(row: u32, d: u32) -> f32 {{
    if (d >= {size}) {{ return 0.0; }}
    return {name}_at(row + d);
}}"""
    text = f"""{"" if in_quads else one}
fn {name}_quad(row: u32, d: u32, there: bool) -> vec4<f32> {{
    if (!there || d >= {size}) {{ return vec4<f32>(); }}
    return {read};
}}"""
    if not view.is_written:
        return text
    put = f"put_{name}((row + d) / {QUAD}u, v);"
    if not in_quads:
        put = " ".join(
            f"if (d + {i}u < {size}) {{ put_{name}(row + d + {i}u, v[{i}]); }}" for i in range(QUAD)
        )
    return f"{text}\nfn put_quad_{name}(row: u32, d: u32, v: vec4<f32>) {{ {put} }}"


def _transposing_copy(
    memory: str, size: int, source: str, at: str, below: str
) -> tuple[list[str], list[str]]:
    """The quads of 16 numbers of each of `size` rows that a thread reads, from D on, and what puts
    them into `memory`, turned; `at` is the element of row `r`."""
    step, quads = size // QUAD + 1, _DEPTH // QUAD
    first, element = at.split(":")
    reads, stores = [], []
    for i in range(size * quads // THREADS):
        row, c = f"((me + {i * THREADS}u) / {quads}u)", f"(me % {quads}u * {QUAD}u)"
        start = re.sub(r"\br\b", f"({first} + {row})", element)
        reads.append(f"{source}_quad({start}, D + {c}, {first} + {row} < {below})")
        for k in range(QUAD):
            quad = f"({c} + {k}u) * {step}u + {row} / {QUAD}u"
            stores.append(f"{memory}[{quad}][{row} % {QUAD}u] = {memory}{i}[{k}];")
    return reads, stores


def dots(sums: str, rows: tuple[str, str, str], columns: tuple[str, str, str], size: str) -> str:
    """sums0 … sums3 = the products of the thread's rows with its four columns.

    rows, columns: (tensor, "first:element of row r", the end of the rows that are there)
    size: the constant of how many numbers they have
    """
    steps = BLOCK_ROWS // QUAD + 1, BLOCK_COLUMNS // QUAD + 1
    products = []
    for k in range(_DEPTH):
        products.append(
            f"{{ let l = mine[{k * steps[0]}u + y]; let r = other[{k * steps[1]}u + x];"
        )
        products += [f"{sums}{j} = fma(l, vec4(r[{j}]), {sums}{j});" for j in range(QUAD)]
        products.append("}")
    mine, other = (
        _transposing_copy(*each)
        for each in (("mine", BLOCK_ROWS, *rows), ("other", BLOCK_COLUMNS, *columns))
    )
    ahead = {
        f"{memory}{i}": read
        for memory, (reads, _) in (("mine", mine), ("other", other))
        for i, read in enumerate(reads)
    }
    return f"""
{" ".join(f"var {sums}{j} = vec4<f32>();" for j in range(QUAD))}
{{
{chr(10).join(f"var {name} = {read.replace('D + ', '')};" for name, read in ahead.items())}
for (var d = 0u; d < {size}; d += {_DEPTH}u) {{
    {chr(10).join([*mine[1], *other[1]])}
    workgroupBarrier();
    let next = d + {_DEPTH}u;
    {chr(10).join(f"{name} = {read.replace('D + ', 'next + ')};" for name, read in ahead.items())}
    {" ".join(products)}
    workgroupBarrier();
}}
}}"""


def set_weights(values: Sequence[str]) -> str:
    """Numbers of the thread's four columns, vectors of its rows, to `weights`."""
    step = BLOCK_ROWS // QUAD + 1
    return "\n".join(
        f"weights[({QUAD}u * x + {j}u) * {step}u + y] = {value};" for j, value in enumerate(values)
    )


def sums_of(name: str, n_bands: int) -> str:
    """Variables of the thread's four rows and its quads of a head's numbers."""
    return " ".join(
        f"var {name}{i}_{b} = vec4<f32>();" for i in range(QUAD) for b in range(n_bands)
    )


def add_columns(name: str, n_bands: int, columns: tuple[str, str, str], size: str) -> str:
    """Add the columns, each times its weights, to the variables of `sums_of`."""
    source, at, below = columns
    first, element = at.split(":")
    terms = []
    for j in range(QUAD):
        terms.append(f"{{ let p = weights[(c + j + {j}u) * {BLOCK_ROWS // QUAD + 1}u + y];")
        for b in range(n_bands):
            terms.append(f"let v{b} = other[(j + {j}u) * {size}4 + x + {16 * b}u];")
            terms += [
                f"{name}{i}_{b} = fma(vec4(p[{i}]), v{b}, {name}{i}_{b});" for i in range(QUAD)
            ]
        terms.append("}")
    every = range(_OTHER // THREADS)
    of = [f"(me + {i * THREADS}u)" for i in every]
    reads = "\n".join(
        f"""{{
    let column = C + {e} / {size}4;
    let r = {first} + column;
    let there = {e} < {size}_AT_ONCE * {size}4 && column < {BLOCK_COLUMNS}u && r < {below};
    ahead{i} = {source}_quad({element}, {e} % {size}4 * {QUAD}u, there);
}}"""
        for i, e in zip(every, of, strict=True)
    )
    return f"""
{{
{" ".join(f"var ahead{i} = vec4<f32>();" for i in every)}
{reads.replace("C + ", "")}
for (var c = 0u; c < {BLOCK_COLUMNS}u; c += {size}_AT_ONCE) {{
    {" ".join(f"other[{e}] = ahead{i};" for i, e in zip(every, of, strict=True))}
    workgroupBarrier();
    let next = c + {size}_AT_ONCE;
    {reads.replace("C + ", "next + ")}
    for (var j = 0u; j < {size}_AT_ONCE && c + j < {BLOCK_COLUMNS}u; j += {QUAD}u) {{
        {" ".join(terms)}
    }}
    workgroupBarrier();
}}
}}"""


def put_rows(
    name: str, target: str, n_bands: int, at: str, below: str, size: str,
    factor: Sequence[str] = (),
) -> str:  # fmt: skip
    """Write the variables of `sums_of` as rows, each times its factor."""
    first, element = at.split(":")
    lines = []
    for i in range(QUAD):
        times = f" * {factor[i]}" if factor else ""
        puts = " ".join(
            f"if ({QUAD}u * x + {BAND * b}u < {size}) "
            f"{{ put_quad_{target}(row, {QUAD}u * x + {BAND * b}u, {name}{i}_{b}{times}); }}"
            for b in range(n_bands)
        )
        lines.append(f"""{{
    let r = {first} + {QUAD}u * y + {i}u;
    let row = {element};
    if (r < {below}) {{ {puts} }}
}}""")
    return "\n".join(lines)
