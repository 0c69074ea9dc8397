"""Value: a tensor whose numbers are known, with operators and a gradient.

    w = tensor([[1.0, 2.0]], requires_grad=True)
    loss = (w * w).sum()
    loss.backward()
    w.grad                        # [[2. 4.]]

A Value holds a node of the engine's graph, `value.node`. An operator makes one more node and
computes it at once. `value.graph` is the graph so far, for `build_backward`, `plan` and `bind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from pyggml.backward import build_backward
from pyggml.backward.walk import is_fixed, tensors_that_reach
from pyggml.eager.numbers import gradients, numbers, refuse_outdated, write
from pyggml.eager.operators import Operators
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.op import NoGrad
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor, leaf

_values: WeakKeyDictionary[Tensor, ref[Value]] = WeakKeyDictionary()


class Value(Operators):
    """A node of the graph with its numbers.

    node           the engine's Tensor
    requires_grad  whether `backward` finds a gradient for it. A leaf's is given to `tensor`; a
                   result's is true if a source's is and the op is differentiable
    name           shown where the value is printed or a graph is drawn
    """

    __array_ufunc__ = None  # array * value is the value's operator
    __contains__ = None  # a value equals itself alone, so no number would be found
    is_known: ClassVar[bool] = True  # whether its numbers are computed at once
    __slots__ = ("__weakref__", "_grad", "node", "requires_grad")

    def __init__(self, node: Tensor, requires_grad: bool) -> None:
        self.node, self.requires_grad = node, requires_grad
        self._grad: np.ndarray | None = None
        _values[node] = ref(self)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        return self.node.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.node.n_elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, or that of integers."""
        kind = self.node.dtype.numpy.kind
        return self.node.dtype.numpy if kind == "i" else np.dtype(np.float32)

    @property
    def name(self) -> str:
        return self.node.name

    def named(self, name: str) -> Value:
        """Set the name; returns the value."""
        self.node.name = name
        return self

    @property
    def graph(self) -> Graph:
        """The graph that ends here."""
        return Graph.of(self.node)

    # -- its numbers -------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """A copy of the numbers, float32 or int32. Those of a leaf can be set, as in
        w.data -= 0.1 * w.grad
        """
        return self.numpy()

    @data.setter
    def data(self, values: np.ndarray) -> None:
        if self.node.op is not None:
            raise ShapeError(f"{self._label()} was computed: only the data of a leaf can be set")
        write(self.node, values)

    def numpy(self) -> np.ndarray:
        """A copy of the numbers, float32 or int32."""
        return numbers(self.node).copy()

    def item(self) -> float | int:
        """The number of a value that has one element; ShapeError for any other."""
        if self.size != 1:
            raise ShapeError(f"{self._label()} has {self.size} elements, wanted one")
        number: float | int = numbers(self.node).item()
        return number

    def tolist(self) -> Any:
        return numbers(self.node).tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        """Of one number as that number has it: f"{loss:.3f}"."""
        return format(self.item(), spec) if spec else str(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a value of one number has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        """Its parts along the first axis."""
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """What NumPy takes of it: a copy of the numbers."""
        return np.asarray(self.numpy(), dtype)

    @property
    def is_contiguous(self) -> bool:
        """ShapeError: ops ask this of their sources, which are tensors."""
        raise ShapeError(f"{self._label()} is no Tensor: wanted apply(op, …) for Values")

    # -- its gradient ------------------------------------------------------------------------------

    @property
    def grad(self) -> np.ndarray:
        """The sum of the gradients of the losses since `zero_grad`, an array of the same shape.

        Raises NoGradientError before the first `backward`.
        """
        if self._grad is None:
            raise NoGradientError(f"{self._label()} has no gradient yet: {self._missing()}")
        return self._grad

    @property
    def has_grad(self) -> bool:
        """Whether `grad` is there."""
        return self._grad is not None

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self._grad = None

    def backward(self, gradient: np.ndarray | Value | None = None) -> None:
        """Add d(self)/d(value) to the gradient of every value that this one depends on.

        gradient: for a value of more than one number, d(loss)/d(self), of its shape. Raises
        NoGradientError if there is nothing to differentiate by, if an op on the way has no
        gradient, or if a leaf was changed since.
        """
        seed = None if gradient is None else leaf(_array(gradient, np.float32))
        if seed is None and self.size != 1:
            raise NoGradientError(
                f"{self._label()} has {self.size} elements, wanted a loss of one number, or the "
                "gradient of each"
            )
        forward = self.graph
        sources = self.sources()
        refuse_outdated(forward.nodes)
        graph = build_backward(forward, [v.node for v in sources], seed)
        for value, g in zip(sources, gradients(graph), strict=True):
            value._grad = g.copy() if value._grad is None else value._grad + g

    def sources(self) -> list[Value]:
        """The values for which `backward` finds a gradient, leaves first; only those that are still
        held somewhere. Raises NoGradientError if there is none."""
        forward = self.graph
        order = [*forward.leaves, *forward.nodes]
        reached = tensors_that_reach(self.node, order)
        held = (r() for t in order if t in reached and (r := _values.get(t)) is not None)
        sources = [v for v in held if v is not None and v.requires_grad]
        if not sources:
            raise NoGradientError(
                f"{self._label()} depends on no value that was made with requires_grad=True"
            )
        return sources

    def detach(self) -> Value:
        """The same numbers as a leaf that counts as fixed."""
        return Value(leaf(self.numpy(), self.name), False)

    def _label(self) -> str:
        return self.name or f"a value of shape {list(self.shape)}"

    def _missing(self) -> str:
        if not self.requires_grad:
            return "it was made without requires_grad=True, and from nothing that was made with it"
        return "call backward() on a loss that depends on it first"

    # -- what Operators are made of ----------------------------------------------------------------

    def _apply(self, builder: Callable[..., Tensor], *operands: Any, **params: Any) -> Value:
        return apply(builder, self, *operands, **params)

    def _compute(self, builder: Callable[..., Tensor], *operands: Any, **params: Any) -> Value:
        return apply(builder, as_float(self), *map(as_float, operands), **params)

    # -- how it is printed -------------------------------------------------------------------------

    def __repr__(self) -> str:
        """tensor([2. 4.], shape (2,), w, from mul of x and y)"""
        text = np.array2string(self.data, precision=4, threshold=60, separator=", ", prefix=_OPEN)
        return f"{_OPEN}{text}, {self._description()})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _description(self) -> str:
        facts = [f"shape {self.shape}", self.name]
        if self.node.op is not None:
            facts.append(f"from {self.node.op.name} of {_list_names(self.node.src)}")
        elif self.requires_grad:
            facts.append("requires_grad")
        return ", ".join(filter(None, facts))


_OPEN = "tensor("


def _list_names(sources: Sequence[Tensor]) -> str:
    names = [s.name or (s.op.name if s.op else f"{s.dtype}{list(s.shape)}") for s in sources]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# -- making values ---------------------------------------------------------------------------------


def tensor(data: Any, requires_grad: bool = False, name: str = "") -> Value:
    """A leaf with a copy of these numbers: a number, nested lists, an array, or a Value.

    Floats become float32 and integers int32, or float32 with requires_grad. Raises ShapeError for
    anything else, for lists of unequal lengths, and for more than four axes.
    """
    array = _array(data, np.float32 if requires_grad else None)
    return Value(leaf(array.copy(), name), requires_grad)


def as_value(x: Any) -> Value:
    """x itself if it is a Value, else a leaf with its numbers."""
    return x if isinstance(x, Value) else tensor(x)


def as_float(x: Any) -> Value:
    """A Value of float32: integers are converted, which no gradient passes."""
    value = as_value(x)
    return value if value.node.dtype is F32 else tensor(value.numpy().astype(np.float32))


def apply(builder: Callable[..., Tensor], *sources: Any, **params: Any) -> Value:
    """The Value of builder(*tensors, **params), such as apply(ops.rms_norm, x, eps=1e-6).

    sources are Values, or what `tensor` takes; builder is one of `pyggml.ops` or your own. Raises
    what the builder raises, ShapeError above all.
    """
    values = [as_value(s) for s in sources]
    node = builder(*(v.node for v in values), **params)
    # A builder may give back its source.
    existing = next((v for v in values if v.node is node), None)
    if existing is not None:
        return existing
    requires_grad = any(v.requires_grad for v in values) and not _is_constant(node)
    kind = next((type(v) for v in values if not v.is_known), Value)
    value = kind(node, requires_grad)
    if kind.is_known:
        numbers(node)
    return value


def _is_constant(node: Tensor) -> bool:
    return is_fixed(node) or (node.op is not None and isinstance(node.op.grad, NoGrad))


def _array(data: Any, dtype: Any = None) -> np.ndarray:
    """Numbers as an array of float32 or int32."""
    if isinstance(data, Value):
        data = data.numpy()
    if isinstance(data, Sequence) and any(isinstance(item, Value) for item in data):
        data = [item.tolist() if isinstance(item, Value) else item for item in data]
    try:
        array = np.asarray(data)
    except ValueError:
        raise ShapeError("tensor: the lists have unequal lengths, wanted a full array") from None
    if array.dtype.kind not in "fiub":
        raise ShapeError(f"tensor: {_short(data)} is no number, list of numbers or array of them")
    if array.ndim > MAX_AXES:
        raise ShapeError(f"tensor: {array.ndim} axes, wanted at most {MAX_AXES}")
    if dtype is None:
        dtype = np.float32 if array.dtype.kind in "fb" else np.int32
    if dtype is np.int32 and array.size and np.abs(array.astype(np.float64)).max() >= 1 << 31:
        raise ShapeError("tensor: an integer beyond 32 bits, wanted smaller ones or floats")
    return np.asarray(array, dtype)


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) < 60 else f"{text[:57]}..."
