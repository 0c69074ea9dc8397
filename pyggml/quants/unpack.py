"""UNPACK: each weight type's blocks → float32, derived from its decoder.

LAYOUTS        the decoder of every type
DIRECT_TYPES   types whose products read blocks as they lie
INTEGER_TYPES  direct types whose weights are whole numbers with scales
WHOLE_TYPES    all types whose weights are whole numbers with scales
MINIMA_TYPES   integer types with minima
"""

from functools import partial
from typing import Any

from llvmlite import ir

from pyggml.graph.dtypes import BY_NUMBER, DType
from pyggml.jit import JIT, BlockCode, block_code, carray, instruction, types
from pyggml.jit.llvm import I64
from pyggml.quants.layout import GROUP, Decoder
from pyggml.quants.readers.arrays import decode, observe
from pyggml.quants.readers.vectors import FloatsOut, emit_blocks
from pyggml.quants.registry import QUANTS

LAYOUTS: dict[str, Decoder] = {name: q.decode for name, q in QUANTS.items()}
DIRECT_TYPES = tuple(name for name, q in QUANTS.items() if q.direct)
_SEEN = {name: observe(LAYOUTS[name], QUANTS[name].dtype) for name in DIRECT_TYPES}
INTEGER_TYPES = tuple(name for name, block in _SEEN.items() if not block.is_plain)
WHOLE_TYPES = tuple(name for name, q in QUANTS.items() if q.dtype.block > 1)
MINIMA_TYPES = frozenset(name for name, block in _SEEN.items() if block.minima is not None)


@instruction(lambda to, source, n: types.void(to, source, types.intp), n_constants=1)
def _unpack_blocks(builder: Any, number: int, to: Any, source: Any, n: Any) -> None:
    """n blocks at pointer `source` to float32 at pointer `to`; number: the type's in ggml, a
    constant."""
    kind = BY_NUMBER[number]
    addresses = builder.ptrtoint(source, I64), builder.ptrtoint(to, I64)
    if kind.block == 1:
        _emit_plain(builder, kind, n, addresses)
    else:
        _emit(builder, kind, n, addresses, kind.block)


def _emit(builder: Any, kind: DType, n: Any, addresses: tuple[Any, Any], size: int) -> None:
    """Unpack n · size weights, `size` in one iteration."""
    sizes = size // kind.block * kind.block_bytes, 4 * size
    emit_blocks(builder, LAYOUTS[kind.name], n, addresses, sizes, partial(FloatsOut, size=size))


def _emit_plain(builder: Any, kind: DType, n: Any, addresses: tuple[Any, Any]) -> None:
    """Unpack n weights of a plain type: GROUP in one iteration, then one by one."""
    group = ir.Constant(I64, GROUP)
    n_groups, n_left = builder.udiv(n, group), builder.urem(n, group)
    _emit(builder, kind, n_groups, addresses, GROUP)
    done = builder.mul(n_groups, group)
    rest = (
        builder.add(base, builder.mul(done, ir.Constant(I64, size)))
        for base, size in zip(addresses, (kind.block_bytes, 4), strict=True)
    )
    _emit(builder, kind, n_left, (*rest,), 1)


def _unpacker(kind: DType) -> BlockCode:
    number, block, block_bytes = kind.number, kind.block, kind.block_bytes

    def compiled(dst, src, n_blocks):
        _unpack_blocks(number, dst, src, n_blocks)

    def interpreted(dst, src, n_blocks):
        raw, out = carray(src, (n_blocks, block_bytes)), carray(dst, (n_blocks, block))
        decode(LAYOUTS[kind.name], raw, out)

    return block_code(compiled if JIT else interpreted)


# code(dst, src, n_blocks): n_blocks consecutive blocks at src to n_blocks · block float32.
UNPACK: dict[str, BlockCode] = {name: _unpacker(q.dtype) for name, q in QUANTS.items()}
