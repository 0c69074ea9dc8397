"""Questions, and what llama.cpp and lm-evaluation-harness score on them with the demo's model.

    python make.py questions                          # questions.jsonl, from the demo's text
    python make.py llama LLAMA_PERPLEXITY MODEL       # MODEL: the demo's base, as F32
    python make.py harness MODEL                      # needs lm_eval, transformers, torch, gguf

The last two write their part of scores.json. The harness reads MODEL as transformers does, so that
tokens, logits and arithmetic are all its own.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
QUESTIONS, SCORES = HERE / "questions.jsonl", HERE / "scores.json"
TEXT = HERE.parents[2] / "cli/demo/shakespeare.txt"
N_ENDINGS = 40

OTHERS = [  # borders of all kinds, and choices of unlike number and length
    {"question": "Is the king dead? Answer:", "choices": ["yes", "no", "maybe"], "answer": 1},
    {"question": "The man said that he was", "choices": ["a man", "a king", "a"], "answer": "B"},
    {"question": "He went to the ", "choices": ["house.", "houses of the king"], "answer": 0},
    {"question": "What is the name?\n", "choices": ["John", "the name of the man"], "answer": 1},
    {"question": "“Naïve,” said he, and the", "choices": ["café", "cafe", "é"], "answer": "café"},
    {
        "question": "My lord, the king",
        "choices": ["is coming with his men", "is coming with the queen", "is dead", "and I"],
        "answer": 2,
    },
    {"question": "I have", "choices": ["not.", "not seen him"], "answer": 1},
    {"question": "The and of", "choices": ["the the the", "I am the man who"], "answer": "A"},
    {"question": "one, two,", "choices": ["three", "four", "five", "six", "ten"], "answer": "0"},
    {"question": "She", "choices": ["-told him", ", and he"], "answer": 1},
]


def questions():
    """Lines of the demo's text, to go on with one's own next line or one of other places."""
    import random

    rng = random.Random(5)
    lines = [line.strip() for line in TEXT.read_text("utf-8").splitlines()]
    spoken = [i for i, line in enumerate(lines[:-1]) if len(line) > 25 and len(lines[i + 1]) > 15]
    found = []
    for i in sorted(rng.sample(spoken, N_ENDINGS)):
        answer = rng.randrange(4)
        endings = [lines[j + 1] for j in rng.sample(spoken, 3)]
        endings.insert(answer, lines[i + 1])
        found.append({"ctx": lines[i], "endings": endings, "label": str(answer)})
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in found + OTHERS]
    QUESTIONS.write_text("".join(rows), "utf-8")


def read():
    """(prompt, choices, number of the right one) of each question."""
    rows = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    for row in rows:
        if "ctx" in row:
            yield row["ctx"], row["endings"], int(row["label"])
            continue
        choices, answer = row["choices"], row["answer"]
        if isinstance(answer, str):
            known = choices if answer in choices else "ABCDE" if answer.isalpha() else "01234"
            answer = known.index(answer)
        yield row["question"], choices, answer


# -- llama.cpp ----------------------------------------------------------------------------------


def tasks(rows):
    """The bytes of llama-perplexity's --multiple-choice: each question's mc1; mc2 is empty."""

    def text(value):
        data = value.encode()
        return struct.pack("<I", len(data)) + data

    def answers(choices, right):
        labels = [int(i == right) for i in range(len(choices))]
        listed = b"".join(map(text, choices))
        return struct.pack("<I", len(choices)) + listed + struct.pack(f"<{len(labels)}i", *labels)

    made = [text(q) + answers(choices, right) + answers([], -1) for q, choices, right in rows]
    places, at = [], 4 + 4 * len(made)
    for one in made:
        places.append(at)
        at += len(one)
    return struct.pack("<I", len(made)) + struct.pack(f"<{len(made)}I", *places) + b"".join(made)


def run(program, model, *options):
    words = [program, "-m", model, "-c", "512", "-b", "2048", "-t", "2", "-np", "8", *options]
    ended = subprocess.run(words, capture_output=True, check=True)
    return (ended.stdout + ended.stderr).decode("utf-8", "replace")


def llama(program, model):
    """Of all questions which are right; of those with four endings also the score and interval."""
    rows = list(read())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.bin"
        file.write_bytes(tasks(rows))
        said = run(program, model, "--multiple-choice", "-bf", str(file))
        shares = re.findall(r"^(\d+)\t(\d+\.\d{8})$", said, re.M)
        n_right = [round(float(share) * int(n) / 100) for n, share in shares]
        four = [row for row in rows if len(row[1]) == 4][:N_ENDINGS]
        lines = [
            f"{q}\n{right}\n" + "".join(f"{c}\n" for c in choices) for q, choices, right in four
        ]
        file = Path(folder) / "hellaswag.txt"
        file.write_text("".join(lines), "utf-8")
        said = run(program, model, "--hellaswag", "-f", str(file))
    last = re.findall(r"^\d+\t([\d.]+)%\t\[([\d.]+)%, ([\d.]+)%\]", said, re.M)[-1]
    return {
        "right": [b - a for a, b in zip([0, *n_right], n_right, strict=False)],
        "hellaswag": [float(x) for x in last],
    }


# -- lm-evaluation-harness ----------------------------------------------------------------------


def harness(model):
    import torch
    from datasets import Dataset
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**where)
    config.head_dim = 64  # transformers does not read it from the file
    twin = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.float32)
    lm = HFLM(twin, tokenizer=AutoTokenizer.from_pretrained(**where), batch_size=4, device="cpu")

    names = ("q", "choices", "gold")
    test = Dataset.from_list([dict(zip(names, row, strict=True)) for row in read()])
    settings = {
        "task": "questions",
        "custom_dataset": lambda **_: {"test": test},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    }
    task = ConfigurableTask(config=settings)
    found = simple_evaluate(lm, tasks=[task], log_samples=True, bootstrap_iters=10)
    samples = sorted(found["samples"]["questions"], key=lambda s: s["doc_id"])
    total = found["results"]["questions"]
    measures = ("acc", "acc_norm", "acc_bytes")
    return {
        "log_probs": [[round(r[0][0], 4) for r in s["resps"]] for s in samples],
        **{name: [int(s[name]) for s in samples] for name in measures},
        "stderr": {name: total[f"{name}_stderr,none"] for name in measures},
    }


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    made = {"questions": questions, "llama": llama, "harness": harness}[what](*words)
    if made is not None:
        kept = json.loads(SCORES.read_text("utf-8")) if SCORES.exists() else {}
        SCORES.write_text(json.dumps(kept | {what: made}, indent=1) + "\n", "utf-8")
