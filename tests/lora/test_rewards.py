"""Rewards: answers are the model's own, faults of functions are told by row, and such runs are runs
like any other. That losses are the formulas' is held in test_parity.py."""

import dataclasses
import json
import time

import numpy as np
import pytest
from guides import blocks_of
from tiny_models import END, TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml.errors import CheckpointError, ConfigError, DataError, PyggmlError
from pyggml.generation import Batch
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, Trainer, ValidationReport, attach
from pyggml.lora import corpus as corpus_of_rows
from pyggml.lora.data import PromptRow, RowPlace
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.choice import objective_of
from pyggml.lora.ranks import ALONE
from pyggml.lora.ranks.alone import Ranks
from pyggml.lora.rollouts.rewards import Reward, RewardFault, advantages, totals
from pyggml.lora.rollouts.sampling import GroupSampler

from runs import state, steps

CTX, MOST = 40, 8
PROMPTS = [{"prompt": "ab" * (1 + i % 3) + str(i), "n": i} for i in range(10)]
PLACE = RowPlace("p.jsonl", "line", 3)


def vowels(completion, n):
    """Some answers earn more than others."""
    return sum(map(ord, completion)) % 7 + n / 10


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_llama(path, len(TOKENS), n_layer=2, seed=1, keys=VOCABULARY)


@pytest.fixture
def trainer_of(path):
    """(kind, settings of the objective, **train settings) -> a trainer whose adapter changes
    something."""

    def make(kind="grpo", objective=None, rows=PROMPTS, **settings):
        settings = {"lr": 0.02, "warmup_steps": 1, "batch": 2, "max_steps": 4, **settings}
        model = pyggml.load(path, compute="f32")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
        for pair in adapter.pairs.values():
            pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        usual = {"answers": 4, "answer_tokens": MOST, "reward": (vowels,)}
        chosen = OBJECTIVES[kind](**usual | (objective or {}))
        data = DataConfig(ctx=CTX, val_split=0.2)
        corpus = corpus_of_rows(rows, model, data, purpose=chosen.rows)
        run = (adapter.model, adapter.parameters, corpus, TrainConfig(**settings), chosen)
        return Trainer(*run, reference=model)

    return make


def log_softmax(logits):
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


# -- sampling -----------------------------------------------------------------------------------


def test_answers_are_the_model_s_with_their_log_probabilities(trainer_of, monkeypatch):
    model, prompt, n_read = trainer_of().model, np.array([3, 1, 4, 1, 5], np.int32), []

    def feed(batch, pieces, every=(), whole=Batch.feed):
        n_read.append(sum(map(len, pieces.values())))
        return whole(batch, pieces, every)

    monkeypatch.setattr(Batch, "feed", feed)
    sampler = GroupSampler(model, 6, CTX, MOST, temperature=0.6)
    answers = sampler.sample(prompt, range(6))
    assert n_read[:2] == [5, 6], "the prompt is read once, then a token of each"
    assert len({a.ids.tobytes() for a in answers}) == 6
    for answer in answers:
        whole = log_softmax(model.logits([*prompt, *answer.ids]) / 0.6)
        places = np.arange(len(prompt) - 1, len(prompt) - 1 + len(answer))
        np.testing.assert_allclose(answer.log_probs, whole[places, answer.ids], atol=2e-5)
        assert len(answer) <= MOST and answer.is_cut == (answer.ids[-1] != END)
        assert END not in answer.ids[:-1]
    sampler.sample(prompt[:2], [9])
    again = sampler.sample(prompt, range(6))
    assert [a.log_probs.tobytes() for a in again] == [a.log_probs.tobytes() for a in answers]


def test_answers_follow_the_adapter_as_it_trains(trainer_of):
    trainer = trainer_of(max_steps=2)
    trainer.run(progress=False)
    lesson = trainer.losses.practice.lesson(
        5, trainer.corpus.train, np.array([0, 1]), trainer.ranks, trainer.passes.arenas
    )
    trainer.losses.over(lesson.dataset, lesson.windows, alone=True)
    batches = trainer.losses.feed.batches((), lesson.dataset, lesson.windows, trainer.ranks)
    *_, last = batches
    read = last.read > 0
    ours = trainer.passes.outputs["log_probs"][read]
    np.testing.assert_allclose(ours, last.sampled[read], atol=2e-5)
    assert read.any()


