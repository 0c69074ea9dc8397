"""Rows mean what they say: how much is learned, where answers end, what they stand after."""

import json

import numpy as np
import pytest
from extras import need

from pyggml.errors import ConfigError, DataError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.objectives.choice import objective_of

from chats import assistant, user, vocabulary

END = "</s>"


def write(path, rows, kind="jsonl"):
    """The rows as a file of this format, lists in a table as JSON."""
    if kind == "parquet":
        need("pyarrow")
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if kind == "csv":
        import csv

        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]])
            table.writeheader()
            for row in rows:
                cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
                table.writerow(cells)
        return path
    text = json.dumps(rows) if kind == "json" else "".join(json.dumps(r) + "\n" for r in rows)
    path.write_text(text)
    return path


@pytest.fixture
def read(tmp_path):
    """Reads rows with the vocabulary of chats: (rows, objective's rows, format, settings)."""

    def make(rows, purpose="training", kind="jsonl", **settings):
        path = write(tmp_path / f"a.{kind}", rows, kind)
        settings = {"ctx": 400, "val_split": 0.0, "chat_template": "alpaca"} | settings
        tokenizer = vocabulary(add_bos=settings.pop("add_bos", False))
        return read_corpus(path, tokenizer, DataConfig(**settings), None, purpose)

    return make


def documents(data):
    """Each document's ids, and the text of what is learned of it."""
    found, tokens = [], vocabulary()
    for row, numbers, targets in zip(data.tokens, data.documents, data.targets(), strict=True):
        learned = np.concatenate([[False], targets])
        for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
            at = numbers == number
            raw = [tokens.token_bytes(int(i), special=True) for i in row[at & learned]]
            found.append((row[at].tolist(), b"".join(raw).decode()))
    return found


def learned(data):
    return [text for _, text in documents(data)]


def two_answers(**flags):
    return {"messages": [user("a"), {**assistant("wrong"), **flags}, user("b"), assistant("right")]}


FLAGS = [
    ({"train": 0}, 0),
    ({"train": False}, 0),
    ({"train": "false"}, 0),
    ({"train": "0"}, 0),
    ({"weight": 0}, 0),
    ({"weight": 0.0}, 0),
    ({"weight": "0"}, 0),
    ({"weight": False}, 0),
    ({"train": 1}, 1),
    ({"train": "True"}, 1),
    ({"weight": "1.0"}, 1),
    ({"weight": 0.5}, 0.5),
    ({"weight": "0.25"}, 0.25),
    ({"train": True, "weight": 0.5}, 0.5),
    ({}, 1),
]
NO_FLAGS = [
    ({"train": "maybe"}, "\"train\" that is 'maybe', wanted true or false"),
    ({"train": 2}, '"train" that is 2, wanted true or false'),
    ({"train": []}, r'"train" that is \[\], wanted true or false'),
    ({"weight": 2}, '"weight" that is 2, wanted 0 to 1'),
    ({"weight": -0.5}, '"weight" that is -0.5, wanted 0 to 1'),
    ({"weight": "much"}, "\"weight\" that is 'much', wanted 0 to 1"),
    ({"weight": "nan"}, "\"weight\" that is 'nan', wanted 0 to 1"),
    ({"train": True, "weight": 0}, '"train" that is True and a "weight" that is 0'),
]


@pytest.mark.quick
@pytest.mark.parametrize("flags, weight", FLAGS)
def test_a_message_is_learned_as_its_flags_say(read, flags, weight):
    for kind in ("jsonl", "json", "csv"):
        data = read([two_answers(**flags)], kind=kind).train
        (text,) = learned(data)
        assert text == (f"wrong{END}" if weight else "") + f"right{END}"
        shares = {float(w) for w in np.unique(data.shares()[data.targets()])}
        assert shares == {float(weight) or 1.0, 1.0}


def test_flags_of_parquet(read):
    rows = [two_answers(weight=0.5), two_answers(weight=0.0)]
    assert [*map(len, learned(read(rows, kind="parquet").train))] == [18, 9]


