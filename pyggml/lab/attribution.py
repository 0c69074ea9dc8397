"""Direct logit attribution: what each head and each neuron adds to a logit by itself (Elhage et al.
2021), the last norm's scale counted as fixed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from pyggml.lab.linear import (
    Branch,
    back_through,
    branches,
    exact,
    head_counts,
    norm_weight,
    refusal,
    refuse_between,
    refuse_turns,
)
from pyggml.look.draw.grid import signed_map
from pyggml.look.lens import (
    later_factors,
    logit_attribution,
    logit_direction,
    numbers_by_text,
    of_texts,
)
from pyggml.model import Model
from pyggml.models.norm import Norm, RmsNorm
from pyggml.models.texts import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """What parts of a model add to a logit, or to the difference of two, at one position.

    heads     (n_layer, n_head) float64; NaN where a block has fewer heads or none
    neurons   block → (n_ff,) float64, where the feed-forward part is one of neurons
    rest      name → number: the embedding, branches of other kinds, what the heads' and the
              neurons' last matrices add themselves (their biases), and "bias", the last norm's and
              the output matrix' own

    All of them sum to `logit`, before a soft cap.
    """

    heads: np.ndarray
    neurons: Mapping[int, np.ndarray]
    rest: Mapping[str, float]
    logit: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        of_neurons = sum(float(n.sum()) for n in self.neurons.values())
        return float(np.nansum(self.heads)) + of_neurons + sum(self.rest.values())

    @property
    def branches(self) -> np.ndarray:
        """(n_layer, 2): the sums over a block's heads and over its neurons; NaN for none."""
        heads = np.where(np.isnan(self.heads).all(axis=1), np.nan, np.nansum(self.heads, axis=1))
        neurons = [
            float(self.neurons[i].sum()) if i in self.neurons else np.nan for i in range(len(heads))
        ]
        return np.stack([heads, neurons], axis=1)

    def top(self, n: int = 10) -> list[tuple[str, float]]:
        """The n largest parts by size, by name: "blk.3.attn_head.1", "blk.3.ffn_neurons[117]"."""
        return sorted(self._parts(), key=lambda part: -abs(part[1]))[:n]

    def _parts(self) -> Iterator[tuple[str, float]]:
        yield from self.rest.items()
        for (i, h), x in np.ndenumerate(self.heads):
            if not isnan(x):
                yield f"blk.{i}.attn_head.{h}", float(x)
        for i, values in self.neurons.items():
            yield from ((f"blk.{i}.ffn_neurons[{j}]", float(x)) for j, x in enumerate(values))

    def __str__(self) -> str:
        lines = [f"{x:+9.4f}  {name}" for name, x in self.top()]
        rest = self.total - sum(x for _, x in self.top())
        return "\n".join([*lines, f"{rest:+9.4f}  all others", f"{self.logit:+9.4f}  logit"])

    def draw(self) -> str:
        """An SVG picture: a row for each block, a column for each head, the neurons in the last."""
        columns = [f"head {h}" for h in range(self.heads.shape[1])] + ["neurons"]
        rows = [f"block {i}" for i in range(len(self.heads))]
        values = np.concatenate([self.heads, self.branches[:, 1:]], axis=1)
        return signed_map(values, rows, columns, "direct logit attribution")

    def _repr_html_(self) -> str:
        return self.draw()


@of_texts
def direct_attribution(
    model: Model,
    texts: Sequence[Ids],
    token: int | Sequence[int],
    other: int | Sequence[int] | None = None,
    at: int | Sequence[int] = -1,
) -> list[Attribution]:
    """What each head and neuron adds to the logit of `token`, less that of `other` if there is one,
    at position `at` of the text ids (T,).

    A list of texts, of any lengths, shares passes and gives a list; token, other and at are then
    one for all, or a list. The scale of the last norm is that of the whole stream, and so is that
    of a norm behind a branch (gemma2). Products are exact. Raises DataError for tokens and
    positions that there are not, ConfigError for models without heads or whose residual stream is
    several vectors, and for heads that something stands behind: a gate or a norm before their
    output matrix.
    """
    n, given = len(texts), {"token": token} | ({} if other is None else {"other": other})
    tokens = [numbers_by_text(name, numbers, n) for name, numbers in given.items()]
    counts = head_counts(model)
    refuse_turns(model)
    model = exact(model)
    for i in filter(counts.__getitem__, range(len(counts))):
        refuse_between(model, i)
    shares = [logit_attribution(model, texts, ids, at) for ids in tokens]
    splits = _read_splits(model, texts, [*zip(*tokens, strict=True)], at)
    return [
        _attribution(model, counts, own, parts)
        for own, parts in zip(zip(*shares, strict=True), splits, strict=True)
    ]


