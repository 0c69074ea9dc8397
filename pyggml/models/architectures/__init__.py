"""All architectures: name in `general.architecture` -> declaration."""

from pyggml.models.architecture import Architecture
from pyggml.models.architectures.afmoe import AFMOE
from pyggml.models.architectures.apertus import APERTUS
from pyggml.models.architectures.arcee import ARCEE
from pyggml.models.architectures.arctic import ARCTIC
from pyggml.models.architectures.baichuan import BAICHUAN
from pyggml.models.architectures.bailing import BAILINGMOE, BAILINGMOE2
from pyggml.models.architectures.bailing3 import BAILINGMOE3
from pyggml.models.architectures.bert import ROWS as BERT_ROWS
from pyggml.models.architectures.bitnet import BITNET
from pyggml.models.architectures.bloom import BLOOM
from pyggml.models.architectures.command_r import COHERE2, COHERE2MOE, COMMAND_R
from pyggml.models.architectures.dbrx import DBRX
from pyggml.models.architectures.deci import DECI
from pyggml.models.architectures.deepseek import DEEPSEEK, DOTS1
from pyggml.models.architectures.deepseek2 import DEEPSEEK2, MISTRAL4
from pyggml.models.architectures.deepseek2_ocr import DEEPSEEK2_OCR
from pyggml.models.architectures.ernie4_5_moe import ERNIE4_5_MOE
from pyggml.models.architectures.exaone import EXAONE4, EXAONE_MOE
from pyggml.models.architectures.falcon import FALCON
from pyggml.models.architectures.falcon_h1 import FALCON_H1
from pyggml.models.architectures.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA_EMBEDDING
from pyggml.models.architectures.gemma3n import GEMMA3N
from pyggml.models.architectures.gemma4 import GEMMA4
from pyggml.models.architectures.glm4 import GLM4, GLM4MOE
from pyggml.models.architectures.gpt2 import GPT2, STARCODER
from pyggml.models.architectures.gpt_oss import GPT_OSS
from pyggml.models.architectures.gptneox import GPTNEOX
from pyggml.models.architectures.granite import (
    GRANITE,
    GRANITE_SWA,
    GRANITEHYBRID,
    GRANITEMOE,
    MINICPM,
)
from pyggml.models.architectures.grok import GROK
from pyggml.models.architectures.grovemoe import GROVEMOE
from pyggml.models.architectures.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HUNYUAN_VL
from pyggml.models.architectures.hy_v3 import HY_V3
from pyggml.models.architectures.jamba import JAMBA
from pyggml.models.architectures.kimi_linear import KIMI_LINEAR
from pyggml.models.architectures.laguna import LAGUNA
from pyggml.models.architectures.lfm2 import LFM2, LFM2MOE
from pyggml.models.architectures.llama import LLAMA
from pyggml.models.architectures.llama4 import LLAMA4
from pyggml.models.architectures.llama_like import ROWS
from pyggml.models.architectures.mamba import MAMBA, MAMBA2
from pyggml.models.architectures.maple import MAPLE
from pyggml.models.architectures.mellum import MELLUM
from pyggml.models.architectures.mimo2 import MIMO2
from pyggml.models.architectures.minicpm3 import MINICPM3, PLM
from pyggml.models.architectures.minimax_m2 import MINIMAX_M2
from pyggml.models.architectures.mistral3 import MISTRAL3
from pyggml.models.architectures.modern_bert import EUROBERT, MODERN_BERT, NEO_BERT
from pyggml.models.architectures.mpt import MPT
from pyggml.models.architectures.muse_glimmer import MUSE_GLIMMER
from pyggml.models.architectures.nanbeige import NANBEIGE
from pyggml.models.architectures.nemotron import NEMOTRON
from pyggml.models.architectures.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from pyggml.models.architectures.olmo import OLMO, OLMO2, OLMOE
from pyggml.models.architectures.phi2 import PHI2
from pyggml.models.architectures.phi3 import PHI3, PHIMOE
from pyggml.models.architectures.plamo import PLAMO, PLAMO2, PLAMO3
from pyggml.models.architectures.qwen import QWEN
from pyggml.models.architectures.qwen2 import QWEN2, QWEN2MOE
from pyggml.models.architectures.qwen3 import (
    QWEN3,
    QWEN3MOE,
    QWEN3VL,
    QWEN3VLMOE,
)
from pyggml.models.architectures.qwen3next import QWEN3NEXT, QWEN35, QWEN35MOE
from pyggml.models.architectures.rwkv import ARWKV7, RWKV6, RWKV6QWEN2, RWKV7
from pyggml.models.architectures.seed_oss import SEED_OSS
from pyggml.models.architectures.smallthinker import SMALLTHINKER
from pyggml.models.architectures.smollm3 import SMOLLM3
from pyggml.models.architectures.spark2_5 import SPARK2_5
from pyggml.models.architectures.stablelm import STABLELM
from pyggml.models.architectures.starcoder2 import STARCODER2
from pyggml.models.architectures.step35 import STEP35
from pyggml.models.architectures.talkie import TALKIE

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
        BAICHUAN,
        NEMOTRON,
        STARCODER,
        BLOOM,
        COHERE2,
        RWKV7,
        ARCEE,
        MISTRAL3,
        SEED_OSS,
        GLM4,
        GPT_OSS,
        *ROWS,
        ARCTIC,
        DBRX,
        DECI,
        GROK,
        HUNYUAN_DENSE,
        HUNYUAN_MOE,
        HUNYUAN_VL,
        MAPLE,
        MELLUM,
        MINICPM,
        MPT,
        PLAMO,
        QWEN,
        QWEN3VL,
        QWEN3VLMOE,
        AFMOE,
        APERTUS,
        BAILINGMOE,
        BAILINGMOE2,
        BAILINGMOE3,
        BITNET,
        COHERE2MOE,
        DEEPSEEK,
        DEEPSEEK2,
        DEEPSEEK2_OCR,
        KIMI_LINEAR,
        MIMO2,
        NANBEIGE,
        MINICPM3,
        PLM,
        MISTRAL4,
        DOTS1,
        ERNIE4_5_MOE,
        EXAONE4,
        EXAONE_MOE,
        GLM4MOE,
        LAGUNA,
        MINIMAX_M2,
        PHIMOE,
        SMALLTHINKER,
        FALCON_H1,
        GRANITEHYBRID,
        JAMBA,
        NEMOTRON_H,
        NEMOTRON_H_MOE,
        SPARK2_5,
        GRANITE_SWA,
        HY_V3,
        LLAMA4,
        MUSE_GLIMMER,
        GROVEMOE,
        PLAMO2,
        PLAMO3,
        STEP35,
        TALKIE,
        ARWKV7,
        RWKV6,
        RWKV6QWEN2,
        GEMMA4,
        GEMMA3N,
    )
}
# They embed texts and predict no token.
ENCODERS: dict[str, Architecture] = {
    a.name: a for a in (*BERT_ROWS, MODERN_BERT, NEO_BERT, EUROBERT, GEMMA_EMBEDDING)
}
