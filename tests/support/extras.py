"""Tests that want an extra of pyproject.toml are skipped by a reason that names it."""

import re
from collections import Counter
from importlib.util import find_spec

import pytest

EXTRAS = {
    "lm_eval": "harness",
    "optuna": "sweep",
    "igraph": "views",
    "llama_cpp": "interop",
    "transformers": "interop",
    "IPython": "docs",
    "datasets": "interop",
    "sae_lens": "interop",
    "sklearn": "interop",
    "torch": "interop",
    "mkdocs": "docs",
    "mkdocstrings_handlers": "docs",
    "mpi4py": "mpi",
    "nbclient": "docs",
    "nbformat": "docs",
    "ipykernel": "docs",
    "nccl": "cards",
    "numba_cuda": "cuda",
    "pyarrow": "parquet",
    "tensorboardX": "tensorboard",
    "alembic": "mlflow",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "huggingface_hub": "hub",
    "wgpu": "webgpu",
    "starlette": "serve",
    "wandb": "wandb",
}


def reason(module):
    extra = EXTRAS[module.partition(".")[0]]
    return f"{module} is not installed: pip install '.[{extra}]'"


def need(module):
    """The module of an extra; without it, what needs it is skipped: a test, or its whole file."""
    return pytest.importorskip(module, reason=reason(module))


def needs(module):
    """A mark of tests that want this module in processes of their own."""
    return pytest.mark.skipif(find_spec(module) is None, reason=reason(module))


_WANTED = re.compile(r"pip install '(?:\.|pyggml)\[(\w+)\]'")


def wants_extra(reason):
    """Whether something was skipped for want of an extra."""
    return bool(_WANTED.search(reason))


def summary(reasons):
    """A line for each extra that skipped tests and files want, for the end of a run."""
    extras = _WANTED.findall("\n".join(reasons))
    for extra, n in sorted(Counter(extras).items()):
        yield f"skipped without the extra {extra}: {n} (pip install '.[{extra}]')"


def needs_compiler():
    """Skip unless NVIDIA's compilers are there, which come with pyggml[cuda]."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc"), load_nvidia_dynamic_lib("nvvm")
    except DynamicLibNotFoundError:
        pytest.skip("NVIDIA's compilers are not found")
