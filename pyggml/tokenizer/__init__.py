"""Text ↔ token ids, from a GGUF file's own vocabulary: the ids that llama.cpp gives.

tokenizer.ggml.model   llama   BPE by scores, bytes for what it lacks; library sentencepiece
                       gpt2    byte-level BPE by merges, after regexes; library tokenizers

The library is imported when a tokenizer is built, not with this package.
"""

from pyggml.tokenizer.tokenizer import Stream, Tokenizer, from_gguf, from_metadata

__all__ = ["Stream", "Tokenizer", "from_gguf", "from_metadata"]
