"""The processes that make a run together, one beside the other or on many machines.

    pyggml-finetune --device cuda:all ...
    mpiexec -n 4 pyggml-finetune ...

Every rank has the whole model and all parameters, and computes some batches of each step. The
gradients of batches are added in the order of the batches, whoever computed them, and all ranks
take the same optimiser's step. So the parameters are the same on all ranks, bit for bit, and those
of one process that computes all batches.

alone       one process: what a group of ranks can do, and how it is done without others
exchanging  many: what they agree on, whatever carries their arrays
local       of one machine, over sockets, started by the first
mpi         over MPI, started by a launcher
roll        which of those wait, where one keeps the others waiting
started     which of these this process was started as
device      which device each takes
linked      ways from card to card, for gradients
"""

from pyggml.lora.ranks.alone import ALONE, RankLostError, Ranks, share
from pyggml.lora.ranks.started import ranks_of_process

__all__ = ["ALONE", "RankLostError", "Ranks", "ranks_of_process", "share"]
