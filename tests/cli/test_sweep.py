"""Fine-tunes that differ in some settings, made once each, and compared."""

import json
import re
import sys
from dataclasses import fields

import click
import pytest
from extras import need

from pyggml.cli import __main__ as cli
from pyggml.cli.commands.finetune.job import SETTINGS_FLAGS
from pyggml.cli.terminal.options import ListType
from pyggml.lora.trainer import lock

LISTS = ("--lr", "1e-3,1e-2", "--lora-rank", "2,3")
NAMES = [f"lr-{lr}_lora-rank-{rank}" for lr in ("0.001", "0.01") for rank in (2, 3)]


@pytest.fixture
def sweep(pyggml, tiny, text, tmp_path):
    """Runs a short `pyggml sweep` over the tiny model."""

    def call(*arguments, folder=tmp_path / "runs", data=text):
        short = ("-m", tiny, "-f", data, "-o", folder, "--ctx", 16, "--max-steps", 6)
        return pyggml("sweep", *short, "--val-every", 2, "--prompt", "the ", *arguments)

    return call


def table(ended):
    """The lines of the table, as lists of cells."""
    lines = ended.out.splitlines()
    first = next(i for i, line in enumerate(lines) if re.match(r"(lr|lora_rank|objective) ", line))
    found = []
    for line in lines[first:]:
        if line.startswith(("best ", "note ", "page ")):
            break
        found.append(re.split(r"  +", line))
    return found


def test_every_combination_is_made_once_and_the_best_is_first(sweep, tmp_path):
    folder = tmp_path / "runs"
    ended = sweep(*LISTS)
    assert (ended.code, ended.err) == (0, "")
    head, *lines = table(ended)
    assert head[:5] == ["lr", "lora_rank", "loss", "best", "steps"]
    assert sorted((line[0], line[1]) for line in lines) == [
        (lr, rank) for lr in ("0.001", "0.01") for rank in "23"
    ]
    losses = [float(line[2]) for line in lines]
    assert losses == sorted(losses) and len(set(losses)) == 4 and lines[0][0] == "0.01"
    assert {(line[4], line[6]) for line in lines} == {("6", "finished")}
    best = f"lr {lines[0][0]}, lora_rank {lines[0][1]}"
    assert ended.row("best").startswith(f"{best}: {folder}")
    for name in NAMES:
        for ending in (".gguf", ".html", ".log", ".metrics.jsonl", ".yaml", ".result.json"):
            assert (folder / f"{name}{ending}").is_file()
        assert not (folder / f"{name}.points").exists()
    held_out = (folder / f"{NAMES[0]}.metrics.jsonl").read_text().splitlines()
    last = [json.loads(x)["loss"] for x in held_out if '"event": "validation"' in x][-1]
    assert f"{last:.4f}" in {line[2] for line in lines}
    check_page(folder / "sweep.html", lines)
    again = sweep(*LISTS)
    assert again.code == 0 and "run 1 of" not in again.out and table(again) == table(ended)
    (folder / f"{NAMES[0]}.result.json").write_text("[" * 200_000)  # not ours: made anew
    assert "run 1 of 4" in sweep(*LISTS).out
    more = sweep("--lr", "1e-3,1e-2,3e-2", "--lora-rank", "2,3")
    assert more.out.count("finished: loss") == 2 and len(table(more)) == 7


def check_page(path, lines):
    """It has the table and the curves."""
    page = path.read_text()
    rows = re.findall(r"<tr><td>(.*?)</tr>", page)
    assert [re.split("</td><td>", row)[:3] for row in rows] == [cells[:3] for cells in lines]
    assert all(f'href="{name}.html"' in page for name in NAMES)
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', page)[1])
    assert [c["title"] for c in charts][:2] == ["Loss", "Validation loss"]
    assert {s["role"] for s in charts[0]["series"]} == {f"run{i}" for i in range(4)}
    assert re.search(r"--run3: #", page), "colours of the lines"


def test_a_stopped_sweep_goes_on_bit_for_bit(sweep, signal_after, tmp_path):
    whole = sweep("--lr", "1e-3,1e-2", folder=tmp_path / "whole")
    assert whole.code == 0
    signal_after(2)
    stopped = sweep("--lr", "1e-3,1e-2")
    assert stopped.code == 130
    assert [line[-1] for line in table(stopped)[1:]] == ["stopped", "waiting"]
    assert ended_command(stopped).startswith("pyggml sweep ")
    assert sweep("--lr", "1e-3,1e-2").code == 130, "the second run has a step 2 too"
    ended = sweep("--lr", "1e-3,1e-2")
    assert ended.code == 0 and [line[-1] for line in table(ended)[1:]] == ["finished"] * 2
    for name in ("lr-0.001", "lr-0.01"):
        one, other = (tmp_path / f / f"{name}.gguf" for f in ("whole", "runs"))
        assert one.read_bytes() == other.read_bytes()


def ended_command(ended):
    return ended.row("left").partition("; ")[2]