@pytest.mark.quick
@pytest.mark.parametrize("flags, message", NO_FLAGS)
def test_a_flag_that_is_none_is_refused_by_line(read, flags, message):
    with pytest.raises(DataError, match=f"line 2 .*message 2 that has a {message}"):
        read([two_answers(), two_answers(**flags)])


@pytest.mark.quick
def test_a_fractional_weight_weighs_the_loss(read):
    """As the weighted mean over all learned tokens of a step, however its windows lie."""
    rows = [two_answers(weight=0.5), two_answers()]
    for packing in (True, False):
        data = read(rows, packing=packing, ctx=200).train
        weights = np.concatenate([b.weights for b in data.batches(range(len(data)), 1)])
        shares = data.shares()[data.targets()]
        counts = {w: int((shares == w).sum()) for w in (0.5, 1.0)}
        assert counts == {0.5: 6, 1.0: 18}
        total = 0.5 * counts[0.5] + counts[1.0]
        found = np.sort(weights[weights > 0])
        wanted = np.repeat([0.5 / total, 1 / total], [counts[0.5], counts[1.0]])
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.quick
def test_weights_of_whole_rows(read):
    texts = [{"text": "abc", "weight": 0.5}, {"text": "def"}]
    data = read(texts, ctx=16).train
    assert sorted({float(x) for x in data.shares()[data.targets()]}) == [0.5, 1.0]
    rows = [
        {"prompt": "a", "completion": "b", "weight": "0.25"},
        {"instruction": "a", "output": "b", "train": True},
        {"messages": [user("a"), assistant("b")], "weight": 1},
    ]
    data = read(rows).train
    assert sorted({float(x) for x in data.shares()[data.targets()]}) == [0.25, 1.0]
    for flags in ({"weight": 0}, {"train": "false"}):
        with pytest.raises(DataError, match="line 1 has the weight 0, so nothing of it is learned"):
            read([{"text": "a"} | flags])
    with pytest.raises(DataError, match="\"weight\" is '70 kg', wanted 0 to 1"):
        read([{"text": "a", "weight": "70 kg"}])


@pytest.mark.quick
def test_flags_that_the_settings_cannot_mean(read):
    asked = {"messages": [{**user("a"), "train": True}, assistant("b")]}
    with pytest.raises(DataError, match='line 1 has a message 1 with "train" or "weight" and not'):
        read([asked])
    assert read([asked], train_on="all").train.n_targets() > 20
    with pytest.raises(DataError, match="line 1 has a message 2 of the weight 0, and --train-on"):
        read([two_answers(train=0)], train_on="all")


# -- ends ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("add_bos", [False, True])
def test_every_answer_ends_once_in_the_end_of_text(read, add_bos):
    rows = [("", "cat"), ("p ", "cat"), ("", f"cat{END}"), ("p ", f"cat{END}")]
    made = read([{"prompt": p, "completion": c} for p, c in rows], add_bos=add_bos).train
    start = "c" if not add_bos else ""  # the first token of all follows none
    assert learned(made) == [*(["cat</s>".removeprefix(start), "cat</s>"] * 2)]
    pairs = [{"chosen": "yes", "rejected": "no"}, {"prompt": "", "chosen": "ya", "rejected": "na"}]
    both = read(pairs, "pairs", add_bos=add_bos).train
    texts = ["yes", "no", "ya", "na"]
    assert learned(both) == [(t if add_bos else t[1:]) + END for t in texts]
    single = [{"prompt": "", "completion": t, "label": True} for t in texts]
    for data in (read(single, "labels", add_bos=add_bos).train,):
        assert learned(data) == [(t if add_bos else t[1:]) + END for t in texts]


