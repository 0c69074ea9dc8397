"""`--objective`: from a file of preferences to an adapter, as a user would."""

import json
import re

import pytest

from pyggml import gguf
from pyggml.lora.objectives import OBJECTIVES

PAIRS = [
    {"prompt": f"{name}? ", "chosen": f"the {name}", "rejected": f"no {name[::-1]}"}
    for name in ("ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen")
]
ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
    for pair in PAIRS
    for name in ("chosen", "rejected")
]
LONGER = ("--ctx", 48, "--max-steps", 0, "--epochs", 6, "--lr", 0.01, "--warmup-steps", 1)


@pytest.fixture
def rows(tmp_path):
    def make(records):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
        return path

    return make


@pytest.mark.parametrize("kind, records", [("dpo", PAIRS), ("kto", ANSWERS)])
def test_preferences_become_an_adapter(kind, records, rows, tmp_path, finetune):
    ended = finetune("--objective", kind, *LONGER, data=rows(records))
    assert ended.code == 0, ended.err
    rewards = re.findall(r"chosen ([-+][\d.]+)  rejected ([-+][\d.]+)  \d+ % right", ended.out)
    margins = [float(chosen) - float(rejected) for chosen, rejected in rewards]
    assert len(margins) > 2 and margins[-1] > margins[0] + 0.01
    with gguf.open(tmp_path / "adapter.gguf") as file:
        assert file.get("general.type") == "adapter"
    assert f'objective: "{kind}"' in (tmp_path / "adapter.yaml").read_text("utf-8")


@pytest.mark.parametrize("kind, records", [("orpo", PAIRS), ("kto", ANSWERS)])
def test_a_model_that_was_written_is_validated(kind, records, rows, tmp_path, finetune):
    ended = finetune(
        *("--objective", kind, *LONGER, "--dora", "--val-split", 0.25, "--val-every", 4),
        data=rows(records),
        output=tmp_path / "model.gguf",
    )
    assert ended.code == 0, ended.err
    file, trained = map(float, re.findall(r"[\d.]{5,}", ended.row("file")))
    assert file == pytest.approx(trained, abs=5e-3)
    first, last = map(float, re.findall(r"validation ([\d.]+) → ([\d.]+)", ended.out)[-1])
    assert trained == last and abs(file - last) < abs(file - first)


def test_messages_are_rendered(rows, finetune, model_with):
    """And of the text that the template makes, the answers and what ends them are learned."""
    said = [
        {
            "prompt": [{"role": "user", "content": "a"}],
            "chosen": [{"role": "assistant", "content": "yes" + "!" * i}],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for i in range(2)
    ]
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<|endoftext|>{% endfor %}"
    template += "{% if add_generation_prompt %}a{% endif %}"
    model = model_with(tokenizer__chat_template=template)
    ended = finetune("--objective", "dpo", "--val-split", 0, data=rows(said), model=model)
    assert ended.code == 0, ended.err
    assert ": 15 tokens to learn" in ended.row("data"), "yes, no, yes!, no and four ends"


def test_an_adapter_to_go_on_from_is_the_reference(rows, tmp_path, finetune, pyggml, tiny):
    """Were it the base, the first margin would not be 0."""
    data, first, second = rows(PAIRS), tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert finetune("--objective", "dpo", *LONGER, data=data, output=first).code == 0
    given = ("-m", tiny, "--init", first, "-f", data, "-o", second, "--prompt", "the ")
    ended = pyggml("finetune", *given, "--objective", "dpo", "--ctx", 48)
    assert ended.code == 0, ended.err
    assert re.search(
        r"step 1/\d+  loss 0\.693\d  chosen [-+]0\.000  rejected [-+]0\.000  ", ended.out
    ), ended.out


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--objective", "dpo"],
            "line 1 has prompt and completion and label, which --objective kto",
        ),
        (
            ["--preference-beta", "0.3"],
            "--preference-beta is for dpo, orpo, kto, simpo and ipo, not for",
        ),
        (
            ["--objective", "ppo"],
            "--objective is 'ppo', wanted one of sft, .*dpo, orpo, kto, simpo, ipo, ",
        ),
    ],
)
def test_what_does_not_fit_is_said(options, message, rows, tmp_path, finetune):
    ended = finetune(*options, data=rows(ANSWERS))
    assert ended.code == 2 and re.search(message, ended.err), ended.err
    assert not (tmp_path / "adapter.gguf").exists()


def test_pairs_stay_whole_so_packing_stays_on(finetune, rows):
    ended = finetune("--objective", "dpo", "--no-packing", data=rows(PAIRS))
    assert ended.code == 2 and "--packing is False, but dpo keeps whole" in ended.err


def test_help_tells_of_all(pyggml):
    text = " ".join(pyggml("finetune", "--help-all").out.split())
    for name, kind in OBJECTIVES.items():
        assert f"{name} {kind.purpose}" in text
    assert "default: 2.0 of simpo, else 0.1" in text
