"""What an ARM processor multiplies, asked of LLVM.

LLVM lists few features of these processors, and none on macOS. But it knows by the processor's name
what it may compile for it. So short functions are compiled that have such an instruction, or
several others where it is missing.
"""

import llvmlite.binding as llvm
from numba.core import config

_DOT = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @f(<16 x i8> %a, <16 x i8> %b) {
  %x = {EXTEND} <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
"""
_ROUND = """
define <4 x bfloat> @f(<4 x float> %a) {
  %rounded = fptrunc <4 x float> %a to <4 x bfloat>
  ret <4 x bfloat> %rounded
}
"""
# Feature -> (an instruction that needs it, a function whose code has it).
_PROBES = {
    "dotprod": ("sdot", _DOT.replace("{EXTEND}", "sext")),
    "i8mm": ("usdot", _DOT.replace("{EXTEND}", "zext")),
    "bf16": ("bfcvtn", _ROUND),
}


def compiled_for() -> frozenset[str]:
    """The features of _PROBES that Numba's code may have here: those of the processor that LLVM
    takes this one for, or of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = config.CPU_NAME, config.CPU_FEATURES
    machine = llvm.Target.from_triple(llvm.get_default_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name() if name is None else name,
        features=llvm.get_host_cpu_features().flatten() if features is None else features,
    )
    return frozenset(
        feature
        for feature, (instruction, text) in _PROBES.items()
        if instruction in machine.emit_assembly(llvm.parse_assembly(text))
    )
