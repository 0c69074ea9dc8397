"""Copies without gaps, and fills."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.backends.webgpu.kernel import Kernel, Site
from pyggml.backends.webgpu.shader import Dispatch, per_element
from pyggml.backends.webgpu.table import declare
from pyggml.dtypes import F32
from pyggml.tensors import MAX_AXES, Tensor

_COPY = """
    let i = group * 256u + me;
    if (i < N) {
        let j = i / N3;
        let k = j / N2;
        put_y(i, x_at(k / N1 * S0 + k % N1 * S1 + j % N2 * S2 + i % N3 * S3));
    }
"""
_FILL = "let i = group * 256u + me; if (i < N) { put_y(i, VALUE); }"


def _copied(site: Site) -> Sequence[Dispatch]:
    (x,), n = site.node.src, site.node.n_elements
    sizes = (1,) * (MAX_AXES - len(x.shape)) + x.shape
    steps = (0,) * (MAX_AXES - len(x.shape)) + tuple(s // 4 for s in x.strides)
    constants = {"N": n, **{f"N{i}": sizes[i] for i in (1, 2, 3)}}
    constants |= {f"S{i}": step for i, step in enumerate(steps)}
    return [
        site.shaders.dispatch(_COPY, {"y": site.out, "x": site.src[0]}, per_element(n), constants)
    ]


def _copy_lacks(node: Tensor) -> str | None:
    (x,) = node.src
    return None if x.dtype is node.dtype is F32 else f"{x.dtype} to {node.dtype}"


def _filled(site: Site) -> Sequence[Dispatch]:
    n, (value,) = site.node.n_elements, site.node.params.values()
    constants = {"N": n, "VALUE": float(value)}
    return [site.shaders.dispatch(_FILL, {"y": site.out}, per_element(n), constants)]


for _name in ("cont", "dup", "cpy"):
    declare(_name, Kernel(_copied, lacks=_copy_lacks))
declare("fill", Kernel(_filled))
