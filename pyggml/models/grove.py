"""GroveMoE's experts (arXiv:2508.07785): what they give goes through smaller ones, each of a group
of them: chosen by the same router, but weighed by the experts of the groups' numbers, as in
llama.cpp."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.basics import Basics
from pyggml.models.config import Reader
from pyggml.models.experts import MOST_EXPERTS, Experts, read_experts
from pyggml.models.feed_forward import Unit
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import add, get_rows, reshape, scale, top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsOfGroups(Experts):
    """Experts of groups of `each` of the router's: its expert e is of group floor(e / each)."""

    each: int

    def tensors(self, at: str) -> Tensors:
        own = Experts.tensors(self, at)
        router = matrix(f"{at}ffn_gate_inp", self.n_expert * self.each, self.n_embd, usual=False)
        return merge_tensors([own, {k: v for k, v in router.items() if k in own}])

    def _choose(self, net: Net, scores: Tensor) -> Tensor:
        best = top_k(scores, self.n_used)
        key = ("groups of experts", self.n_expert, self.each)
        return reshape(get_rows(net.once(key, self._groups), best), best.shape)

    def _groups(self) -> Tensor:
        """The group of each of the router's experts, I32 (n, 1), rounded as llama.cpp does."""
        ids = np.arange(self.n_expert * self.each, dtype=np.float32)
        groups = (ids * np.float32(1 / self.each)).astype(np.int32)
        return leaf(groups.reshape(-1, 1), "groups of experts")


@dataclass(frozen=True, slots=True)
class Grove(Part):
    """y + factor · of_groups(y), y = experts(x)."""

    experts: Experts
    of_groups: Experts
    factor: float

    @property
    def branch(self) -> str:
        return self.experts.branch

    def tensors(self, at: str) -> Tensors:
        return merge_tensors([self.of_groups.tensors(at), self.experts.tensors(at)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.experts(net, at, x)
        return add(y, scale(self.of_groups.mix(net, at, y, x), self.factor))


def read_groves(
    r: Reader, b: Basics, unit: Unit, chosen_by: Callable[[Tensor], Tensor]
) -> tuple[Grove, ...]:
    """The feed-forward part of every layer; chosen_by: of both kinds of experts."""
    experts = read_experts(r, b, unit, chosen_by=chosen_by)
    n, each = experts[0].n_expert, r.count("experts_per_group", most=MOST_EXPERTS)
    if n % each or experts[0].n_used > n // each:
        r.faults.append(f"{n} experts, {each} of a group: wanted as many groups as are used")
        each = 1
    small = r.count("expert_chunk_feed_forward_length", 0, least=0, most=1 << 20)
    factor = r.number("expert_group_scale", None, -1e6, 1e6)

    def grove(i: int) -> Grove:
        of_groups = ExpertsOfGroups(
            n_embd=b.config.n_embd,
            n_ff=small or b.heads[i].size,
            n_expert=n // each,
            n_used=min(experts[i].n_used, n // each),
            unit=unit,
            chosen_by=chosen_by,
            suffix="_chexps",
            each=each,
        )
        return Grove(experts[i], of_groups, factor)

    return tuple(grove(i) for i in range(b.config.n_layer))
