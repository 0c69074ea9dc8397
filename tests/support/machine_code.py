"""Prints, as JSON, what LLVM makes of kernels for another processor: needs no such machine.

usage: python machine_code.py CPU ISA KERNELS TYPES

CPU is LLVM's name of a processor, of ARM or one of X86, ISA one of pyggml.jit.isa or "auto".
KERNELS are names of `_kernels`, TYPES weight types, both with commas between them, or "all", or
"none". The result is
{"isa": the one chosen, "auto": the compute type, kernel: {weight type: instructions of its longest
innermost loop, or all if it has none}}.

The instruction set is chosen at import, so this is a process of its own: the host is taken for a
machine with that processor. Code goes through the passes, and is made for the code model, that
Numba takes.
"""

import json
import os
import platform
import re
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.llvm_bindings import create_pass_builder
from numba.core.registry import cpu_target

# x86 processors, with the features among those of pyggml.jit.isa.
X86 = {"haswell": ("avx2", "fma"), "alderlake": ("avx2", "fma", "avxvnni")}
WORD = ir.IntType(64)
DEPTH = (
    1 << 16
)  # of a row, for kernels in which it is to be known: then only whole units are computed


class _Context:
    def get_dummy_value(self):
        return None


def _triple(cpu):
    return ("x86_64" if cpu in X86 else "aarch64") + "-unknown-linux-gnu"


def _emitted(intrinsic, constants, addresses):
    """The module of a function that calls an intrinsic with constants, then addresses, of which
    some may be numbers."""
    kinds = [types.literal(n) for n in constants] + [types.intp] * len(addresses)
    signature, codegen = intrinsic._defn(None, *kinds)
    module = ir.Module("kernels")
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [WORD] * len(addresses)), "kernel"
    )
    builder = ir.IRBuilder(function.append_basic_block())
    values = [
        argument if known is None else WORD(known)
        for argument, known in zip(function.args, addresses, strict=True)
    ]
    codegen(_Context(), builder, signature, [None] * len(constants) + values)
    builder.ret_void()
    return str(module)


def _compiled(text, cpu):
    """(module after Numba's passes, target)."""
    target = llvm.Target.from_triple(_triple(cpu)).create_target_machine(
        cpu=cpu, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    passes = create_pass_builder(target, opt=3, loop_vectorize=True, slp_vectorize=False)
    passes.getModulePassManager().run(module, passes)
    return module, target


def _assembly(text, cpu):
    module, target = _compiled(text, cpu)
    return target.emit_assembly(module)


def object_code(what, name, cpu):
    """The object file of a function `name`, made of (intrinsic, constants, addresses)."""
    module, target = _compiled(_emitted(*what).replace('@"kernel"', f'@"{name}"'), cpu)
    return target.emit_object(module)


def _loop(assembly):
    """The instructions of the longest innermost loop."""
    labels, lines = {}, []
    for line in map(str.strip, assembly.split("\n")):
        label = re.match(r"([.\w$]+):", line)
        if label:
            labels[label[1]] = len(lines)
        elif line and line[0] not in "./#":
            lines.append(re.split(r"//|\t#", line)[0].strip())
    loops = []
    for i, line in enumerate(lines):
        jump = re.match(r"(?:b\.\w+|cbn?z|tbn?z|b|j[a-z]+)\s+(.*)$", line)
        start = jump and labels.get(jump[1].split(",")[-1].strip())
        if start is not None and start <= i:
            loops.append((start, i))
    inner = [a for a in loops if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, len(lines)))
    return lines[first : last + 1]


def _kernels():
    """Name -> {weight type: (intrinsic, constants, addresses)}; "" for kernels of no type."""
    from pyggml.graph.dtypes import dtype
    from pyggml.kernels.attention import flash_tile
    from pyggml.kernels.gemm import dots, few_bits_tile, int8_tile, int_dots, lane_dots, panels
    from pyggml.quants import unpack

    def each(names, intrinsic, n_addresses, *constants, depth=None):
        addresses = [None] * (n_addresses - 1) + [depth]
        return {name: (intrinsic, [i, *constants], addresses) for i, name in enumerate(names)}

    whole, dot = unpack.WHOLE_TYPES, int_dots.int_dots
    return {
        "unpack": {
            n: (unpack._unpack_blocks, [dtype(n).number], [None] * 3) for n in unpack.WHOLE_TYPES
        },
        "one row": each(whole, dot, 6, 1, depth=DEPTH),
        "four rows": each(whole, dot, 6, 4, depth=DEPTH),
        "one row in float32": each(unpack.DIRECT_TYPES, dots.row_dots, 7, depth=DEPTH),
        "several": each(lane_dots.KINDS, lane_dots.lane_dots, 5, 4),
        "bytes of a panel": each(int8_tile.KINDS, int8_tile.unpack_bytes, 3),
        "tile of bytes": {"": (int8_tile.byte_product, [], [None] * 9)},
        "tile of few bits": {"": (few_bits_tile.product_of_rows, [], [None] * 9)},
        "tile of few bits back": {"": (few_bits_tile.product_of_columns, [], [None] * 10)},
        "tile of pairs": {"": (panels.pair_product, [], [None] * 7)},
        "tile of attention": {"": (flash_tile.pair_product, [], [None] * 9)},
        "rounding": {"": (panels.round_row, [], [None] * 3)},
    }


def pretend(cpu, isa):
    """Have pyggml, which is not imported yet, take this machine for one with that processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    assert cpu_target.target_context  # Numba itself compiles for this machine
    platform.machine = lambda: _triple(cpu).split("-")[0]
    llvm.get_default_triple = lambda: _triple(cpu)
    llvm.get_host_cpu_name = lambda: cpu
    features = llvm.FeatureMap(dict.fromkeys(X86.get(cpu, ()), True))
    llvm.get_host_cpu_features = lambda: features
    os.environ.pop("PYGGML_ISA", None)
    if isa != "auto":
        os.environ["PYGGML_ISA"] = isa


def main(cpu, isa, kernels, weights):
    pretend(cpu, isa)
    from pyggml.graph.dtypes import dtype
    from pyggml.jit.isa import CHOSEN
    from pyggml.kernels.gemm import FASTEST

    result = {"isa": CHOSEN.name, "auto": FASTEST}
    blocks = {}
    for kernel, of in _kernels().items() if kernels != "none" else ():
        if kernels not in ("all", kernel) and kernel not in kernels.split(","):
            continue
        for name, what in of.items():
            if name and weights != "all" and name not in weights.split(","):
                continue
            result.setdefault(kernel, {})[name] = _loop(_assembly(_emitted(*what), cpu))
            blocks[name] = dtype(name).block if name else 0
    sys.stdout.write(json.dumps(result | {"blocks": blocks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
