"""Windows into a tensor's memory, writing through them, and views that order or cut a graph.

view        any axes at any strides, as ggml_view_4d
view_back   its transpose: zeros, with dy added to the window
acc         a, with b added to a window of it
set         a, with b written into a window of it
after       x, computed after other tensors, which it does not read
detach      x as a constant: no gradient passes through it

A window is (shape, strides, offset). Functions take strides and offset in bytes, as ggml does; a
node's parameters hold them in elements.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Detached, Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor, zeros
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, as_four, cpu_kernel
from pyggml.ops.expect import expect_type


def view(x: Tensor, shape: Shape, strides: Shape, offset: int = 0) -> Tensor:
    """A window into x from byte `offset` on, `strides` in bytes, outermost first (ggml's VIEW).

    Raises ShapeError if it reaches out of x, or x is quantised. An x with gaps is copied first.
    """
    return VIEW(x, **_in_elements("view", x, shape, strides, offset))


def acc(a: Tensor, b: Tensor, strides: Shape, offset: int = 0) -> Tensor:
    """a with b added to the window of b's shape, strides and offset in bytes (ggml's ACC)."""
    return ACC(a, b, **_window_params("acc", a, b, strides, offset))


def set_(a: Tensor, b: Tensor, strides: Shape, offset: int = 0) -> Tensor:
    """a with b in the window of b's shape, strides and offset in bytes (ggml's SET); F32 or I32.

    Raises ShapeError if two elements of b would fall on one of a.
    """
    return SET(a, b, **_window_params("set", a, b, strides, offset))


def _in_elements(
    name: str, x: Tensor, shape: Shape, strides: Shape, offset: int
) -> dict[str, Shape | int]:
    """A window in bytes as a node's parameters, in elements."""
    size = x.dtype.block_bytes
    if x.dtype.quantised or any(n % size for n in (*strides, offset)):
        raise ShapeError(
            f"{name}: strides {strides} and offset {offset} into {x!r} are not whole elements"
        )
    in_elements = tuple(n // size for n in strides)
    return {"shape": tuple(shape), "strides": in_elements, "offset": offset // size}


def _window_params(
    name: str, a: Tensor, b: Tensor, strides: Shape, offset: int
) -> dict[str, Shape | int]:
    placed = _in_elements(name, a, b.shape, strides, offset)
    del placed["shape"]
    return placed


_REFUSES = {"strides": ((-1, -1), (99, 99), (1,) * 5), "offset": (-1, 999)}


def _check_window(name: str, x: Tensor, shape: Shape, strides: Shape, offset: int) -> None:
    """ShapeError unless every element of the window is one of x's."""
    steps = sum((n - 1) * s for n, s in zip(shape, strides, strict=False))
    end = offset + (0 if 0 in shape else steps + 1)
    inside = len(shape) == len(strides) <= 4 and min((offset, *strides)) >= 0
    if not inside or min(shape, default=1) < 0 or end > x.n_elements:
        raise ShapeError(
            f"{name}: a window of shape {shape}, strides {strides} and offset {offset} (elements)"
            f" does not lie inside {x!r}"
        )


def _window(flat: np.ndarray, shape: Shape, strides: Shape, offset: int) -> np.ndarray:
    """The window as an array, a view of `flat`, which has one axis without gaps."""
    in_bytes = tuple(s * flat.itemsize for s in strides)
    return np.ndarray(shape, flat.dtype, flat, offset * flat.itemsize, in_bytes)


def _flat_copy(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C").reshape(-1)


# -- view ---------------------------------------------------------------------------------------


def _view_spec(x: Tensor, shape: Shape, strides: Shape, offset: int) -> Spec:
    _check_window("view", x, shape, strides, offset)
    size = x.dtype.block_bytes
    return Spec(shape, x.dtype, tuple(s * size for s in strides), offset * size)


def _view_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy where it was read, else 0"""
    p = node.params
    return (VIEW_BACK(dy, shape=node.src[0].shape, strides=p["strides"], offset=p["offset"]),)


def _view_samples(rng: np.random.Generator) -> Iterator[Sample]:
    windows: list[tuple[Shape, Shape, Shape, int]] = [
        ((1, 1), (1,), (1,), 0),
        ((3, 8), (2, 4), (8, 1), 9),
        ((3, 8), (4, 3), (2, 1), 5),  # overlapping rows
        ((2, 3, 5), (5, 2, 3), (1, 15, 5), 0),
        ((24,), (), (), 7),
    ]
    s0, s1, first = rng.integers(0, (5, 5, 6)).tolist()  # within 24: 5 + 3·4 + 1·4
    windows.append(((4, 6), (4, 2), (s0, s1), first))
    for whole, shape, strides, offset in windows:
        params = {"shape": shape, "strides": strides, "offset": offset}
        yield Sample((rng.standard_normal(whole),), params)


VIEW = op(
    name="view",
    ggml=GGMLOp.VIEW,
    spec=_view_spec,
    ref=lambda x, shape, strides, offset: _window(_flat_copy(x), shape, strides, offset),
    grad=_view_grad,
    samples=_view_samples,
    refuses={"shape": ((9999,), (-1, -1), (0, 0)), **_REFUSES},
    memory=Memory.VIEW,
)


@kernel
def _add_window(out, b, strides, offset):
    s0, s1, s2, s3 = strides
    for i in range(b.shape[0]):
        for j in range(b.shape[1]):
            for k in range(b.shape[2]):
                at = offset + i * s0 + j * s1 + k * s2
                for c in range(b.shape[3]):
                    out[at + c * s3] += b[i, j, k, c]


@kernel
def _zero_and_add(out, b, strides, offset):
    out[:] = 0
    _add_window(out, b, strides, offset)


def _window_run(code: Callable[..., None], site: Site) -> Call:
    """Call code(out, *sources, b, strides, offset), where b, the last source, has four axes."""
    *whole, b = site.src
    strides = site.node.params["strides"]
    four = (*(0,) * (4 - len(strides)), *strides)
    flat = (a.reshape(-1) for a in (site.out, *whole))
    return Call(code, *flat, as_four(b), four, site.node.params["offset"])


def _view_back_spec(dy: Tensor, shape: Shape, strides: Shape, offset: int) -> Spec:
    expect_type("view_back", "dy", dy)
    whole = Tensor(shape, dy.dtype)
    _check_window("view_back", whole, dy.shape, strides, offset)
    return Spec(shape)


def _view_back_ref(dy: np.ndarray, shape: Shape, strides: Shape, offset: int) -> np.ndarray:
    out = np.zeros(prod(shape))
    np.add.at(out, _window(np.arange(out.size), dy.shape, strides, offset), dy)
    return out.reshape(shape)


def _view_back_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """ddy = the window of g"""
    p = node.params
    shape = node.src[0].shape
    return (VIEW(dy, shape=shape, strides=p["strides"], offset=p["offset"]),)


def _view_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _view_samples(rng):
        dy = np.asarray(rng.standard_normal(s.params["shape"]))
        yield Sample((dy,), {**s.params, "shape": s.arrays[0].shape})


VIEW_BACK = op(
    name="view_back",
    spec=_view_back_spec,
    ref=_view_back_ref,
    grad=_view_back_grad,
    samples=_view_back_samples,
    refuses={"shape": ((-1, -1), (0, 0)), **_REFUSES},
)
cpu_kernel(VIEW_BACK, partial(_window_run, _zero_and_add))

# -- acc, set -----------------------------------------------------------------------------------


@kernel
def _acc(out, a, b, strides, offset):
    for i in range(out.size):
        out[i] = a[i]
    _add_window(out, b, strides, offset)


@kernel
def _set(out, a, b, strides, offset):
    s0, s1, s2, s3 = strides
    for i in range(out.size):
        out[i] = a[i]
    for i in range(b.shape[0]):
        for j in range(b.shape[1]):
            for k in range(b.shape[2]):
                at = offset + i * s0 + j * s1 + k * s2
                for c in range(b.shape[3]):
                    out[at + c * s3] = b[i, j, k, c]


def _acc_spec(a: Tensor, b: Tensor, strides: Shape, offset: int) -> Spec:
    expect_type("acc", "a", a)
    expect_type("acc", "b", b)
    _check_window("acc", a, b.shape, strides, offset)
    return Spec(a.shape)


def _acc_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, db = the window of dy"""
    return dy, VIEW(dy, shape=node.src[1].shape, **node.params)


def _acc_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _windows_of_floats(rng)
    params = {"strides": (2, 1), "offset": 5}  # overlapping rows
    yield Sample((rng.standard_normal((3, 8)), rng.standard_normal((4, 3))), params)


ACC = op(
    name="acc",
    ggml=GGMLOp.ACC,
    spec=_acc_spec,
    ref=lambda a, b, strides, offset: np.asarray(a + _view_back_ref(b, a.shape, strides, offset)),
    grad=_acc_grad,
    samples=_acc_samples,
    refuses=_REFUSES,
)
cpu_kernel(ACC, partial(_window_run, _acc))


def _set_spec(a: Tensor, b: Tensor, strides: Shape, offset: int) -> Spec:
    expect_type("set", "a", a, I32 if a.dtype is I32 else F32)
    expect_type("set", "b", b, a.dtype)
    _check_window("set", a, b.shape, strides, offset)
    reach = 0
    for stride, n in sorted(zip(strides, b.shape, strict=True)):
        if n > 1 and stride <= reach:
            raise ShapeError(f"set: elements of {b!r} at strides {strides} fall on one another")
        reach += (n - 1) * stride
    return Spec(a.shape, a.dtype)


def _set_ref(a: np.ndarray, b: np.ndarray, strides: Shape, offset: int) -> np.ndarray:
    out = _flat_copy(a)
    _window(out, b.shape, strides, offset)[...] = b
    return out.reshape(a.shape)


def _set_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """da = dy, 0 in the window; db = the window of dy"""
    shape = node.src[1].shape
    return SET(dy, zeros(shape), **node.params), VIEW(dy, shape=shape, **node.params)


def _windows_of_floats(rng: np.random.Generator) -> Iterator[Sample]:
    windows: list[tuple[Shape, Shape, Shape, int]] = [
        ((1, 1), (1,), (1,), 0),
        ((3, 8), (2, 4), (8, 1), 9),
        ((2, 3, 5), (5, 2, 3), (1, 15, 5), 0),
    ]
    for whole, shape, strides, offset in windows:
        arrays = rng.standard_normal(whole), rng.standard_normal(shape)
        yield Sample(arrays, {"strides": strides, "offset": offset})


def _set_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _windows_of_floats(rng)
    integers = rng.integers(-9, 9, (3, 8)), rng.integers(-9, 9, (2, 4))
    yield Sample(integers, {"strides": (8, 1), "offset": 9})


SET = op(
    name="set",
    ggml=GGMLOp.SET,
    spec=_set_spec,
    ref=_set_ref,
    grad=_set_grad,
    samples=_set_samples,
    refuses=_REFUSES,
)
cpu_kernel(SET, partial(_window_run, _set))

# -- after ----------------------------------------------------------------------------------------


def after(x: Tensor, *done: Tensor) -> Tensor:
    """A view of x, computed after the tensors `done`, such as writes into a cache.

    ggml has no such op: there, ggml_build_forward_expand is called for what must be done.
    """
    return AFTER(x, *done)


def _after_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy"""
    return (dy, *(None for _ in node.src[1:]))


def _after_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shapes in [((1,),), ((3, 8), (2, 2)), ((2, 3, 5), (1,), (4, 2))]:
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


AFTER = op(
    name="after",
    ggml=GGMLOp.VIEW,
    spec=lambda x, *done: Spec(x.shape, x.dtype, x.strides),
    ref=lambda x, *done: x,
    grad=_after_grad,
    samples=_after_samples,
    memory=Memory.VIEW,
    strided=True,
)

# -- detach ---------------------------------------------------------------------------------------


def detach(x: Tensor) -> Tensor:
    """x, F32, as a constant of the loss (no op of ggml; PyTorch's detach)."""
    return DETACH(x)


def _detach_spec(x: Tensor) -> Spec:
    expect_type("detach", "x", x)
    return Spec(x.shape)


def _detach_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5)]:
        yield Sample((rng.standard_normal(shape),))


DETACH = op(
    name="detach",
    spec=_detach_spec,
    ref=np.asarray,
    grad=Detached("its result counts as fixed, which is what it is for"),
    samples=_detach_samples,
    memory=Memory.VIEW,
)
