"""The instruction set of this process, chosen once: which vectors the CPU has.

lanes       float32 numbers in one vector register
registers   of them
bf16        the CPU multiplies bf16 pairs, at twice the rate of float32
vnni        it multiplies bytes, four to a 32-bit lane, at four times the rate of float32
byte_pairs  instead it multiplies unsigned and signed bytes to sums of two, of 16 bits
neon        it is an ARM: signed bytes are multiplied by signed ones
sdot        it does that four to a 32-bit lane, at four times the rate of float32
i8mm        it also multiplies unsigned bytes by signed ones so, and matrices of 2 × 8 bytes at
            twice that rate; with bf16 such of 2 × 4 bfloat16
tiles       it multiplies bfloat16 tiles (AMX), at up to 16 times the rate of float32; then bf16 is
            not set, as such CPUs multiply bf16 pairs at half the rate of float32
f16         it converts float16 in one instruction
compiled    products and attention are compiled; without, NumPy computes them

PYGGML_ISA forces one: amx, avx512bf16, avx512vnni, avxvnni, avx512, avx2, neonbf16, neoni8mm,
neondot, neon, generic or numpy; it is refused if the machine lacks it. `generic` runs on any CPU.
`numpy` unpacks whole matrices and multiplies with NumPy: slow, and the only one without Numba's
JIT.
"""

import os
import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
from numba.core import config

from pyggml.errors import ConfigError
from pyggml.jit.arm import compiled_for
from pyggml.jit.permission import tiles_granted

JIT: bool = not config.DISABLE_JIT
ENVIRONMENT = "PYGGML_ISA"


@dataclass(frozen=True, slots=True)
class ISA:
    """One instruction set; the module's docstring explains the fields."""

    name: str
    needs: frozenset[str]  # CPU features, by LLVM's names
    lanes: int
    registers: int
    bf16: bool = False
    vnni: bool = False
    byte_pairs: bool = False
    neon: bool = False
    sdot: bool = False
    i8mm: bool = False
    tiles: bool = False
    f16: bool = True
    compiled: bool = True


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})
_VNNI = _AVX512 | {"avx512vnni"}
_AMX = frozenset({"amx-tile", "amx-bf16"})
_DOT = frozenset({"neon", "dotprod"})
_I8MM = _DOT | {"i8mm"}

ISAS: dict[str, ISA] = {
    isa.name: isa
    for isa in (
        ISA("amx", _VNNI | {"avx512bf16"} | _AMX, lanes=16, registers=32, vnni=True, tiles=True),
        ISA("avx512bf16", _VNNI | {"avx512bf16"}, lanes=16, registers=32, bf16=True, vnni=True),
        ISA("avx512vnni", _VNNI, lanes=16, registers=32, vnni=True),
        ISA("avxvnni", _AVX2 | {"avxvnni"}, lanes=8, registers=16, vnni=True),
        ISA("avx512", _AVX512, lanes=16, registers=32, byte_pairs=True),
        ISA("avx2", _AVX2, lanes=8, registers=16, byte_pairs=True),
        ISA("neonbf16", _I8MM | {"bf16"}, 4, 32, neon=True, sdot=True, i8mm=True, bf16=True),
        ISA("neoni8mm", _I8MM, lanes=4, registers=32, neon=True, sdot=True, i8mm=True),
        ISA("neondot", _DOT, lanes=4, registers=32, neon=True, sdot=True),
        ISA("neon", frozenset({"neon"}), lanes=4, registers=32, neon=True),
        ISA("generic", frozenset(), lanes=4, registers=16, f16=False),
        ISA("numpy", frozenset(), lanes=4, registers=16, f16=False, compiled=False),
    )
}


# CPUs, by LLVM's name, on which VDPBF16PS does twice the work of FMA. On Intel's Sapphire Rapids it
# does half of it (measured: 65 to 70 against 131 to 157 GFLOP/s a core); others are not measured,
# nor are ARM's BFDOT and BFMMLA.
# A table, and not a rate measured at first use: results then depend on the CPU alone, never on how
# busy it was, and a run that is resumed on another CPU of the same kind gives the same bits.
_FAST_BF16 = ("znver",)


def cpu_name() -> str:
    """The CPU's family, as LLVM calls it: "znver4"."""
    return str(llvm.get_host_cpu_name())


def _is_worth_it(isa: ISA) -> bool:
    """Whether what this CPU has of an ISA is also faster than doing without."""
    return not isa.bf16 or cpu_name().startswith(_FAST_BF16)


def why_not(isa: ISA) -> str:
    """What keeps this process from an instruction set, "" if nothing does."""
    missing = sorted(isa.needs - _features())
    if missing:
        return f"lacks {', '.join(missing)}"
    return (
        ""
        if _is_worth_it(isa)
        else "pairs of bfloat16 are not known to be faster than float32 on this CPU"
    )


@cache
def _features() -> frozenset[str]:
    """The CPU's features, as LLVM lists them, without those this process may not use. Every 64-bit
    ARM has NEON, even if LLVM does not list it; what else, `compiled_for` says."""
    features = {name for name, has in llvm.get_host_cpu_features().items() if has}
    if platform.machine().lower() in ("arm64", "aarch64"):
        features |= {"neon"} | compiled_for()
    if features >= _AMX and not (_compiles(_AMX) and tiles_granted()):
        features -= _AMX
    return frozenset(features)


def _compiles(features: frozenset[str]) -> bool:
    """Whether Numba compiles for these features: LLVM aborts the process at an instruction of
    other features."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is None:
        return os.environ.get("NUMBA_CPU_NAME", "").lower() != "generic"
    return features <= {name.removeprefix("+") for name in given.split(",")}


def choose() -> ISA:
    """The best instruction set of this machine, or the one named by PYGGML_ISA.

    Raises ConfigError for an unknown name, or one that the machine lacks or that needs the JIT
    when it is off.
    """
    name = os.environ.get(ENVIRONMENT)
    if not JIT:
        name = name or "numpy"
    if name is None:
        return next(isa for isa in ISAS.values() if not why_not(isa))
    if name not in ISAS:
        raise ConfigError(f"{ENVIRONMENT}={name}: known are {', '.join(ISAS)}")
    isa = ISAS[name]
    missing = sorted(isa.needs - _features())
    if missing:
        raise ConfigError(f"{ENVIRONMENT}={name}: this machine lacks {', '.join(missing)}")
    if not JIT and name != "numpy":
        raise ConfigError(f"{ENVIRONMENT}={name} needs Numba's JIT, which is switched off")
    return isa


CHOSEN: ISA = choose()