def test_advantages_are_those_of_the_group():
    rewards = np.array([1.0, 2.0, 6.0, np.nan])
    spread = np.std(rewards[:3], ddof=1)
    above = np.array([-2.0, -1.0, 3.0, 0.0])
    np.testing.assert_allclose(advantages(rewards, scaled=True), above / (spread + 1e-4))
    np.testing.assert_allclose(advantages(rewards, scaled=False), above)
    assert not advantages(np.ones(3), scaled=True).any()
    marks = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(totals(marks, (1.0, 0.5)), [2.0, 1.5, np.nan])


# -- functions ----------------------------------------------------------------------------------

FILE = """
import time
def length(completion): return len(completion)
def near(completion, prompt, answer, **others): return (prompt, completion, answer, *others)
def trl(prompts, completions, answer, **others): return [len(completions[0]) + answer[0]]
def chat(completions): return [completions[0][0]["content"] == "hello"]
def unjudged(completion): return None
def raises(completion): return 1 / 0
def nan(completion): return float("nan")
def huge(completion): return 10**400
def word(completion): return "1"
def lists(completion): return [1.0]
def none(completions): return []
def two(completions): return [1.0, 2.0]
def bare(completions): return 1.0
def ends(completion): raise SystemExit("two\\nlines")
def sleeps(completion):
    try:
        time.sleep(0.2)
    except Exception:
        return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "r.py"
    path.write_text(FILE)
    return path


def test_a_function_gets_what_it_asks_for(file):
    row = PromptRow(PLACE, "how?", columns={"question": "how?", "answer": 7})

    def reward(name, row=row):
        return Reward.of(f"{file}:{name}")(row, "hello")

    assert reward("length") == 5 and np.isnan(reward("unjudged"))
    assert reward("trl") == 12
    messages = ({"role": "user", "content": "how?"},)
    assert reward("chat", PromptRow(PLACE, messages)) == 1
    assert Reward.of(f"{file}:length:-0.5").weight == -0.5
    near = Reward.of(f"{file}:near").function
    assert near("a", "b", 1, question="c", x=2) == ("b", "a", 1, "question", "x")


@pytest.mark.parametrize(
    "name, fault",
    [
        ("raises", "raised ZeroDivisionError: division by zero"),
        ("nan", "returned nan, wanted a finite number or None"),
        ("sleeps", "took longer than 0.05 s"),
    ],
)
def test_a_faulty_reward_is_told_by_row(trainer_of, file, name, fault):
    word = f"{file}:{name}"
    chosen = {"reward": (f"{file}:length", word), "reward_seconds": 0.05, "answers": 2}
    with pytest.raises(PyggmlError, match=rf"rows: row \d+: reward {name} {fault}"):
        trainer_of(objective=chosen).run(progress=False)
    chosen |= {"reward_faults": "skip"}
    trainer, reports = trainer_of(objective=chosen, max_steps=1, val_every=0), []
    trainer.corpus = type(trainer.corpus)(trainer.corpus.train, None)
    trainer.validation = None
    with pytest.warns(RuntimeWarning, match=rf"reward {name} {fault}: the answer is left out"):
        trainer.run(reports.append, progress=False)
    (step,) = steps(reports)
    assert step.tally.n_judged == 0 and step.loss == 0


@pytest.mark.parametrize(
    "name, fault",
    [
        ("huge", "returned a number above all floats, wanted a finite number or None"),
        ("word", "returned a str, wanted a number or None"),
        ("lists", "returned a list, wanted a number or None"),
        ("none", "returned 0 rewards of 1 answer, wanted one"),
        ("two", "returned 2 rewards of 1 answer, wanted one"),
        ("bare", "returned a float, wanted a list with one reward"),
        ("ends", "raised SystemExit: two lines$"),
        ("near", "raised TypeError: near.. missing 1 required positional argument: 'answer'"),
    ],
)
def test_what_is_no_reward_is_told_by_row(file, name, fault):
    with pytest.raises(RewardFault, match=f"p.jsonl: line 3: reward {name} {fault}"):
        Reward.of(f"{file}:{name}")(PromptRow(PLACE, "how?"), "so")


def test_a_call_that_takes_too_long_is_ended():
    late = []

    def reward(completion):
        time.sleep(0.5)
        late.append(completion)

    with pytest.raises(RewardFault, match="took longer than 0.05 s"):
        Reward.of(reward)(PromptRow(PLACE, "how?"), "so", 0.05)
    assert late == []


def test_what_is_no_function_is_refused(file, tmp_path, trainer_of):
    for word in ("r.txt:length", f"{file}", *(f"{file}:length:{w}" for w in ("0", "x", "1e999"))):
        with pytest.raises(ConfigError, match="wanted FILE.py:FUNCTION"):
            objective_of("grpo", reward=(word,))
    broken = tmp_path / "b.py"
    broken.write_text("x = y\n")
    (ended := tmp_path / "e.py").write_text("import sys; sys.exit(3)\n")
    for word, fault in (
        (f"{broken}:f", "cannot be run: NameError"),
        (f"{ended}:f", "cannot be run: SystemExit: 3"),
        (f"{file}:no", "has no function no: it has length, near"),
        (f"{tmp_path}/none.py:f", "cannot be run: FileNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=fault):
            trainer_of(objective={"reward": (word,)}).reserve()
    for settings, fault in (
        ({"reward": ()}, "reward.*is missing: grpo wants"),
        ({"answers": 1}, "answers.*wanted at least 2"),
        ({"answer_tokens": 60}, r"ctx.*longest prompt has \d tokens, an answer up to 60"),
    ):
        with pytest.raises(ConfigError, match=fault):
            trainer_of(objective=settings).reserve()
    long = [*PROMPTS, {"prompt": "z" * 99}]
    with pytest.raises(DataError, match="row 11 has 99 tokens, wanted at most 40"):
        trainer_of(rows=long)
    with pytest.raises(DataError, match='without "prompt"'):
        trainer_of(rows=[{"prompts": "a"}])


# -- runs ---------------------------------------------------------------------------------------


def test_rewards_rise(trainer_of):
    """Towards one letter, of which the model knows nothing."""
    chosen = {"reward": (lambda completion: completion.count("a"),), "answers": 8}
    trainer, reports = trainer_of(objective=chosen, max_steps=40, lr=0.05, val_every=0), []
    trainer.run(reports.append, progress=False)
    rewards = [r.tally.reward for r in steps(reports)]
    assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5]) + 0.5
    first, last = (r for r in reports if isinstance(r, ValidationReport))
    assert last.tally.reward > first.tally.reward
    assert last.loss == pytest.approx(-last.tally.reward)
    json.dumps(steps(reports)[0].sampled)


def test_a_run_that_is_resumed_within_a_lesson_is_a_whole_one(trainer_of, tmp_path):
    whole, settings = trainer_of(objective=(o := {"iterations": 2, "kl_weight": 0.1})), {}
    whole.run(progress=False)
    assert whole.progress.index == 4 and len(whole.history.losses) == 4
    settings = {"checkpoint_dir": str(tmp_path), "objective": o}
    half = trainer_of(**settings)
    half.run(lambda r: half.stop() if r.step == 3 else None, progress=False)
    rest = trainer_of(**settings)
    rest.resume(tmp_path)
    assert len(rest.losses.practice.state) == 2 * (4 * (3 + 2 * MOST) + 1)
    rest.run(progress=False)
    assert state(rest) == state(whole) and rest.history == whole.history
    rest.progress = half.progress
    for place in (0, 3, -1):  # of an answer, its length and an id; a prompt
        rest.losses.practice.state = half.losses.practice.state.copy()
        rest.losses.practice.state[place] = 1e6
        with pytest.raises(CheckpointError, match="sampled answers are not those"):
            rest._step()


def test_other_prompts_take_the_place_of_those_that_teach_nothing(trainer_of):
    """Of ten prompts one is rewarded, and it alone."""

    def reward(completion, n):
        return len(completion) * (n == 4)

    alike = {}
    for tries in (0, 50):
        chosen, reports = {"reward": (reward,), "dynamic_sampling": tries, "answers": 6}, []
        trainer_of(objective=chosen, val_every=0).run(reports.append, progress=False)
        alike[tries] = sum(r.tally.n_alike for r in steps(reports))
    assert alike[0] >= 6 and alike[50] == 0


def test_cut_answers_are_masked(trainer_of):
    lessons = []
    for mask in (False, True):
        chosen = {"mask_cut": mask, "answers": 8, "answer_tokens": 24}
        practice = (trainer := trainer_of(objective=chosen)).losses.practice
        lessons.append(practice.lesson(0, trainer.corpus.train, np.arange(4), trainer.ranks, None))
    n_cut = lessons[0].tally.n_cut
    assert 0 < n_cut < lessons[0].tally.n_answers == 32
    n_left = [np.count_nonzero(lesson.dataset.signs) for lesson in lessons]
    assert n_left == [32, 32 - n_cut]
    shares = {float(x) for lesson in lessons for x in lesson.dataset.shares_of_tokens.flat if x}
    assert all(1 / x / 16 == pytest.approx(round(1 / x / 16)) for x in shares), "of all answers"


class HalfOfTwo(Ranks):
    """One of two ranks, alone: what it joins is its own."""

    size = 2

    def __init__(self, rank):
        self.rank = rank


def test_ranks_share_prompts_and_get_the_same_answers(trainer_of):
    trainer = trainer_of(objective={"dynamic_sampling": 2, "reward": (lambda prompt: len(prompt),)})
    practice, data, windows = trainer.losses.practice, trainer.corpus.train, np.arange(3)
    whole = practice._sample(7, data, windows, ALONE, 4)
    parts = [practice._sample(7, data, windows, HalfOfTwo(rank), 4) for rank in (0, 1)]
    assert [len(p) / len(whole) for p in parts] == pytest.approx([1 / 3, 2 / 3])
    assert np.concatenate(parts).tobytes() == whole.tobytes()


# What each setting is beside its default; all of them change what is computed.
CHANGED = {
    "answers": 3,
    "answer_tokens": 5,
    "temperature": 0.9,
    "reward": (vowels, lambda completion: len(set(completion))),
    "clip_low": 1e-4,
    "clip_high": 1e-4,
    "kl_weight": 0.5,
    "iterations": 1,
    "mask_cut": True,
    "dynamic_sampling": 3,
}
ELSEWHERE = {"reward_seconds", "reward_faults"}  # test_a_faulty_reward_is_told_by_row


def odd(completion, n):
    """Half of the prompts teach nothing."""
    return n % 2 * len(set(completion))


def test_every_setting_matters(trainer_of):
    def made(**changed):
        usual = {"iterations": 2, "reward": (odd,)}
        settings = {"batch": 4, "max_steps": 2, "val_every": 0, "lr": 1e-3}
        trainer = trainer_of(objective={**usual, **changed}, **settings)
        trainer.run(progress=False)
        return trainer.parameters.data.tobytes()

    usual = made()
    assert usual == made()
    assert [name for name, value in CHANGED.items() if made(**{name: value}) == usual] == []
    assert {*CHANGED, *ELSEWHERE} == {f.name for f in dataclasses.fields(OBJECTIVES["grpo"])}


# -- rows and pages -----------------------------------------------------------------------------


def test_a_row_keeps_the_whole_record(path):
    model = pyggml.load(path)
    rows = [
        {"question": "2 + 2?", "answer": 4, "steps": ["add"], "choices": None},
        {"input": "x", "output": "y", "label": 0.5},
        {"prompt": "a", "completion": "b", "messages2": [1]},
    ]
    data = corpus_of_rows(rows, model, DataConfig(ctx=CTX, val_split=0), purpose="prompts").train
    assert [row.columns for row in data.rows] == rows
    assert [row.prompt for row in data.rows] == ["2 + 2?", "x", "a"]
    assert [model.tokenizer.decode(data.prompt(i)) for i in range(3)] == ["2 + 2?", "x", "a"]
    config = DataConfig(ctx=CTX, val_split=0, columns=("prompt=answer",))
    other = corpus_of_rows([{"answer": "q", "n": 1}], model, config, purpose="prompts").train
    assert other.rows[0].prompt == "q" and other.rows[0].columns["n"] == 1
    changed = [{**rows[0], "answer": 5}, *rows[1:]]
    config = DataConfig(ctx=CTX, val_split=0)
    again = corpus_of_rows(changed, model, config, purpose="prompts").train
    assert again.tokens.tobytes() == data.tokens.tobytes()
    assert again.arrays[-1].tobytes() != data.arrays[-1].tobytes(), "its answers earn otherwise"


def test_the_page_on_rewards_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions, prompts, program = blocks_of("rewards.md")
    (tmp_path / "rewards.py").write_text(functions)
    exec(prompts, {})
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    names = {}
    exec(functions + program, names)
    assert names["remark"]('"So I did, but no more."', 5) == 1 == names["sentence"]("No.")
    reports = names["train"](
        pyggml.load(path, compute="f32"), rows[:9], "rewards.py:remark", steps=2
    )
    assert [r.tally.n_answers for r in steps(reports)] == [8, 8]