@pytest.mark.quick
def test_rows_of_text_are_documents_with_an_end(read):
    """Short ones share a window and are padded, or have one each; long ones go on in the next."""
    rows = [{"text": "abc"}, {"text": f"def{END}"}, {"text": "a" * 30}]
    data = read(rows, ctx=16).train
    assert learned(data)[:2] == [f"bc{END}", f"ef{END}"]
    assert "".join(learned(data)[2:]) == "a" * 29 + END
    assert len(data) == 3 and (data.documents[0] < 0).any(), "padded where short"
    assert len(read(rows, ctx=16, packing=False).train) == 4
    bare = read(rows, ctx=16, end_of_text=False)
    assert learned(bare.train)[:2] == ["bc", f"ef{END}"]
    assert bare.files[0].notes["ended"][0] == 1
    with pytest.raises(DataError, match="line 1 has no token to learn: the first of a text"):
        read([{"text": "a"}], end_of_text=False)


@pytest.mark.quick
@pytest.mark.parametrize(
    "purpose, row",
    [
        ("training", {"text": "abc"}),
        ("training", {"prompt": "a", "completion": "bc"}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ],
)
def test_without_a_token_that_ends_a_text_no_row_is_learned_to_its_end(tmp_path, purpose, row):
    class Endless(Merging):
        eos_id = None

    path = write(tmp_path / "a.jsonl", [row])
    settings = {"ctx": 31, "val_split": 0.0}
    with pytest.raises(
        DataError, match="line 1 has an end to learn, and the model's vocabulary no"
    ):
        read_corpus(path, Endless(), DataConfig(**settings), None, purpose)
    if "text" in row:
        bare = read_corpus(path, Endless(), DataConfig(**settings, end_of_text=False))
        assert bare.n_documents == 1


# -- answers that are compared ------------------------------------------------------------------


def pair(**flags):
    first = {**assistant("first"), **flags}
    ends = [[first, user("go on"), assistant(end)] for end in ("good", "bad")]
    return {"prompt": [user("hi")], "chosen": ends[0], "rejected": ends[1]}


@pytest.mark.quick
def test_preferences_obey_flags(read):
    assert learned(read([pair(weight=0)], "pairs").train) == [f"good{END}", f"bad{END}"]
    assert learned(read([pair()], "pairs").train) == [f"first{END}good{END}", f"first{END}bad{END}"]
    shared = {k: [user("hi"), *pair(train="false")[k]] for k in ("chosen", "rejected")}
    assert learned(read([shared], "pairs").train) == [f"good{END}", f"bad{END}"]
    rows = [{"prompt": [user("a")], "completion": pair(train=0)["chosen"], "label": label}
            for label in (True, False)]  # fmt: skip
    assert learned(read(rows, "labels").train) == [f"good{END}"] * 2
    for flags, fault in (
        ({"weight": 0.5}, "a message 1 of the weight 0.5, wanted 0 or 1"),
        ({"train": "x"}, "a message 1 that has a \"train\" that is 'x'"),
    ):
        with pytest.raises(DataError, match=f'line 1 .*"chosen" has {fault}'):
            read([pair(**flags)], "pairs")
    with pytest.raises(DataError, match='line 1 has the "weight" 0.5, and rows that are compared'):
        read([pair() | {"weight": 0.5}], "pairs")
    nothing = {"prompt": [user("a")], "chosen": [{**assistant("b"), "weight": 0}]}
    with pytest.raises(DataError, match='"chosen" has no answer of the assistant to learn'):
        read([nothing | {"rejected": [assistant("c")]}], "pairs")


class Merging:
    """One token a character, but for words of a list, the longest first; BOS if it is asked for."""

    bos_id, eos_id, eot_id, add_eos, chat_templates = 0, 1, None, False, ()
    words = ("believable", "be", "un")

    def __init__(self, add_bos=False):
        self.add_bos = add_bos

    def encode(self, text, add_special=True, parse_special=False):
        ids = [self.bos_id] if self.add_bos and add_special else []
        while text:
            word = next((w for w in self.words if text.startswith(w)), text[0])
            ids.append(300 + self.words.index(word) if len(word) > 1 else ord(word))
            text = text[len(word) :]
        return ids


@pytest.mark.quick
@pytest.mark.parametrize("prompt", [None, "unbe"])
def test_both_answers_stand_after_the_same_tokens(tmp_path, prompt):
    """The end of a prompt may lie inside a token of one answer alone."""
    row = {"chosen": "unbelievable", "rejected": "unbearable"}
    if prompt is not None:
        row = {"prompt": prompt, "chosen": "lievable", "rejected": "arable"}
    path = write(tmp_path / "a.jsonl", [row])
    data = read_corpus([path], Merging(), DataConfig(ctx=31, val_split=0.0), rows="pairs").train
    first = [int(np.argmax(data.trained[0][data.documents[0] == n])) for n in (0, 1)]
    ids = [data.tokens[0][data.documents[0] == n].tolist() for n in (0, 1)]
    assert first == [1, 1] and ids[0][:1] == ids[1][:1] == [302]


@pytest.mark.quick
def test_exchanged_completions_bring_no_bos(tmp_path):
    rows = [("Q?", " me", True), ("", "free", False), ("", "text", True), ("A", "b", False)]
    names = ("prompt", "completion", "label")
    path = write(tmp_path / "a.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    config = DataConfig(ctx=63, val_split=0.0)
    data = read_corpus([path], Merging(add_bos=True), config, rows="labels").train
    for each in (data, data.mismatched):
        for number in range(len(rows)):
            ids = each.tokens[0][each.documents[0] == number]
            assert np.flatnonzero(ids == Merging.bos_id).tolist() == [0]
            assert not each.trained[0][each.documents[0] == number][0]


@pytest.mark.quick
def test_answers_that_are_the_same_once_written_are_refused(read):
    rows = [
        {**assistant("a"), "name": name} for name in ("x", "y")
    ]  # which no template here writes
    row = {"prompt": [user("q")], "chosen": rows[:1], "rejected": rows[1:]}
    with pytest.raises(DataError, match="line 1 has a chosen and a rejected answer that are the s"):
        read([row], "pairs")
    with pytest.raises(ConfigError, match="undesirable_weight is 0, as desirable_weight is"):
        objective_of("kto", desirable_weight=0.0, undesirable_weight=0.0)


LONG = [
    {"prompt": "Q ", "chosen": "yes", "rejected": "no"},
    {"prompt": "Q ", "chosen": "y" * 90, "rejected": "no"},
]


@pytest.mark.quick
def test_long_pairs_are_dropped_or_cut(read):
    with pytest.raises(DataError, match="line 2 has 98 tokens, .* --long-chats drop, cut or trunc"):
        read(LONG, "pairs", ctx=63)
    for how in ("drop", "cut"):
        made = read(LONG, "pairs", ctx=63, long_chats=how)
        assert len(learned(made.train)) == 2 and made.files[0].n_dropped == 1
    made = read(LONG, "pairs", ctx=63, long_chats="truncate")
    assert made.files[0].n_truncated == 1 and made.files[0].n_dropped == 0
    wanted = [f"yes{END}", f"no{END}", "y" * 57, f"no{END}"]
    assert learned(made.train) == wanted
    rounds = [user("one?"), assistant("1"), user("two?")]
    row = {"prompt": rounds, "chosen": [assistant("x")], "rejected": [assistant("y")]}
    n = len(documents(read([row], "pairs", ctx=2000).train)[0][0])
    made = read([row], "pairs", ctx=2 * n - 20, long_chats="cut")
    (one, text), (other, _) = documents(made.train)
    assert len(one) == len(other) < n and text == f"x{END}" and made.files[0].notes["cut"][0] == 1


@pytest.mark.quick
def test_rows_longer_than_a_window_are_learned_up_to_its_end(read):
    chat = {"messages": [user("a"), assistant("one"), user("b"), assistant("x" * 100)]}
    late = {"messages": [user("a" * 300), assistant("one")]}
    n = len(documents(read([two_answers()]).train)[0][0])
    made = read([chat, late], ctx=n, long_chats="truncate")
    assert (made.files[0].n_truncated, made.files[0].n_dropped) == (1, 1)
    (text,) = learned(made.train)
    assert text.startswith(f"one{END}x") and END not in text[len(f"one{END}") :]


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings", [{"train_on": "all"}, {"packing": False}, {"end_of_text": False}]
)
def test_settings_that_change_nothing_of_answers_are_refused(read, settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} is .*: leave it out"):
        read(LONG[:1], "pairs", **settings)


# -- names --------------------------------------------------------------------------------------

SAME = [
    {"question": "q ", "answer": "a"},
    {"prompt": "q ", "response": "a"},
    {"input": "q ", "output": "a"},
    {"query": "q ", "answer": "a"},
    {"question": "q ", "response": "a", "id": "7"},
]


@pytest.mark.quick
@pytest.mark.parametrize("row", SAME)
def test_names_that_people_use_are_read_at_once(read, row):
    for kind in ("jsonl", "json", "csv"):
        made = read([row], kind=kind)
        assert learned(made.train) == [f"a{END}"] and made.files[0].kind != "text"
    labelled = row | {"label": True}
    assert learned(read([labelled] * 2, "labels").train) == [f"a{END}"] * 2
    pairs = {"question": "q ", "chosen": "a", "rejected": "b"}
    assert learned(read([pairs], "pairs").train) == [f"a{END}", f"b{END}"]


@pytest.mark.quick
def test_context_stands_before_its_question(read):
    row = {"context": "C", "question": "q ", "answer": "a"}
    tokens = vocabulary()
    (ids, text), *_ = documents(read([row]).train)
    asked = tokens.decode(ids, special=True)
    assert "### Instruction:\nC\nq \n" in asked and text == f"a{END}", "a question is a chat"
    (ids, text), *_ = documents(read([{"context": "C", "prompt": "q ", "completion": "a"}]).train)
    assert tokens.decode(ids, special=True) == f"C\nq a{END}" and text == f"a{END}"
    dolly = {"instruction": "i", "context": "c", "response": "r"}
    (ids, text), *_ = documents(read([dolly]).train)
    assert "### Input:\nc" in tokens.decode(ids) and text == f"r{END}"


CAUSES = [
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "training",
        "line 1 has prompt and chosen and rejected, which --objective dpo .* learns to prefer",
    ),
    ({"prompt": "a", "completion": "b", "label": True}, "pairs", "--objective kto learns from"),
    ({"prompt": "a", "completion": "b"}, "pairs", "--objective sft learns to write"),
    (
        {"question": "a", "choices": ["b", "c"], "answer": 0},
        "training",
        'has "choices", among which `pyggml eval` asks, beside question and answer: --columns prom',
    ),
    ({"q": "a", "reply": "b"}, "training", "--columns prompt=q,completion=reply may be meant"),
    ({"body": "a", "id": 3}, "training", "--columns text=body may be meant"),
    ({"dialog": [user("a")]}, "training", "--columns messages=dialog may be meant"),
    (
        {"question_text": "a", "good_one": "b", "bad_one": "c"},
        "pairs",
        "--columns prompt=question_text,chosen=good_one,rejected=bad_one may be meant",
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize("row, purpose, said", CAUSES)
def test_a_row_of_another_kind_says_what_it_is(read, row, purpose, said):
    with pytest.raises(DataError, match=said):
        read([row], purpose)


@pytest.mark.quick
def test_a_fault_of_a_template_does_not_end_in_names_of_rows(read):
    chat = {"messages": [user("a"), assistant("b", reasoning_content="secret")]}
    with pytest.raises(DataError) as error:
        read([chat], chat_template="alpaca")
    assert "line 1: " in str(error.value) and "wanted one JSON object" not in str(error.value)
