"""All architectures: name in `general.architecture` -> declaration."""

from pyggml.models.architecture import Architecture
from pyggml.models.architectures.arcee import ARCEE
from pyggml.models.architectures.baichuan import BAICHUAN
from pyggml.models.architectures.bloom import BLOOM
from pyggml.models.architectures.command_r import COHERE2, COMMAND_R
from pyggml.models.architectures.falcon import FALCON
from pyggml.models.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from pyggml.models.architectures.glm4 import GLM4
from pyggml.models.architectures.gpt2 import GPT2, STARCODER
from pyggml.models.architectures.gpt_oss import GPT_OSS
from pyggml.models.architectures.gptneox import GPTNEOX
from pyggml.models.architectures.granite import GRANITE, GRANITEMOE
from pyggml.models.architectures.lfm2 import LFM2, LFM2MOE
from pyggml.models.architectures.llama import LLAMA
from pyggml.models.architectures.llama_like import ERNIE4_5, EXAONE, INTERNLM2
from pyggml.models.architectures.mamba import MAMBA
from pyggml.models.architectures.mamba2 import MAMBA2
from pyggml.models.architectures.mistral3 import MISTRAL3
from pyggml.models.architectures.nemotron import NEMOTRON
from pyggml.models.architectures.olmo import OLMO, OLMO2, OLMOE
from pyggml.models.architectures.phi2 import PHI2
from pyggml.models.architectures.phi3 import PHI3
from pyggml.models.architectures.qwen2 import QWEN2, QWEN2MOE
from pyggml.models.architectures.qwen3 import QWEN3, QWEN3MOE
from pyggml.models.architectures.qwen3next import QWEN3NEXT, QWEN35, QWEN35MOE
from pyggml.models.architectures.rwkv7 import RWKV7
from pyggml.models.architectures.seed_oss import SEED_OSS
from pyggml.models.architectures.smollm3 import SMOLLM3
from pyggml.models.architectures.stablelm import STABLELM
from pyggml.models.architectures.starcoder2 import STARCODER2

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN3MOE,
        QWEN2MOE,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GPT2,
        GRANITE,
        GRANITEMOE,
        OLMO,
        OLMO2,
        OLMOE,
        PHI3,
        SMOLLM3,
        LFM2,
        LFM2MOE,
        MAMBA,
        MAMBA2,
        GPTNEOX,
        QWEN3NEXT,
        QWEN35,
        QWEN35MOE,
        PHI2,
        STARCODER2,
        STABLELM,
        FALCON,
        COMMAND_R,
        INTERNLM2,
        BAICHUAN,
        EXAONE,
        NEMOTRON,
        STARCODER,
        BLOOM,
        COHERE2,
        RWKV7,
        ARCEE,
        ERNIE4_5,
        MISTRAL3,
        SEED_OSS,
        GLM4,
        GPT_OSS,
    )
}
