"""Parts: kernels that other kernels call. They have no wrapper for Python and no machine code.

Numba makes both of each function that it compiles, though a kernel that calls the function takes a
copy of its LLVM code and nothing else. Here a function of this package that a kernel calls is a
part, and a library's machine code waits until somebody asks for an address in it. Where Python
calls a part later, it is compiled once more, as a kernel.

A module's optimisation waits as well. What a kernel calls is optimised with the kernel, where LLVM
sees it in place, and not in each module on the way there: so a kernel has the same machine code
whether or not Python called what it calls.

All of it changes private methods of Numba, and does nothing where another version lacks them.
"""

import threading
from collections.abc import Callable
from typing import Any

from llvmlite.binding import parse_bitcode
from numba import types
from numba.core import dispatcher, sigutils
from numba.core.caching import Cache
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen, RuntimeLinker
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher


class _Thread(threading.local):
    """What a thread compiles: whether a kernel asked for it, and the function that becomes a
    part."""

    by_kernel = False
    part: Callable | None = None


_THREAD = _Thread()


def _replace(*changes: tuple[Any, str, Callable]) -> None:
    """Put make(method) in place of each method (class, name, make), if all are there."""
    methods = [getattr(owner, name, None) for owner, name, _ in changes]
    if None not in methods:
        for (owner, name, make), method in zip(changes, methods, strict=True):
            setattr(owner, name, make(method))


def compile_parts() -> None:
    """Compile functions of this package that kernels call as parts."""
    _replace(
        (CPUDispatcher, "get_call_template", _note_kernel),
        (CPUDispatcher, "compile", _compile_as_asked),
        (CPUDispatcher, "add_overload", _add_part),
        (Cache, "_index_key", _key_parts),
        (getattr(dispatcher, "_FunctionCompiler", None), "_customize_flags", _leave_wrapper_out),
    )


def _note_kernel(template: Callable) -> Callable:
    def get_call_template(dispatcher: Any, args: Any, kws: Any) -> Any:
        _THREAD.by_kernel = dispatcher.py_func.__module__.startswith("pyggml")
        if _THREAD.by_kernel:
            args = tuple(types.unliteral(kind) for kind in args)
            kws = {name: types.unliteral(kind) for name, kind in kws.items()}
        try:
            return template(dispatcher, args, kws)
        finally:
            _THREAD.by_kernel = False

    return get_call_template


def _compile_as_asked(compile_any: Callable) -> Callable:
    def compile_one(dispatcher: Any, sig: Any) -> Any:
        is_part, _THREAD.by_kernel = _THREAD.by_kernel, False
        outer, _THREAD.part = _THREAD.part, dispatcher.py_func if is_part else None
        try:
            with global_compiler_lock:
                args = tuple(sigutils.normalize_signature(sig)[0])
                if not is_part and args in _parts_of(dispatcher):
                    _parts_of(dispatcher).remove(args)
                    del dispatcher.overloads[args]
                return compile_any(dispatcher, sig)
        finally:
            _THREAD.part = outer

    return compile_one


def _parts_of(dispatcher: Any) -> set[tuple]:
    """The types of arguments for which it is a part."""
    parts: set[tuple] = vars(dispatcher).setdefault("_pyggml_parts", set())
    return parts


def _add_part(add: Callable) -> Callable:
    def add_overload(dispatcher: Any, result: Any) -> None:
        if _THREAD.part is dispatcher.py_func:
            args = tuple(result.signature.args)
            dispatcher.overloads[args] = result
            _parts_of(dispatcher).add(args)
        else:
            add(dispatcher, result)

    return add_overload


def _key_parts(index_key: Callable) -> Callable:
    def key(cache: Any, sig: Any, codegen: Any) -> Any:
        is_part = _THREAD.part is cache._py_func
        return (is_part, *index_key(cache, sig, codegen))

    return key


def _leave_wrapper_out(customize: Callable) -> Callable:
    def customize_flags(compiler: Any, flags: Any) -> Any:
        flags = customize(compiler, flags)
        if _THREAD.part is compiler.py_func:
            flags.no_cpython_wrapper = True
        return flags

    return customize_flags


