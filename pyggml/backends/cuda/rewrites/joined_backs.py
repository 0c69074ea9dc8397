"""Gradients of one x, of several products beside each other, become one product: that of all D
beside each other with all W below each other. dx is written once, and rounded once. So do the
gradients of their A where rows are many: x is read once."""

from pyggml.backends.cuda.ops.lora.nodes import WIDE_BACK, WIDE_BACK_ADD, WIDE_GRADIENT
from pyggml.backends.cuda.ops.lora.products import split_sources
from pyggml.backends.cuda.ops.lora.wide import places_beside
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.graph import Graph
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import Replacements, rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import view

_MANY_ROWS = 2048  # that take longer to read than the sums of two more gradients to add


@graph_pass
def with_joined_backs(graph: Graph) -> Graph:
    """The graph with one product for gradients that were added to each other; the same graph if
    there are none."""
    new: dict[Tensor, Tensor] = {}
    for t in graph.nodes:
        if is_of(t, "wide_back", "wide_back_add") and not _is_added_to(t, graph):
            new |= _join(_chain(t, graph), graph)
    return rewrite(graph, new)


def _is_added_to(t: Tensor, graph: Graph) -> bool:
    """Whether another such product alone reads t, and adds to it."""
    readers = graph.readers[t]
    if len(readers) != 1 or t in graph.outputs or not is_of(readers[0], "wide_back_add"):
        return False
    return readers[0].src[0] is t and readers[0].params["step"] == t.params["step"]


def _chain(last: Tensor, graph: Graph) -> list[Tensor]:
    """The products that end with this one, each added to the one before."""
    chain = [last]
    while is_of(chain[0], "wide_back_add"):
        before = chain[0].src[0]
        if not is_of(before, "wide_back", "wide_back_add") or not _is_added_to(before, graph):
            break
        chain.insert(0, before)
    return chain


def _join(chain: list[Tensor], graph: Graph) -> Replacements:
    """One product in place of a chain, and what reads its D."""
    gradients = [split_sources(t.src)[1] for t in chain]
    maker = gradients[0].src[0] if gradients[0].op is SAVED else gradients[0]
    new: dict[Tensor, Tensor] = {}
    if is_of(maker, "gated_gradients") and {*gradients} == {maker, *maker.saved[:1]}:
        chain.sort(key=lambda t: split_sources(t.src)[1] is not maker)
        joint = again(maker, *maker.src, joined=True)
        new[maker.saved[1]] = joint.saved[0]
    elif len(chain) > 1 and all(is_of(d, "wide_gradient") and len(d.src) == 2 for d in gradients):
        sources = [d.src[0] for d in gradients] + [d.src[1] for d in gradients]
        joint = WIDE_GRADIENT(*sources, scales=tuple(d.params["scales"][0] for d in gradients))
    else:
        return {}
    weights = [w for t in chain for w in split_sources(t.src)[0]]
    factors = [a for t in chain for a in split_sources(t.src)[2]]
    places = places_beside([w.shape[0] for w in weights], [a.shape[0] for a in factors])
    of_a: dict[int, Tensor] = {}
    for t, begin, further in zip(chain, *places, strict=True):
        for r in graph.readers[split_sources(t.src)[1]]:
            if is_of(r, "gradient_of_a"):
                of_a[further] = r
            elif is_of(r, "gradient_of_b"):
                new[r] = again(r, r.src[0], joint, column=begin)
            elif r not in chain and r.op is not SAVED:
                return {}
    new |= _gradients_of_a(joint, of_a)
    chain.sort(key=graph.places.__getitem__)
    adds = is_of(chain[0], "wide_back_add")
    op, src = (WIDE_BACK_ADD, chain[0].src[:1]) if adds else (WIDE_BACK, chain[0].src[:0])
    step = chain[-1].params["step"]
    new[chain[-1]] = op(*src, *weights, joint, *factors, step=step, unpacked=())
    return new


def _gradients_of_a(joint: Tensor, by_column: dict[int, Tensor]) -> Replacements:
    """What stands for gradients of A, of further columns of D from these on: rows of one product,
    where there are many rows of one x."""
    (first, one), (last, other) = min(by_column.items()), max(by_column.items())
    alike = all(r.src[1:] == one.src[1:] for r in by_column.values())
    if joint.shape[0] < _MANY_ROWS or not alike:
        return {r: again(r, joint, *r.src[1:], first=at) for at, r in by_column.items()}
    rank = last + other.shape[0] - first
    rows = again(one, joint, *one.src[1:], first=first, rank=rank)
    step, near = rows.strides
    return {
        r: view(rows, r.shape, (step, near), (at - first) * step) for at, r in by_column.items()
    }
