"""Architectures that stand for all: what one op makes of another's result in any, it does in these.

Tests of what passes and caches do to a graph try these; the others are among the slow ones.
"""

import pytest

from pyggml.models import ARCHITECTURES

KINDS = (
    *("llama", "qwen3", "mamba", "gemma3", "gemma3n", "bailingmoe3", "rwkv7", "qwen3next"),
    *("llama4", "rwkv6", "gpt-oss", "step35", "talkie", "rwkv6qwen2", "mpt", "plm", "smallthinker"),
    *("gemma4", "maple", "bailingmoe2", "nemotron_h_moe", "qwen2vl", "apertus", "deepseek2"),
    *("laguna", "olmo", "lfm2", "command-r", "mistral3", "refact", "bitnet", "nanbeige"),
    "muse-glimmer",
)


def each_kind(kinds=KINDS, quick=()):
    """Every architecture, for pytest.mark.parametrize: these, and the others marked slow."""
    assert set(quick) <= set(kinds) <= ARCHITECTURES.keys()
    marks = {name: [pytest.mark.quick] if name in quick else [] for name in kinds}
    return [pytest.param(a, marks=marks.get(a, [pytest.mark.slow])) for a in ARCHITECTURES]
