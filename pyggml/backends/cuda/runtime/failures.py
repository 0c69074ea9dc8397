"""What a card's driver refuses, in words, and whether the card is lost.

Errors are those of CUDA's driver API, as its documentation explains them (`CUresult`). After one of
`_FATAL` each later call of the process fails. After any other the card goes on, unless it refuses
to wait for its work, too.
"""

import re

from pyggml.backends.cuda.runtime.driver import CudaAPIError, driver

_FATAL = {
    "DEINITIALIZED": "the driver is shutting down",
    "ECC_UNCORRECTABLE": "its memory has an error that cannot be corrected, wanted its reset: "
    "nvidia-smi -q -d ECC says more",
    "NVLINK_UNCORRECTABLE": "its link to other cards has an error that cannot be corrected",
    "CONTAINED": "its hardware or another card's has an error, which was contained",
    "ILLEGAL_ADDRESS": "a kernel read or wrote memory that it does not have",
    "LAUNCH_TIMEOUT": "a kernel took longer than the system allows where a card drives a display",
    "CONTEXT_IS_DESTROYED": "something else has destroyed its context",
    "ASSERT": "a kernel found that something it takes for granted does not hold",
    "HARDWARE_STACK_ERROR": "a kernel's stack grew too large, or was overwritten",
    "ILLEGAL_INSTRUCTION": "a kernel has an instruction that the card does not know",
    "MISALIGNED_ADDRESS": "a kernel read or wrote at an address that is not aligned",
    "INVALID_ADDRESS_SPACE": "a kernel read or wrote memory of the wrong kind",
    "INVALID_PC": "a kernel ran on behind its last instruction",
    "LAUNCH_FAILED": "a kernel ended with a fault",
    "TENSOR_MEMORY_LEAK": "a kernel ended without giving its tensor memory back",
    "MPS_CLIENT_TERMINATED": "the MPS server has ended this process's work",
    "EXTERNAL_DEVICE": "a device that it waits for has failed",
}

_OURS = "which is a fault of pyggml; --device cpu does without a card"
_OLD = "the driver cannot load what the compiler made, wanted a newer driver"
_BUSY_MPS = "the MPS server takes no more work, wanted fewer processes or a new start of it"
_REFUSED = {
    "INVALID_VALUE": f"a call's value is out of range, {_OURS}",
    "INVALID_HANDLE": f"a call is about what is not there any more, {_OURS}",
    "INVALID_CONTEXT": f"a call is made for no card, {_OURS}",
    "NOT_FOUND": f"a kernel is not where it was compiled to, {_OURS}",
    "LAUNCH_OUT_OF_RESOURCES": "a launch has more threads, registers or arguments than the card "
    f"takes, {_OURS}",
    "NOT_SUPPORTED": "this card or its driver does not do that, wanted a newer driver",
    "NOT_PERMITTED": "the system does not permit that to this user",
    "STUB_LIBRARY": "libcuda is a stub to compile with, wanted the driver's own",
    "NO_DEVICE": "the driver finds no card, wanted one that CUDA_VISIBLE_DEVICES does not hide",
    "DEVICE_UNAVAILABLE": "the card is for another process alone, or for none, wanted the "
    "compute mode of nvidia-smi -c DEFAULT",
    "DEVICE_NOT_LICENSED": "the virtual card has no licence",
    "INVALID_IMAGE": _OLD,
    "NO_BINARY_FOR_GPU": _OLD,
    "INVALID_PTX": _OLD,
    "JIT_COMPILER_NOT_FOUND": _OLD,
    "UNSUPPORTED_PTX_VERSION": _OLD,
    "JIT_COMPILATION_DISABLED": _OLD,
    "INVALID_SOURCE": _OLD,
    "OPERATING_SYSTEM": "a call of the operating system has failed",
    "SYSTEM_NOT_READY": "a daemon of the driver does not run, wanted NVIDIA's fabric manager on "
    "machines with NVSwitch",
    "SYSTEM_DRIVER_MISMATCH": "the driver in the kernel and libcuda are of different versions, "
    "wanted a restart of the machine",
    "COMPAT_NOT_SUPPORTED_ON_DEVICE": "this card takes no libcuda that is newer than its driver, "
    "wanted a newer driver",
    "MPS_CONNECTION_FAILED": _BUSY_MPS,
    "MPS_RPC_FAILURE": _BUSY_MPS,
    "MPS_SERVER_NOT_READY": _BUSY_MPS,
    "MPS_MAX_CLIENTS_REACHED": _BUSY_MPS,
    "MPS_MAX_CONNECTIONS_REACHED": _BUSY_MPS,
}


OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def is_failure(error: BaseException) -> bool:
    """Whether the card, its driver or a library of NVIDIA's refused something.

    Launches raise CUDAError of cuda.core, products an error of nvmath's own.
    """
    return isinstance(error, CudaAPIError) or _package(error) in ("cuda", "nvmath")


def ran_out(error: BaseException) -> bool:
    """Whether there was not enough memory on the card.

    cuBLAS calls itself not initialised where it finds no memory for a handle.
    """
    if isinstance(error, CudaAPIError):
        return int(error.code or 0) == OUT_OF_MEMORY
    of_library = ("ALLOC_FAILED", "NOT_INITIALIZED") if _package(error) == "nvmath" else ()
    return any(word in str(error) for word in ("OUT_OF_MEMORY", *of_library))


def _package(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def lost_by(failure: Exception, is_current: bool = True) -> Exception | None:
    """The failure by which a card is lost: this one, or one that a current card reports when it is
    asked to wait for its work. None if the card goes on."""
    if _code(failure) in _FATAL:
        return failure
    if not is_current:
        return None
    try:
        driver.cuCtxSynchronize()
    except Exception as other:
        if not is_failure(other):
            raise
        # There is no context yet; or a graph is being captured, which must not be waited for.
        goes_on = _code(other) == "INVALID_CONTEXT" or _code(other).startswith("STREAM_CAPTURE")
        return None if goes_on else other
    return None


def reason_of(failure: BaseException) -> str:
    """What has happened, what is wanted where something helps, and the driver's word for it."""
    code = _code(failure)
    said = _FATAL.get(code) or _REFUSED.get(code)
    if said is None:
        text = " ".join(str(getattr(failure, "msg", failure)).split())
        is_absent = re.search(r"function cu\w+ is not found", text)
        return f"{text} in the driver, wanted a newer one" if is_absent else text
    call = re.search(r"\bcu[A-Z]\w+", str(failure)) if code in _REFUSED else None
    return f"{said} (CUDA_ERROR_{code}{f' of {call[0]}' if call else ''})"


def _code(failure: BaseException) -> str:
    """The error's name, such as INVALID_VALUE; "" for one of a library."""
    if isinstance(failure, CudaAPIError):
        from cuda.bindings.driver import CUresult

        number = int(failure.code or 0)
        names = [result.name for result in CUresult if result.value == number]
        return names[0].removeprefix("CUDA_ERROR_") if names else ""
    match = re.search(r"\bCUDA_ERROR_(\w+)", str(failure))
    return match[1] if match else ""
