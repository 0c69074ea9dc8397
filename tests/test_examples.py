"""The examples run, the demo's files are there and fit together."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.cli import demo
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, attach, loss_and_grads, read_corpus
from pyggml.lora.data import Schema, read_rows

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = "--vocab 300 --width 32 --layers 1 --ff 32 --head 16 --ctx 16 --batch 2 --steps 6 --lr 0.02"


def example(name):
    """The example's names, without running its main."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def excerpt():
    return demo.TEXT.read_text(encoding="utf-8")[:6000]


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory, excerpt):
    """(extra arguments) -> path of the model that a very short run on the excerpt makes."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text.txt").write_text(excerpt, encoding="utf-8")
    main = example("pretrain")["main"]

    def run(name, *extra):
        main([str(folder / "text.txt"), "-o", str(folder / name), *TINY.split(), *extra])
        return folder / name

    return run


def test_walkthrough_shows_every_stage(capsys):
    example("walkthrough")["main"]()
    shown = capsys.readouterr().out
    assert re.findall(r"^(\d)  ", shown, re.M) == list("12345678")
    compared = re.search(r"length (\S+), finite difference (\S+)$", shown, re.M)
    slope, difference = map(float, compared.groups())
    assert difference == pytest.approx(slope, rel=0.02) and slope > 0
    losses = [float(n) for n in re.findall(r"step +\d+: loss ([\d.]+)", shown)]
    assert len(losses) == 10 and losses[-1] < losses[0] - 1
    assert float(re.search(r"differ by (\S+) at most", shown)[1]) == 0


def test_pretrain_makes_a_model_of_its_own_vocabulary(pretrain, excerpt, capsys):
    model = pyggml.load(pretrain("quantised.gguf"))
    shown = capsys.readouterr().out
    held_out = [float(n) for n in re.findall(r"held-out loss ([\d.]+)", shown)]
    assert len(held_out) == 2 and held_out[1] < held_out[0]
    assert (model.config.n_vocab, model.config.n_embd, model.config.n_layer) == (300, 32, 1)
    assert model.parts.weights["blk.0.ffn_up.weight"].dtype.name == "Q8_0"
    ids = model.tokenizer.encode(excerpt + " é £ 𝄞\x00")
    assert len(ids) < len(excerpt) and model.tokenizer.decode(ids) == excerpt + " é £ 𝄞\x00"
    assert len(list(pyggml.generate(model, ids[:5], 4))) == 4


def test_pretrain_keeps_the_weights_that_did_best(pretrain):
    """At a learning rate at which it only gets worse, those are the first ones."""
    started, trained = (
        pyggml.load(pretrain(f"{lr}.gguf", "--type", "F32", "--lr", lr)).parts.weights
        for lr in ("1", "0.001")
    )
    assert np.array_equal(started["output_norm.weight"].data, np.ones(32, np.float32))
    assert started.keys() == trained.keys()
    for name, t in trained.items():
        assert not np.array_equal(t.data, started[name].data), name


def test_the_demo_has_its_files():
    demo.check()
    assert demo.BASE.stat().st_size <= 3_000_000
    text = demo.TEXT.read_text(encoding="utf-8")
    assert 150_000 <= len(text) <= 250_000
    assert re.match(r"[A-Z ]+:\n", text), "starts with a speaker"


def test_the_demo_base_knows_prose():
    model = pyggml.load(demo.BASE)
    prose = '"I have no doubt that you are right," said he, and he looked at me with a smile.'
    ids = model.tokenizer.encode(prose)
    adapter = attach(model, LoraConfig(rank=1))
    loss, _ = loss_and_grads(adapter.model, ids)
    assert adapter.pairs and loss * (len(ids) - 1) / len(prose) < 1.5  # nats a byte: 5.5 by chance
    text = model.tokenizer.decode(pyggml.generate(model, ids, 40))
    assert len(re.findall(r"\b(?:the|and|to|of|I|he|that|was|in|it)\b", text)) >= 3


def test_the_demo_settings_fit_its_model():
    model = pyggml.load(demo.BASE)
    data, train = DataConfig(**demo.DEMO_DATA), TrainConfig(**demo.DEMO_TRAIN)
    assert attach(model, LoraConfig(**demo.DEMO_LORA)).parameters.n_trained > 0
    corpus = read_corpus(demo.TEXT, model.tokenizer, data)
    assert data.ctx <= model.config.n_ctx
    assert len(corpus.train) >= train.windows_per_step and len(corpus.validation) > 0
    assert model.tokenizer.encode(demo.PROMPT)


def test_persona_asks_what_its_chats_do_not(tmp_path, capsys):
    names, folder = example("persona/ask"), EXAMPLES / "persona"
    asked = {
        name: [m[-1]["content"] for m in names["questions"](folder / f"{name}.jsonl")]
        for name in ("chats", "held-out")
    }
    assert [len(asked["chats"]), len(asked["held-out"])] == [135, 17]
    assert not {*asked["chats"]} & {*asked["held-out"]}

    adapter = tmp_path / "adapter.gguf"
    attach(pyggml.load(demo.BASE), LoraConfig(rank=2)).save(adapter)
    words = ["-m", demo.BASE, "--lora", adapter, "--chat-template", "alpaca", "--limit", 2]
    few = tmp_path / "few.jsonl"
    few.write_text((folder / "held-out.jsonl").read_text().splitlines()[0])
    names["main"]([str(word) for word in [*words, "--file", few]])
    shown = capsys.readouterr().out
    before, after = re.findall(r"^  (?:before|after) +(.*)$", shown, re.M)
    assert before == after and before.endswith("(cut at the limit)")  # B is zero
    assert shown.count("0 of 1 end by themselves, 0 say friend") == 2


def test_pubmedqa_s_halves_share_no_question(shared, tmp_path, capsys):
    """Rows and questions of the same 500, read by training and by eval; the other 500 to learn."""
    names = example("pubmedqa/prepare")
    names["main"]([str(shared / "data/pubmedqa-labeled.json"), "-o", str(tmp_path)])
    assert capsys.readouterr().out.count("500 rows") == 3
    train, held_out = (read_rows(tmp_path / f"{n}.jsonl")[1] for n in ("train", "held-out"))
    asked, others = ({row.prompt for row in rows} for rows in (train, held_out))
    assert len(asked) == len(others) == 500 and not asked & others
    questions = read_rows(tmp_path / "questions.jsonl", Schema("question"))[1]
    assert [f" {q.choices[q.answer]}" for q in questions] == [row.completion for row in held_out]
    assert {q.prompt for q in questions} == others
    assert (tmp_path / "held-out.txt").read_text("utf-8").count("\nAnswer:") == 500