# -- libraries ------------------------------------------------------------------------------------


def emit_when_called() -> None:
    """Optimise a library and make its machine code when an address in it is asked for. LLVM code
    that the cache has is parsed when it is linked into a kernel: parsed, that of a step's hundred
    kernels takes 10 MB where 3 do."""
    _replace(
        (JITCodeLibrary, "_optimize_final_module", _optimize_if_emitted),
        (JITCodeLibrary, "_finalize_final_module", _finish_if_emitted),
        (JITCodeLibrary, "get_pointer_to_function", _emit_and_look_up),
        (JITCodeLibrary, "serialize_using_object_code", _serialize),
        (JITCodeLibrary, "_unserialize", _unserialize_unparsed),
        (JITCodeLibrary, "_get_module_for_linking", _parse_when_linked),
        (JITCPUCodegen, "set_env", _set_where_read),
    )


def _emit(library: Any) -> None:
    if not _is_emitted(library):
        library._pyggml_emitted = library._finalized = True
        if not _is_loaded(library):
            library._get_module_for_linking()  # others get it as it is before it is optimised
            library._optimize_final_module()
        library._dynamic_globals.clear()
        library._finalize_final_module()
        if _is_loaded(library):
            library._codegen._engine._load_defined_symbols(parse_bitcode(library._bitcode))


def _is_emitted(library: Any) -> bool:
    return getattr(library, "_pyggml_emitted", False)


def _is_loaded(library: Any) -> bool:
    return hasattr(library, "_bitcode")


def _optimize_if_emitted(optimize: Callable) -> Callable:
    def optimize_if_emitted(library: Any) -> None:
        if _is_emitted(library):
            optimize(library)

    return optimize_if_emitted


def _finish_if_emitted(finish: Callable) -> Callable:
    def finish_if_emitted(library: Any) -> None:
        if _is_emitted(library):
            finish(library)
            return
        library._finalize_dynamic_globals()
        library._verify_declare_only_symbols()
        library._finalized = True
        names = (g.name for g in library._final_module.global_variables)
        if any(name.startswith(RuntimeLinker.PREFIX) for name in names):  # it calls itself
            _emit(library)

    return finish_if_emitted


def _emit_and_look_up(address: Callable) -> Callable:
    def get_pointer_to_function(library: Any, name: str) -> Any:
        library._ensure_finalized()
        if not _is_emitted(library) and not _defines(library, name):
            return 0  # as Numba says of a wrapper that is not there
        _emit(library)
        return address(library, name)

    return get_pointer_to_function


def _defines(library: Any, name: str) -> bool:
    if _is_loaded(library):
        return bool(library._compiled_object)
    try:
        return bool(library._final_module.get_function(name))
    except NameError:
        return False


def _serialize(serialize: Callable) -> Callable:
    def serialize_code(library: Any) -> Any:
        if _THREAD.part is None:
            library._ensure_finalized()
            _emit(library)
            return serialize(library)
        return library.name, "object", (b"", library._get_module_for_linking().as_bitcode())

    return serialize_code


def _unserialize_unparsed(unserialize: Any) -> Any:
    def load(cls: Any, codegen: Any, state: Any) -> Any:
        name, kind, data = state
        if kind != "object":
            return unserialize.__func__(cls, codegen, state)
        code, bitcode = data
        library = codegen.create_library(name)
        library.enable_object_caching()
        if code:
            library._set_compiled_object(code)
        library._bitcode, library._finalized = bitcode, True
        return library

    return classmethod(load)


def _parse_when_linked(for_linking: Callable) -> Callable:
    def get_module(library: Any) -> Any:
        if library._shared_module is None and _is_loaded(library):
            library._shared_module = parse_bitcode(library._bitcode)
        return for_linking(library)

    return get_module


def _set_where_read(set_any: Callable) -> Callable:
    def set_env(codegen: Any, name: str, env: Any) -> None:
        if codegen._engine.is_symbol_defined(name):
            set_any(codegen, name, env)

    return set_env
