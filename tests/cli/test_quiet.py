"""--quiet leaves results alone; what needs no output asks for none, and folders are made."""

import re

import pytest

from pyggml.cli import __main__ as cli


def test_quiet_training_prints_results_alone(finetune, tmp_path):
    loud, quiet = finetune(), finetune("--quiet")
    assert (loud.code, quiet.code, quiet.err) == (0, 0, "")
    lines = [line.split()[0] for line in quiet.out.splitlines() if line.strip()]
    assert lines == ["result", "adapter", "report"]
    for word in ("model ", "memory", "step 1", "-- before"):
        assert word in loud.out and word not in quiet.out


def test_quiet_training_still_warns(finetune, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the path to the other thing"}\n' * 20 + "nonsense\n")
    ended = finetune("-q", "--skip-bad-rows", data=rows)
    assert ended.code == 0 and ended.row("skipped").startswith("rows.jsonl: 1 bad row")


def test_quiet_does_not_outlive_its_command(pyggml, tiny, text):
    quiet = pyggml("perplexity", "-m", tiny, "-f", text, "--ctx", 32, "--quiet")
    loud = pyggml("perplexity", "-m", tiny, "-f", text, "--ctx", 32)
    assert quiet.out == loud.out.splitlines()[-1] + "\n" and quiet.err == ""
    assert loud.out.startswith("[1]") and "chunks of 32 tokens" in loud.err


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "MODEL", "OUT", "Q8_0"),
        ("imatrix", "-m", "MODEL", "-f", "TEXT", "-o", "OUT", "--ctx", 32),
        ("eval", "-m", "MODEL", "-f", "TEXT", "--ctx", 32),
    ],
    ids=lambda command: command[0],
)
def test_quiet_keeps_the_result(pyggml, tiny, text, tmp_path, command):
    names = {"MODEL": tiny, "TEXT": text, "OUT": tmp_path / "new" / "out.gguf"}
    words = [names.get(word, word) for word in command]
    loud = pyggml(*words)
    quiet = pyggml(*words, "--quiet")
    assert (loud.code, quiet.code, quiet.err) == (0, 0, "")
    kept = [line for line in loud.out.splitlines() if not re.match(r"\[ *\d+/", line)]
    assert quiet.out.splitlines() == kept != []


def test_every_command_has_quiet():
    for name in cli.COMMANDS:
        assert any("--quiet" in o.opts for o in cli.command(name).params), name


def test_a_preview_and_a_dry_run_need_no_output(pyggml, tiny, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ("finetune", "-m", tiny, "-f", text, "--ctx", 16)
    seen = pyggml(*common, "--preview", 2)
    assert seen.code == 0 and seen.out.count("-- sample ") == 2 and "step 1" not in seen.out
    plan = pyggml(*common, "--dry-run")
    assert plan.code == 0 and "nothing was written" in plan.out
    assert list(tmp_path.iterdir()) == []
    refused = pyggml(*common)
    assert refused.code == 2 and "wanted -o ADAPTER.gguf" in refused.err


def test_the_folder_of_an_output_is_made_and_told(finetune, tmp_path):
    out = tmp_path / "a" / "b" / "adapter.gguf"
    dry = finetune("--dry-run", output=out)
    assert dry.code == 0 and not (tmp_path / "a").exists()
    ended = finetune(output=out)
    assert ended.code == 0 and f"{out.parent}: folder created" in ended.err and out.exists()


def test_a_folder_for_an_output_that_is_refused_is_taken_back(pyggml, tiny, tmp_path):
    q8, out = tmp_path / "q8.gguf", tmp_path / "new" / "deep" / "out.gguf"
    assert pyggml("quantize", tiny, q8, "Q8_0").code == 0
    ended = pyggml("quantize", q8, out, "Q4_0")
    assert ended.code == 2 and "requantize" in ended.err and not (tmp_path / "new").exists()
    assert "created" not in ended.err
