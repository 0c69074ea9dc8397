"""Text ↔ token ids, from the vocabulary in a GGUF file. The ids equal llama.cpp's.

tokenizer.ggml.model   algorithm                                        implementation
llama                  BPE by scores, with byte fallback                library sentencepiece
gpt2                   regexes, then BPE by merges on bytes             library tokenizers
gemma4                 regexes, then BPE by merges on characters        library tokenizers
whitespace             BPE by merges on words; white space is dropped   library tokenizers
t5                     unigram                                          library tokenizers
bert                   WordPiece                                        here: the library gives up
                                                                        on long words
rwkv                   longest match                                    here

The libraries are imported when a tokenizer is built, not with this package.
"""

from pyggml.tokenizer.tokenizer import Stream, Tokenizer, from_gguf, from_metadata

__all__ = ["Stream", "Tokenizer", "from_gguf", "from_metadata"]