def test_a_run_that_another_process_has_is_left_to_it(sweep, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with lock.hold(folder / "lr-0.001"):
        ended = sweep("--lr", "1e-3,1e-2")
    assert ended.code == 0 and ended.out.count("finished: loss") == 1
    assert [line[-1] for line in table(ended)[1:]] == ["finished", "running"]
    assert ended.row("left") == "1 run of another process, under way"


def test_a_run_that_fails_is_last_and_says_why(sweep):
    ended = sweep("--lr", "10,1e-3", "--clip", 0, "--lora-alpha", 1e5, "--optimiser", "lion",
                  "--max-steps", 30)  # fmt: skip
    assert ended.code == 0
    _, first, last = table(ended)
    assert (first[0], last[0]) == ("0.001", "10")
    assert last[-1].startswith("failed: step ") and "the loss is " in last[-1]
    assert len(last[-1]) < 90


def test_what_all_runs_would_fail_with_ends_the_sweep(sweep, tmp_path):
    ended = sweep("--lr", "1e-3,1e-2", "--lora-modules", "attn_x")
    assert ended.code == 2 and "attn_x" in ended.err
    assert sweep("--lr", "1e-3,1e-2").code == 0, "a folder without runs takes other settings"


def test_runs_of_other_settings_do_not_mix(sweep):
    assert sweep("--lr", "1e-3,1e-2").code == 0
    ended = sweep("--lr", "1e-3,1e-2", "--max-steps", 7)
    assert ended.code == 2
    assert "holds runs of other settings (max_steps 6 there, 7 here): name another" in ended.err


BAD = [
    ((), "no setting has several values: wanted a list, such as --lr 1e-4,3e-4"),
    (("--lr", "1e-3,20"), "lr-20: --lr is 20.0, wanted above 0, at most 10"),
    (("--lr", "1e-3,x"), "Invalid value for '--lr': 'x' is not a valid float."),
    (("--seed", ",".join(map(str, range(40))), "--lora-rank", ",".join(map(str, range(1, 30)))),
     "these lists make 1,160 runs, wanted at most 1,000"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("given", "sentence"), BAD, ids=[s[:20] for _, s in BAD])
def test_what_is_wrong_is_said_before_the_first_run(sweep, tmp_path, given, sentence):
    ended = sweep(*given)
    assert ended.code == 2 and sentence in ended.err and not (tmp_path / "runs").exists()


FAULTY = [
    ("lr: []", "line 1: lr is [], wanted a value, or a list of values; no setting has several"),
    ("lr: [fast, 1]", "line 1: lr is ['fast', 1], wanted numbers; no setting has several"),
    ("seed: [1, 2.5]", "line 1: seed is [1, 2.5], wanted a whole number"),
    ("seed: [1, 2]\nhalving: 1", "line 2: halving is 1, wanted a whole number, 2 or more"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("text", "sentence"), FAULTY)
def test_what_is_wrong_in_a_file_is_said_with_its_line(sweep, tmp_path, text, sentence):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    ended = sweep("--config", path)
    assert ended.code == 2 and f"{path}: {sentence}" in ended.err
    assert not (tmp_path / "runs").exists()


def test_lists_stand_in_a_file_of_settings(sweep, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("lr: [1e-3, 1e-2]\nlora_rank: 2\n")
    ended = sweep("--config", path)
    assert ended.code == 0 and len(table(ended)) == 3


def test_losses_that_do_not_compare_are_noted(sweep, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "the ", "chosen": f"path {i}", "rejected": "other"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = sweep("--objective", "dpo,ipo", "--max-steps", 1, "--val-every", 0, data=path)
    assert ended.code == 0, ended.err
    assert ended.row("note").endswith("of one, do not compare: objective")


@pytest.mark.quick
def test_a_fine_tune_with_a_list_is_told_of_the_sweep(finetune):
    ended = finetune("--lr", "1e-3,1e-2")
    assert ended.code == 2 and ended.err.endswith("for each of several values.\n")
    assert "pyggml sweep" not in finetune("--lr", "x").err
    assert "pyggml sweep" not in finetune("--max-memory", "lots").err  # what is wanted has a comma
    assert "800MB. `pyggml sweep`" in finetune("--max-memory", "1GB,2GB").err


@pytest.mark.quick
def test_all_settings_of_finetune_are_options_here():
    ours = {o.name: o for o in cli.command("sweep").params}
    theirs = {o.name: o for o in cli.command("finetune").params}
    own = {"resume", "checkpoint_dir", "preview", "dry_run", "ranks"}
    assert theirs.keys() - ours.keys() == own
    names = {k.get(f.name, f.name) for kind, k in SETTINGS_FLAGS.items() for f in fields(kind)}
    for name in names & ours.keys():
        if theirs[name].type in (click.INT, click.FLOAT):
            assert isinstance(ours[name].type, ListType), name
            assert not isinstance(theirs[name].type, ListType)


# -- successive halving -------------------------------------------------------------------------


def test_hopeless_runs_end_early(sweep):
    need("optuna")
    ended = sweep("--lr", "1e-2,1e-4,3e-2", "--halving", 2)
    assert (ended.code, ended.err) == (0, "")
    by_lr = {line[0]: (line[3], line[-1]) for line in table(ended)[1:]}
    assert by_lr["0.0001"] == ("2", "ended early")
    assert by_lr["0.01"] == ("6", "finished")
    again = sweep("--lr", "1e-2,1e-4,3e-2", "--halving", 2)
    assert again.code == 0 and "run 1 of" not in again.out


def test_halving_remembers_the_runs_of_before(sweep):
    need("optuna")
    assert sweep("--lr", "1e-2,2e-2", "--halving", 2).code == 0
    ended = sweep("--lr", "1e-2,2e-2,1e-4", "--halving", 2)
    assert table(ended)[-1][-1] == "ended early"


def test_halving_wants_validations_on_the_way(sweep):
    need("optuna")
    ended = sweep("--lr", "1e-2,1e-3", "--halving", 2, "--val-every", 6)
    assert ended.code == 2
    assert "--halving wants validations on the way: val_every is 6 of 6 steps" in ended.err


def test_without_optuna_there_is_no_halving(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    ended = sweep("--lr", "1e-2,1e-3", "--halving", 2)
    assert ended.code == 2 and "--halving needs the package optuna: pip install " in ended.err
