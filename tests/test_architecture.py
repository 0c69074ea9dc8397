"""The map holds: imports point one way, few files talk to Numba, private names stay at home, files
stay short, and no kernel is made of anything whose edits the kernel cache would not notice."""

import ast
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from pyggml.jit.cache import SHARED

ROOT = Path(__file__).parents[1]
FOLDERS = {"pyggml": "pyggml", "lora": "pyggml.lora", "cli": "pyggml.cli"}
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
OTHERS = sorted(
    p for folder in ("examples", "benchmarks", "attacks") for p in (ROOT / folder).rglob("*.py")
)

# The map: a room may import itself and the rooms of earlier lines, never those of later ones.
MAP = """
errors extras files granted heap hub settings sizes
formulas
graph
backends.base backends.kit
jit threads
quants
kernels
ops
backward
alloc
backends.cpu backends
backends.cuda
backends.webgpu
runtime
look.check
eager
gguf
tokenizer
chat
models
model
requantize
fresh
look
lab
generation
lora
cli
__main__
"""
LEVEL = {room: i for i, rooms in enumerate(MAP.strip().splitlines()) for room in rooms.split()}
JIT_FILES = {f"pyggml/jit/{p.name}" for p in (ROOT / "pyggml/jit").glob("*.py")}
USES_NUMBA = {*JIT_FILES, "pyggml/jit/frames.py", "pyggml/jit/isa.py"}
USES_NUMBA |= {
    f"pyggml/backends/cuda/{name}.py"
    for name in (
        "code/byte_ptx",
        "code/cluster_ptx",
        "code/group_ptx",
        "code/jit",
        "code/lowering",
        "code/ptx",
        "code/straight",
        "runtime/ahead",
        "runtime/cubins",
        "runtime/driver",
        "runtime/toolkit",
    )
}
USES_LLVM = {  # intrinsics, what kernels close over, and the features of this CPU
    "pyggml/gguf/mapped.py",
    "pyggml/backends/cuda/runtime/sending.py",
    "pyggml/jit/frames.py",
    "pyggml/jit/arm.py",
    "pyggml/jit/isa.py",
    "pyggml/jit/cache.py",
    "pyggml/jit/compiler.py",
    "pyggml/jit/workarounds.py",
    "pyggml/jit/parts.py",
    "pyggml/jit/llvm.py",
    "pyggml/jit/atomics.py",
    "pyggml/jit/pool.py",
    "pyggml/jit/regions.py",
    "pyggml/backends/cuda/code/byte_ptx.py",
    "pyggml/backends/cuda/code/cluster_ptx.py",
    "pyggml/backends/cuda/code/group_ptx.py",
    "pyggml/backends/cuda/runtime/cubins.py",
    "pyggml/backends/cuda/code/ptx.py",
    "pyggml/kernels/gemm/activations.py",
    "pyggml/kernels/gemm/amx/rows.py",
    "pyggml/kernels/gemm/amx/tiles.py",
    "pyggml/kernels/attention/row_softmax.py",
    "pyggml/kernels/attention/decode_tile.py",
    "pyggml/kernels/gemm/dots.py",
    "pyggml/kernels/gemm/few_bits_pack.py",
    "pyggml/kernels/gemm/few_bits_tile.py",
    "pyggml/kernels/gemm/int8_tile.py",
    "pyggml/kernels/gemm/int_dots.py",
    "pyggml/kernels/gemm/int_pack.py",
    "pyggml/kernels/gemm/lane_dots.py",
    "pyggml/kernels/gemm/row_plan.py",
    "pyggml/kernels/gemm/tile.py",
    "pyggml/kernels/gemm/bfloat16.py",
    "pyggml/kernels/gemm/microkernel.py",
    "pyggml/quants/bits.py",
    "pyggml/quants/unpack.py",
    "pyggml/quants/readers/lanes.py",
    "pyggml/quants/readers/pieces.py",
    "pyggml/quants/readers/vectors.py",
}
COMPILED = {"kernel", "parallel", "exact", "block_code", "task_code", "panels_code", "intrinsic"}
COMPILED |= {"instruction"}
MOST_LINES, MOST_FUNCTION_LINES, MOST_KERNEL_LINES = 700, 40, 60


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def for_each(paths):
    """A test of a rule for one file holds these files to it, and names all that break it."""

    def every(rule):
        def test():
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{name_of(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return every


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path):
    return tuple(ast.walk(tree_of(path)))


def module_of(path):
    """ops/arithmetic/arith.py -> pyggml.ops.arithmetic.arith; lora/data.py -> pyggml.lora.data."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in rest if part != "__init__")])


MODULES = {module_of(p): p for p in FILES}


@cache
def imports(path, types=True):
    """(module, name) for every `from module import name`, (module, None) for `import module`; with
    those for type checking only, or without."""
    found, ready = [], [tree_of(path)]
    while ready:
        node = ready.pop()
        if types or not (isinstance(node, ast.If) and "TYPE_CHECKING" in names_read(node.test)):
            inner = ast.stmt | ast.excepthandler | ast.match_case
            ready += [n for n in ast.iter_child_nodes(node) if isinstance(n, inner)]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} imports relatively"
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
    return found


def imported_modules(path, types=True):
    """Modules of this project that a file imports, `from pyggml import gemm` included."""
    for module, name in imports(path, types):
        if f"{module}.{name}" in MODULES:
            yield f"{module}.{name}"
        elif module in MODULES:
            yield module


def room_of(module):
    """pyggml.backends.cpu.device -> backends.cpu; pyggml itself -> ''."""
    room = module.removeprefix("pyggml").removeprefix(".")
    while room and room not in LEVEL:
        room = room.rpartition(".")[0]
    return room


# -- imports ------------------------------------------------------------------------------------


def test_every_module_has_a_room():
    assert [m for m in MODULES if m != "pyggml" and not room_of(m)] == []


def test_every_room_has_modules():
    assert {room_of(m) for m in MODULES} - {""} == LEVEL.keys()


MOST_MODULES_AT_THE_ROOT = 10


def test_the_root_holds_few_modules():
    loose = [p.stem for p in (ROOT / "pyggml").glob("*.py") if p.stem != "__init__"]
    assert len(loose) <= MOST_MODULES_AT_THE_ROOT, loose


def test_every_package_is_installed():
    """A plain `pip install .` copies the packages that pyproject.toml lists, and no others, and of
    files that are no Python those of its package-data."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packages = {module_of(p) for p in FILES if p.name == "__init__.py"}
    assert set(settings["packages"]) == packages
    folders = {module_of(p): p.parent for p in FILES if p.name == "__init__.py"}
    data = settings["package-data"]
    patterns = [f"{folders[package]}/{p}" for package in data for p in data[package]]
    others = [
        p for f in FOLDERS for p in (ROOT / f).rglob("*.*") if p.suffix not in (".py", ".pyc")
    ]
    for path in others:
        assert any(fnmatch(path, p) for p in patterns), f"{path} is in no package-data"
    for p in patterns:
        assert any(fnmatch(path, p) for path in others), f"package-data {p} matches nothing"


@pytest.mark.quick
@for_each([p for p in FILES if module_of(p) != "pyggml"])
def test_imports_point_one_way(path):
    mine = room_of(module_of(path))
    for module in imported_modules(path):
        theirs = room_of(module)
        if theirs:
            assert LEVEL[theirs] <= LEVEL[mine], f"{mine} must not import {module}"


@for_each(FILES)
def test_few_files_talk_to_the_compiler(path):
    packages = {module.split(".")[0] for module, _ in imports(path)}
    assert "numba" not in packages or name_of(path) in USES_NUMBA
    assert "llvmlite" not in packages or name_of(path) in USES_LLVM


@for_each(FILES)
def test_the_gguf_package_is_imported_for_its_grids_and_names_alone(path):
    packages = {module.split(".")[0] for module, _ in imports(path)}
    users = (
        "pyggml/quants/packers/grid_points.py",
        "lora/peft/twins.py",
    )
    assert ("gguf" in packages) == (name_of(path) in users)


@pytest.mark.quick
def test_no_module_imports_itself_through_others():
    """Among the files of one room, too, imports make no ring, nor do those inside functions. The
    package's own `__init__`, which loads its names when they are asked for, is left out."""
    done, open_ = set(), []

    def visit(module):
        if module in done:
            return
        assert module not in open_, " -> ".join([*open_[open_.index(module) :], module])
        open_.append(module)
        for other in imported_modules(MODULES[module], types=False):
            if other not in ("pyggml", module):
                visit(other)
        open_.pop()
        done.add(module)

    for module in MODULES.keys() - {"pyggml"}:
        visit(module)


@for_each(FILES + OTHERS)
def test_private_names_stay_home(path):
    aliases = {}
    for module, name in imports(path):
        if f"{module}.{name}" in MODULES:
            aliases[name] = f"{module}.{name}"
        elif module.split(".")[0] == "pyggml" and name is not None:
            assert not is_private(name), f"{name} belongs to {module}"
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            stranger = node.value.id in aliases and is_private(node.attr)
            assert not stranger, f"line {node.lineno}: {node.value.id}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


# -- habits -------------------------------------------------------------------------------------


@for_each([p for p in FILES if not name_of(p).startswith("cli/")])
def test_only_the_command_line_prints(path):
    packages = {module.split(".")[0] for module, _ in imports(path)}
    assert not packages & {"rich", "click", "logging"}
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "input", "breakpoint"), f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            stream = node.value.id == "sys" and node.attr in ("stdout", "stderr", "stdin", "exit")
            assert not stream, f"line {node.lineno}: sys.{node.attr}"


