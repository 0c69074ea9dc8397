"""How this process was started: alone, or as one of many, by their first or by mpiexec or srun."""

import os

from pyggml.errors import PyggmlError
from pyggml.extras import how_to_install
from pyggml.lora.ranks.alone import ALONE, Ranks
from pyggml.lora.ranks.local import group_of_process

# What a launcher puts into the environment: the number of processes. Slurm sets its own for every
# job; the second name tells that it also started this process for MPI. And the launcher's words.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", None, "mpiexec"),  # Open MPI
    ("PMI_SIZE", None, "mpiexec"),  # MPICH, Intel MPI
    ("MV2_COMM_WORLD_SIZE", None, "mpiexec"),  # MVAPICH
    ("SLURM_NTASKS", "PMIX_RANK", "srun --mpi=pmix"),
    ("SLURM_NTASKS", "PMI_RANK", "srun --mpi=pmi2"),
)


def ranks_of_process() -> Ranks:
    """The group that this process was started in; ALONE if there is no other process.

    Raises PyggmlError if there are others, and mpi4py is missing or belongs to another MPI.
    """
    if (local := group_of_process()) is not None:
        return local
    name, size, launcher = _size()
    if size <= 1:
        return ALONE
    about = f"this is one of {size} processes ({name})"
    try:
        from pyggml.lora.ranks.mpi import MpiRanks
    except ImportError as error:
        advice = how_to_install("mpi")
        raise PyggmlError(f"{about}, wanted mpi4py to join them ({error}): {advice}") from None
    ranks = MpiRanks(launcher.split())
    if ranks.size != size:
        raise PyggmlError(
            f"{about}, but mpi4py finds {ranks.size}: it was built for another MPI than that of "
            "the launcher"
        )
    return ranks


def n_processes() -> int:
    """How many processes a launcher has started beside each other, whatever they do."""
    return _size()[1]


def _size() -> tuple[str, int, str]:
    """The variable that says how many processes a launcher has started; how many; its words."""
    for name, beside, launcher in _SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal() and (beside is None or beside in os.environ):
            return name, int(value), launcher
    return "", 1, ""
