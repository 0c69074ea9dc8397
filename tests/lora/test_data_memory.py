"""A file larger than memory is read, and a second run does not read it again."""

import json
import os
import sys

import pytest
from processes import printed

ALLOWED = 40 << 20  # bytes beyond what the imports take
# Long words: as many bytes are fewer tokens.
N_LINES, WORDS = 2_000, [letter * n for n, letter in enumerate("abcdefgh", 35)] * 125

# In a process of its own: a limit on memory, and a tokenizer that costs little.
PROGRAM = """
import resource, sys
from pathlib import Path
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import TokenCache

class Words:
    n_vocab, identity = 100, "words"
    bos_id, eos_id, eot_id, add_bos, add_eos = None, 1, None, False, True
    chat_templates = ()
    def encode(self, text, add_special=True, parse_special=False):
        return [2 + len(word) % 50 for word in text.split()] + [self.eos_id] * add_special

path, folder, allowed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
opened = []
sys.addaudithook(lambda event, found: event == "open" and opened.append(str(found[0])))
status = Path("/proc/self/status").read_text()
data = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmData" in line)
resource.setrlimit(resource.RLIMIT_DATA, (data + allowed, data + allowed))
try:
    path.read_bytes()
except MemoryError:
    print("the file does not fit")
opened.clear()
corpus = read_corpus(path, Words(), DataConfig(ctx=255), TokenCache(folder))
corpus.digest()
print(corpus.train.n_targets() + corpus.validation.n_targets())
print("read" if str(path) in opened else "not read", *[f.was_kept for f in corpus.files])
"""


def run(*arguments):
    return printed(PROGRAM, *arguments).split("\n")[:-1]


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process's own memory is limited")
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_file_larger_than_memory_is_read_once(tmp_path, kind):
    path, line = tmp_path / f"a.{kind}", " ".join(WORDS)
    with path.open("w") as file:
        for _ in range(N_LINES):
            file.write((json.dumps({"text": line}) if kind == "jsonl" else line) + "\n")
    long_ago = path.stat().st_mtime - 60  # so that a later change would show
    os.utime(path, (long_ago, long_ago))
    assert path.stat().st_size > 1.5 * ALLOWED
    first, again = (run(path, tmp_path / "cache", ALLOWED) for _ in range(2))
    n_tokens = N_LINES * len(WORDS) + 1
    limited, n_targets, how = first
    assert limited == "the file does not fit" and how == "read False"
    if kind == "jsonl":
        assert int(n_targets) == N_LINES * len(WORDS), "all of a row but its first, and its end"
    else:
        assert abs(int(n_targets) - n_tokens * 255 / 256) <= 256 + N_LINES, "all but first tokens"
    assert again == [limited, n_targets, "not read True"]