# What else has an attribute `data`: NumPy's arrays, open files, packed weights and parameters.
NO_TENSORS = {"array", "ctypes", "e", "file", "job", "p", "parameters", "self", "view", "w"}


# examples/mini.py has tensors of its own.
@for_each([
    p for p in FILES + OTHERS
    if "backends" not in p.parts
    and name_of(p) not in ("pyggml/graph/tensor.py", "pyggml/graph/arrays.py", "examples/mini.py")
])  # fmt: skip
def test_only_backends_touch_the_memory_of_tensors(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr == "data":
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            assert name in NO_TENSORS, f"line {node.lineno}: {name}.data, wanted read or write"


@for_each(FILES + OTHERS)
def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@for_each(FILES + OTHERS)
def test_functions_stay_short(path):
    compiled = compiled_in(path)
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef):
            inside = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
            most = MOST_KERNEL_LINES if inside & compiled else MOST_FUNCTION_LINES
            length = node.end_lineno - node.lineno + 1
            assert length <= most, f"{node.name} has {length} lines, at most {most} are allowed"


@for_each(FILES + OTHERS)
def test_every_file_says_what_it_is(path):
    said = ast.get_docstring(tree_of(path))
    assert said
    assert not said.lower().startswith("this module")


# -- the kernel cache ---------------------------------------------------------------------------


