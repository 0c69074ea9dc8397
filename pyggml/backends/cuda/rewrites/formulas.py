"""Wide matrices take in what makes them, where nothing else reads that: the kernel computes the
formula as it rounds."""

from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.runtime.kernel import again
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite


def _is_plain(m: Match) -> bool:
    x = m.x
    return not x.params and all(s.is_contiguous and s.shape == x.shape for s in x.src)


def _taken_in(m: Match) -> Replacements:
    t, x, at = m.taker, m.x, m.taker.src.index(m.x)
    assert x.op is not None
    return {t: again(t, *t.src[:at], *x.src, *t.src[at + 1 :], formula=x.op.name)}


FORMULA = Rewrite(
    Pattern(f"""
        x = ({" | ".join(FORMULAS)})(*operands)
        taker = (wide_rows | wide_gradient)(x, *factors) or gradient_of_a(d, x)
    """),
    _is_plain,
    _taken_in,
)
