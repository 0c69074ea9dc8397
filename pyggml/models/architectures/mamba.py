"""mamba and mamba2: Mamba, FalconMamba and Mamba 2. No attention."""

from collections.abc import Callable
from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.block import residual
from pyggml.models.config import read_config, rms_eps
from pyggml.models.mamba import read_mamba
from pyggml.models.mamba2 import STATES, read_mamba2
from pyggml.models.norm import RmsNorm


def _decoder(r: Reader, read_mixer: Callable[[Reader, int], Part]) -> Decoder:
    c, eps = read_config(r), rms_eps(r)
    block = residual(RmsNorm("attn_norm", c.n_embd, eps), read_mixer(r, c.n_embd))
    norm = RmsNorm("output_norm", c.n_embd, eps)
    return Decoder(config=c, blocks=(block,) * c.n_layer, norm=norm)


MAMBA = Architecture(
    "mamba",
    partial(_decoder, read_mixer=read_mamba),
    {"ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 16, "ssm.conv_kernel": 4},
)
MAMBA2 = Architecture("mamba2", partial(_decoder, read_mixer=read_mamba2), STATES)