_Splits = dict[tuple[int, str], np.ndarray]


def _attribution(
    model: Model, counts: list[int], shares: Sequence[Mapping[str, float]], splits: _Splits
) -> Attribution:
    """Of one text: shares of one token or two by branch, and what of these is split."""
    whole_branches = {n: x - sum(s[n] for s in shares[1:]) for n, x in shares[0].items()}
    logit = sum(whole_branches.values())
    heads = np.full((len(counts), max(counts)), np.nan)
    neurons = {}
    for (i, kind), parts in splits.items():
        if kind == "attention":
            heads[i, : counts[i]] = parts.reshape(counts[i], -1).sum(axis=1)
        else:
            neurons[i] = parts
        ending, module = _SPLITS[kind]
        whole = whole_branches.pop(f"blk.{i}.{ending}")
        is_alone = len(_parts_of(model, i, ending)) == 1
        rest = f"{module}.bias" if is_alone else ending
        whole_branches[f"blk.{i}.{rest}"] = whole - float(parts.sum())
    return Attribution(heads, neurons, whole_branches, logit)


# What is split: its activation → the branch, and the matrix that makes the branch of it.
_SPLITS = {"attention": ("attn_out", "attn_output"), "ffn_neurons": ("ffn_out", "ffn_down")}


def _read_splits(
    model: Model, texts: Sequence[Ids], tokens: Sequence[Sequence[int]], at: int | Sequence[int]
) -> list[_Splits]:
    """Of each text, block and kind → what each number of that activation adds (n,) float64.

    tokens: of each text one, or two of which the second counts less.
    """
    activations = {*model.activations}
    kinds = [
        (i, kind)
        for i in range(model.config.n_layer)
        for kind, (branch, _) in _SPLITS.items()
        if {f"blk.{i}.{kind}", f"blk.{i}.{branch}"} <= activations
    ]
    last = f"blk.{model.config.n_layer - 1}.out"
    names = [f"blk.{i}.{n}" for i, kind in kinds for n in (kind, _SPLITS[kind][1])]
    with model.trace(*names, last) as t:
        model.logits(texts)
    rows = [*enumerate(numbers_by_text("at", at, len(texts)))]
    directions = []
    for of_text, (n, row) in zip(tokens, rows, strict=True):
        plus, *minus = (logit_direction(model, t[last][n][row], int(i)) for i in of_text)
        directions.append(plus - sum(minus))
    later = later_factors(model)
    splits: list[_Splits] = [{} for _ in texts]
    for i, kind in kinds:
        module = f"blk.{i}.{_SPLITS[kind][1]}"
        scales = [_scale_behind(model, i, kind, t[module][n][row]) for n, row in rows]
        g = np.stack([later[i] * d * scale for d, scale in zip(directions, scales, strict=True)])
        g = back_through(model, module, g).astype(np.float64)
        for n, row in rows:
            splits[n][i, kind] = g[n] * t[f"blk.{i}.{kind}"][n][row]
    return splits


def _scale_behind(model: Model, layer: int, kind: str, y: np.ndarray) -> np.ndarray | float:
    """What multiplies a matrix' output y (n_embd,) before it is added: a factor, and the scale and
    weight of a norm. ConfigError for another part."""
    scale: np.ndarray | float = 1.0
    branch = _branch_of(model, layer, kind)
    for norm in branch.after:
        if not isinstance(norm, RmsNorm):
            name = norm.name if isinstance(norm, Norm) else type(norm).__name__
            why = "so that the branch is no sum over heads or neurons"
            raise refusal(model, layer, f"has {name} behind its branch, {why}")
        x = y.astype(np.float64) * scale
        w = norm_weight(model, norm, f"blk.{layer}.")
        scale = scale * w / np.sqrt(np.mean(x * x) + norm.eps)
    return branch.factor * scale


def _parts_of(model: Model, layer: int, ending: str) -> list[Branch]:
    """The parts of a block whose sum a branch is: of hybrids, attention and a recurrence."""
    block = model.parts.decoder.blocks[layer]
    return [b for b in branches(block) if b.part.branch == ending]


def _branch_of(model: Model, layer: int, kind: str) -> Branch:
    """The part that is split. ConfigError where a block is made in a way that is not known."""
    ending, module = _SPLITS[kind]
    full = f"blk.{layer}.{module}.weight"
    for b in _parts_of(model, layer, ending):
        if full in b.part.tensors(f"blk.{layer}."):
            return b
    raise refusal(model, layer, f"adds {ending} in a way of its own, which is not split")
