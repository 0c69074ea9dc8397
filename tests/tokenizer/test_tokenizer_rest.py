"""A tokenizer at rest: what encoding needs is freed, and made anew when it is asked for."""

import sys

import pytest
from processes import printed

from pyggml.tokenizer import from_metadata

TEXT = "Hello worlds, 1 2 3! naïve café\n\n  un happy"
KINDS = ["bpe", "spm"]

# In a process of its own: what it holds of its own, in megabytes, at four moments.
PROGRAM = """
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
import tokenizers
from pyggml import heap
from pyggml.gguf.fields import Field
from pyggml.tokenizer import from_metadata
from pyggml.tokenizer.bpe import BYTE_OF

def own():
    heap.give_back()
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024

spelled = (product(ascii_lowercase, repeat=n) for n in (2, 3, 4))
words = ["".join(letters) for some in spelled for letters in islice(some, 50_000)]
arrays = {"tokens": [*BYTE_OF, *words], "merges": [f"{w[:-1]} {w[-1]}" for w in words]}
values = {f"tokenizer.ggml.{name}": Field.of(texts).value for name, texts in arrays.items()}
values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
del spelled, words, arrays
moments = [own()]
tokenizer = from_metadata(values)
assert len(tokenizer.encode("some words " * 10_000)) > 10_000
moments.append(own())
tokenizer.rest()
moments.append(own())
assert tokenizer.decode(tokenizer.encode("some words")) == "some words"
print(*moments, own())
"""


@pytest.mark.parametrize("name", KINDS)
def test_the_ids_after_a_rest_are_those_before(tiny, name):
    tokenizer = from_metadata(tiny(name))
    ids = tokenizer.encode(TEXT)
    tokenizer.rest()
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(TEXT))
    assert tokenizer.encode(TEXT) == ids


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process tells its own memory")
def test_a_rest_frees_what_encoding_took():
    before, awake, resting, again = map(float, printed(PROGRAM).split())
    assert min(awake, again) - before > 12
    assert resting - before < 0.4 * (awake - before)
