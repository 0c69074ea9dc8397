"""How kernels are compiled: device functions, instructions that Numba lacks, kernels.

Under Numba's simulator, functions of this folder that have a twin in simulator.py are that twin.
"""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Any

from numba import types
from numba.core.cgutils import unpack_tuple

from pyggml.backends.cuda.code.lowering import search_in_one_round
from pyggml.backends.cuda.runtime.driver import CudaSupportError, cuda
from pyggml.backends.cuda.runtime.simulator import HAS_PTX, absent, twin_of

if HAS_PTX:
    search_in_one_round()
_compile: Callable[[Callable], Any] = cuda.jit(device=True)


def device(function: Callable) -> Any:
    """A function that kernels call."""
    return twin_of(function) or _compile(function)


def intrinsic(function: Callable) -> Any:
    """An instruction: what `function` (typing, *types) returns emits it as LLVM's code."""
    if not HAS_PTX:
        return twin_of(function) or absent(function)
    from numba.cuda import extending

    return extending.intrinsic(function)


ANY = None  # an argument of an instruction that is of any type


def instruction(returns: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: kernels may call a function whose LLVM code emit(builder, *arguments) writes.

    emit gets the address of an array's first number, and of a tuple a list. It returns a value, of
    a tuple a list, of nothing None.

    returns   the type of the result, in Numba's terms
    takes     the types of the arguments, to which those given are cast, or ANY
    """

    def declare(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def typing(_: Any, *kinds: Any) -> Any:
            own = (of or kind for of, kind in zip(takes, kinds, strict=True))
            return returns(*own), codegen

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            each = zip(signature.args, arguments, strict=True)
            result = emit(builder, *(_llvm_argument(context, builder, *one) for one in each))
            if isinstance(result, list):
                return context.make_tuple(builder, signature.return_type, result)
            return context.get_dummy_value() if result is None else result

        names = [Parameter(f"_{i}", Parameter.POSITIONAL_ONLY) for i in range(len(takes) + 1)]
        vars(typing)["__signature__"] = Signature(names)  # else Numba asks for that of emit
        return intrinsic(typing)

    return declare


def _llvm_argument(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """An argument as `emit` gets it."""
    if isinstance(kind, types.Array):
        return context.make_array(kind)(context, builder, value).data
    if isinstance(kind, types.BaseTuple):
        parts = zip(kind.types, unpack_tuple(builder, value), strict=True)
        return [_llvm_argument(context, builder, *part) for part in parts]
    return value


def _store() -> Any:
    """The store of compiled kernels; None with a version of numba-cuda that lacks what it needs."""
    try:
        from pyggml.backends.cuda.runtime.cubins import Cubins
    except ImportError:
        return None
    return Cubins


def kernel(
    function: Callable, most_threads: int = 0, shared_bytes: int = 0, least_blocks: int = 1
) -> Any:
    """A kernel, compiled when it is first launched and kept on disk (cubins.py).

    most_threads: of a block, which limits the registers of each; 0 for any number
    shared_bytes: of dynamic shared memory that a launch may ask for, if that is more than 48 KiB;
                  at most `most_shared()`
    least_blocks: of most_threads, for which a multiprocessor's registers must be enough
    """
    bounds = {"launch_bounds": (most_threads, least_blocks)} if most_threads and HAS_PTX else {}
    code = cuda.jit(**bounds)(function) if bounds else cuda.jit(function)
    store = _store()
    if store is not None:
        code._cache = store(function, shared_bytes, (most_threads, least_blocks))
    return code


ALWAYS_SHARED = 48 << 10  # bytes of dynamic shared memory without `allow_shared`
_SHARED_OF_LARGE = 227 << 10  # of a card that there is none of


def most_shared() -> int:
    """Bytes of shared memory that a block may have on this card."""
    if _store() is None:  # which allows a kernel more
        return ALWAYS_SHARED
    try:
        return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    except CudaSupportError:
        return _SHARED_OF_LARGE