@cache
def compiled_in(path):
    """Names of the functions that become machine code: `@kernel` or `X = task_code(function)`."""
    found = set()
    for node in nodes_of(path) if COMPILED & {name for _, name in imports(path)} else ():
        if isinstance(node, ast.FunctionDef):
            found |= {node.name for d in node.decorator_list if names_read(d) & COMPILED}
        elif isinstance(node, ast.Call) and names_read(node.func) & COMPILED:
            found |= names_read(node)
    return found


def names_read(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def defined_in(path):
    """Top-level name -> what defines it: a function, class or assignment."""
    found = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found |= {n.id: node.value for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


def kernel_sources(path):
    """(name, module) of everything a file's kernels take from other files of this project: what a
    kernel reads, and what the constants and helpers that it reads are made of."""
    defined = defined_in(path)
    came_from = {name: module for module, name in imports(path) if module in MODULES}
    compiled, classes = compiled_in(path), [n for n in defined.values() if type(n) is ast.ClassDef]
    ready = [defined[name] for name in compiled & defined.keys()]
    ready += [n for c in classes for n in c.body if getattr(n, "name", None) in compiled]
    seen = set()
    while ready:
        for name in names_read(without_signature(ready.pop())) - seen:
            seen.add(name)
            if name in came_from:
                yield name, came_from[name]
            elif name in defined:
                ready.append(defined[name])


def without_signature(node):
    """Decorators and annotations do not end up in machine code."""
    return ast.Module(node.body, []) if isinstance(node, ast.FunctionDef) else node


# The card's kernels are not kept from run to run.
@pytest.mark.quick
@for_each([p for p in FILES if name_of(p) not in JIT_FILES and "cuda" not in p.parts])
def test_kernels_take_nothing_that_the_cache_does_not_watch(path):
    """Numba looks at the kernel's own file; the cache folder is named after those in SHARED."""
    for name, module in kernel_sources(path):
        source = MODULES[module].relative_to(ROOT / "pyggml").as_posix()
        assert source in SHARED, (
            f"{name} comes from {source}, which is not in SHARED of pyggml/jit/cache.py"
        )


@pytest.mark.quick
def test_the_watched_files_exist():
    for name in SHARED:
        assert (ROOT / "pyggml" / name).is_file()


@pytest.mark.quick
def test_the_check_sees_kernels_and_what_they_are_made_of():
    """That the tests above look at something: a product's kernels depend on the CPU's widths."""
    found = dict(kernel_sources(ROOT / "pyggml/kernels/gemm/product.py"))
    assert found["FLOAT_TILE"] == "pyggml.kernels.gemm.tile"
    assert found["round_two"] == "pyggml.kernels.gemm.panels"
    assert found["columns_from"] == "pyggml.kernels.gemm.frames", "read by tasks"
    assert dict(kernel_sources(ROOT / "pyggml/ops/loss/soft.py"))["exp32"] == "pyggml.jit.simd"


# -- words --------------------------------------------------------------------------------------

# Names that say nothing of what they hold; nouns stand in their place.
BARE = {"made", "found", "known", "some", "others", "wanted"}
# Tuples of three arguments or more that only one call splats: the call hides what it is given.
MOST_SPLATTED = 9


@pytest.mark.quick
def test_a_class_name_serves_once():
    places = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name_of(path)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_variable_is_a_bare_participle():
    bare = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BARE)
        or (isinstance(node, ast.arg) and node.arg in BARE)
    ]
    assert not bare


def test_no_more_tuples_hide_the_arguments_of_a_call():
    functions = (n for p in FILES for n in nodes_of(p) if isinstance(n, ast.FunctionDef))
    hidden = [call for function in functions for call in splatted_once(function)]
    assert len(hidden) <= MOST_SPLATTED, "\n".join(hidden)


def splatted_once(function):
    """The calls in a function of a tuple that is written there and read by this call alone."""
    inside = [*ast.walk(function)]
    pairs = [pair for n in inside if isinstance(n, ast.Assign) for pair in assigned(n)]
    tuples = {t.id: v for t, v in pairs if isinstance(t, ast.Name) and isinstance(v, ast.Tuple)}
    read = [n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    for call in (n for n in inside if isinstance(n, ast.Call)):
        for value in (a.value for a in call.args if isinstance(a, ast.Starred)):
            name = getattr(value, "id", "")
            if name in tuples and len(tuples[name].elts) > 2 and read.count(name) == 1:
                yield f"{function.name}: {ast.unparse(call.func)}(*{name})"


def assigned(node):
    """(target, value) of an assignment, `a, b = 1, 2` as two."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        yield target, node.value
