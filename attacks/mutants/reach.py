"""What compiled kernels are made of: a mutant in it needs them compiled anew, and kernels compiled
before it was there must not be loaded from the cache."""

import ast
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from numba.core.caching import Cache

from attacks.mutants.changes import ROOT

_OURS = (str(ROOT / "pyggml"), str(ROOT / "lora"))


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions in it, in their order."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def _python(value: Any) -> Any:
    """The Python function of a kernel, of an intrinsic, or of neither."""
    value = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    return getattr(value, "__func__", value)


def _named_by(function: FunctionType) -> Iterator[Any]:
    """The values that a function's code has names for, where it knows them before it runs."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue
    for code in codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield value
            if isinstance(value, ModuleType) and "pyggml" in value.__name__:
                yield from (getattr(value, other, None) for other in code.co_names)


def _inside(value: Any) -> Iterator[Any]:
    """The values in a table, the methods of a class or of an object's."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__.startswith("pyggml"):
        for base in kind.__mro__[:-1]:
            for method in vars(base).values():
                yield getattr(method, "fget", None) or method


@functools.lru_cache(4096)
def reach(kernel: FunctionType) -> tuple[FunctionType, ...]:
    """A kernel's Python function, and every function of this checkout that it may be made of."""
    seen: dict[int, Any] = {}
    functions, waiting = [], [kernel]
    while waiting:
        value = _python(waiting.pop())
        if id(value) in seen or isinstance(value, str | int | float | bytes):
            continue
        seen[id(value)] = value
        if not isinstance(value, FunctionType):
            waiting += _inside(value)
        elif value.__code__.co_filename.startswith(_OURS):
            functions.append(value)
            waiting += _named_by(value)
    return tuple(functions)


def watch_cache(on_load: Callable[[FunctionType], bool], saves: bool = False) -> None:
    """Ask on_load whether a kernel may be taken from the cache; write there only if it saves."""
    load = Cache.load_overload

    def ask(self: Any, sig: Any, target_context: Any) -> Any:
        return load(self, sig, target_context) if on_load(self._py_func) else None

    Cache.load_overload = ask
    if not saves:
        Cache.save_overload = lambda self, sig, data: None


def importers(file: str) -> set[str]:
    """A file of kernels, and those of the checkout that take names from it, by any number of
    steps; absolute paths."""
    imports = _imports()
    found, waiting = set(), [file]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [other for other, taken in imports.items() if name in taken]
    return {str(ROOT / name) for name in found}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """file -> the files of pyggml that it imports, named from the checkout's root."""
    files = [
        p for room in ("kernels", "ops", "jit") for p in (ROOT / "pyggml" / room).rglob("*.py")
    ]
    return {
        str(path.relative_to(ROOT)): {
            f"{node.module.replace('.', '/')}.py"
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        for path in files
    }
