"""Graph: the nodes that some results need, in an order in which they can run."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.tensor import Tensor


def topological(*roots: Tensor) -> list[Tensor]:
    """Every tensor the roots depend on, leaves included, in the order in which they were made, in
    which sources stand before users."""
    seen = set(roots)
    stack = list(seen)
    while stack:
        new = [s for s in stack.pop().src if s not in seen]
        seen.update(new)
        stack += new
    return sorted(seen, key=lambda t: t.place)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """`nodes` run in this order; `leaves` hold data already; `outputs` are kept for the caller."""

    nodes: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, *outputs: Tensor) -> Graph:
        """The graph that makes these outputs, and nothing that they do not need."""
        order = topological(*outputs)
        return cls(
            nodes=tuple(t for t in order if t.op is not None),
            leaves=tuple(t for t in order if t.op is None),
            outputs=outputs,
        )

    def __str__(self) -> str:
        """One line a node: number, op, type and shape, numbers of its sources, name."""
        number = {t: str(i) for i, t in enumerate(self.nodes)}
        lines = []
        for t in self.nodes:
            src = ", ".join(number.get(s) or s.name or "leaf" for s in t.src)
            assert t.op is not None
            lines.append(
                f"{number[t]:>5} {t.op.name:<22} {t.dtype!r}{list(t.shape)}  ({src})  {t.name}"
            )
        return "\n".join(lines)

    def to_dot(self) -> str:
        """The graph in Graphviz's language: boxes for leaves, ellipses for ops."""
        number = {t: i for i, t in enumerate((*self.leaves, *self.nodes))}
        lines = ["digraph pyggml {", "  rankdir=BT;"]
        for t, i in number.items():
            shape = "box" if t.op is None else "ellipse"
            label = f"{t.op.name if t.op else 'leaf'}\\n{t.name}\\n{t.dtype!r}{list(t.shape)}"
            lines.append(f'  n{i} [shape={shape}, label="{label}"];')
            lines.extend(f"  n{number[s]} -> n{i};" for s in t.src)
        return "\n".join([*lines, "}"])
