"""muse-glimmer: Muse Glimmer. Four norms in a block, those after with an epsilon of their own; a
gate for each number of attention. Layers with a window alone have rotary positions, as if the file
had no scaling."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.attention import GatedOutput
from pyggml.models.basics import WINDOWS, read_basics, read_windows
from pyggml.models.config import rms_eps
from pyggml.models.norm import RmsNorm
from pyggml.models.rope import read_local_rope
from pyggml.ops import swiglu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="normal")
    plain = read_local_rope(r, b.rotary, b.heads[0].size, b.rotary.freq_base)
    windows = read_windows(r, b, 4, rope=plain)

    def block(i: int) -> Part:
        here = {"of_heads": False, "rope": None} | b.head_norms(i) | windows[i]
        attention = b.attention(i, GatedOutput, **here)
        return b.sandwich_norms(attention, b.gated_mlp(i, swiglu), eps=1e-8)

    return b.decoder(
        block,
        tied=False,
        prelude=RmsNorm("token_embd_norm", b.config.n_embd, rms_eps(r), ()),
        logit_scale=r.number("logit_scale", None, -1e6, 1e6),
        logit_softcap=r.number("final_logit_softcapping", 0.0, 0.0, 1e6),
    )


MUSE_GLIMMER = Architecture(
    "muse-glimmer", _decoder, {**WINDOWS, "logit_scale": 0.5, "final_logit_softcapping": 20.0}
)
