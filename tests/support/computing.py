"""Every command that computes with a model's weights, in the ways in which it does."""

import json

CHOICES = {"question": "the path to", "choices": ["the thing", "the path"], "answer": 0}
PAIR = {"prompt": "the", "chosen": " path", "rejected": " thing"}
COMPUTE = {
    "finetune": "-m MODEL -f TEXT -o OUT --max-steps 2 --ctx 32 --val-split 0",
    "finetune, checked": "-m MODEL -f TEXT -o OUT --max-steps 2 --ctx 32",
    "finetune, previewed": "-m MODEL -f TEXT -o OUT --preview 2 --ctx 32",
    "generate": "-m MODEL -p the",
    "generate, sampled": "-m MODEL -p the --temp 1 --repeat-penalty 1.2",
    "generate, told": "-m MODEL -p the --logprobs 2",
    "generate, json": "-m MODEL -p the --json",
    "perplexity": "-m MODEL -f TEXT --ctx 32",
    "perplexity of rows": "-m MODEL -f ROWS --ctx 32",
    "eval": "-m MODEL -f TEXT",
    "eval, json": "-m MODEL -f TEXT --json",
    "eval of rows": "-m MODEL -f ROWS",
    "eval of questions": "-m MODEL -f QUESTIONS",
    "eval of pairs": "-m MODEL -f PAIRS",
    "imatrix": "-m MODEL -f TEXT -o OUT --ctx 32",
    "chat": "-m MODEL --chat-template chatml",
    "compare": "MODEL MODEL -f TEXT --ctx 16",
    "control-vector": "-m MODEL --positive-file TEXT --negative-file ROWS -o OUT",
    "embed": "-m MODEL -p the --pooling mean",
    "teach": "-m MODEL -f TEXT -o OUT --ctx 32",
    "heal": "--from MODEL -m MODEL -f TEXT -o OUT --max-steps 2 --ctx 32",
    "ablate": "-m MODEL --heads 0.0 --neurons 1.1 -o OUT",
}
# Of these no number comes out that is none, or none is asked of the weights.
OTHERS = {
    "sweep": "a run that ends so is a row of its table that says why: tests/cli/test_sweep.py",
    "serve": "status 500 with the sentence: below",
    "view": "what is no number is shown as that",
    "inspect": "what is no number is shown as that",
    "merge": "refuses by the tensor: tests/requantize, tests/lora/adapter",
    "quantize": "refuses by the tensor: tests/requantize",
    "combine": "adapters are read as elsewhere, and none computes",
    "extract": "refuses by the tensor: tests/cli/test_extract.py",
    "convert-lora": "copies numbers",
    "export-ollama": "copies files",
    "warmup": "reads no model",
    "tokenizer": "reads a text alone",
    "new": "draws its numbers",
}


def words(name, files):
    """The command line of one of them; files: what MODEL, TEXT and so on are."""
    command = name.partition(",")[0].partition(" of ")[0]
    return [command, *(files.get(word, word) for word in COMPUTE[name].split())]


def data_files(text, folder):
    """TEXT, OUT, ROWS, QUESTIONS and PAIRS."""
    made = {"TEXT": text, "OUT": folder / "out.gguf"}
    for name, row in {"ROWS": {"text": "the path"}, "QUESTIONS": CHOICES, "PAIRS": PAIR}.items():
        made[name] = folder / f"{name.lower()}.jsonl"
        made[name].write_text((json.dumps(row) + "\n") * 12)
    return made
