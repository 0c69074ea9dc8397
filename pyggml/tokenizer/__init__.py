"""Text ↔ token ids, from a GGUF file's own vocabulary: the ids that llama.cpp gives.

tokenizer.ggml.model   llama       BPE by scores, bytes for what it lacks; library sentencepiece
                       gpt2        BPE by merges, after regexes; library tokenizers
                       gemma4      the same on characters; library tokenizers
                       whitespace  the same of words, without the space between; library tokenizers
                       t5          unigram; library tokenizers
                       bert        WordPiece, written here: the library stops at long words
                       rwkv        the longest token at each place, written here

The library is imported when a tokenizer is built, not with this package.
"""

from pyggml.tokenizer.tokenizer import Stream, Tokenizer, from_gguf, from_metadata

__all__ = ["Stream", "Tokenizer", "from_gguf", "from_metadata"]
