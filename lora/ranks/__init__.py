"""The processes that make a run together, one beside the other or on many machines.

    mpiexec -n 4 pyggml-finetune ...

Every rank has the whole model and all parameters, and computes some batches of each step. The
gradients of batches are added in the order of the batches, whoever computed them, and all ranks
take the same optimiser's step. So the parameters are the same on all ranks, bit for bit, and those
of one process that computes all batches.

alone      one process: what a group of ranks can do, and how it is done without others
mpi        many, over MPI
roll       which of them wait, where one keeps the others waiting
started    which of both this process was started as
"""

from pyggml.lora.ranks.alone import ALONE, RankLostError, Ranks
from pyggml.lora.ranks.started import ranks_of_process

__all__ = ["ALONE", "RankLostError", "Ranks", "ranks_of_process"]
