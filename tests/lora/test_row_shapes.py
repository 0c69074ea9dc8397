"""Nothing that a record says is lost, in whatever tool's shape it comes: each is read whole or
refused.

SHAPES and MEANINGS are gone through as they stand, so that a new shape or name is tried too.
"""

import itertools
import json

import pytest

from pyggml.chat.messages import MARKS, BadValue
from pyggml.errors import DataError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import RowPlace, Schema, read_rows
from pyggml.lora.data.records import SHAPES
from pyggml.lora.data.records.names import LABEL, LETTERS, MEANINGS
from pyggml.lora.data.records.plan import RecordPlan
from pyggml.lora.data.records.rows import texts_of

from chats import assistant, user, vocabulary

PLACE = RowPlace("a.jsonl", "line", 1)
FLAGS = {*MARKS, *LABEL}
TOOL = {"type": "function", "function": {"name": "toolszq", "parameters": {"type": "object"}}}


def word(name):
    """A text that no other column has."""
    return f"{''.join(c for c in name if c.isalnum())}zq"


def value_of(name, names):
    """A value as a column of this name has it, in a record of these names."""
    if name in FLAGS:
        return True
    if name in ("messages", "conversations", "conversation"):
        answered = not {"chosen", "chosen_response"} & {*names}
        return [user(word(name)), *[assistant(f"again{word(name)}")] * answered]
    if name in ("choices", "options", "endings"):
        return [f"{i}{word(name)}" for i in range(2)]
    if name == "CONTEXTS":
        return [word(name)]
    if name == "tools":
        return [TOOL]
    if name == "history":
        return [[word(name), f"again{word(name)}"]]
    if name in ("answer", "answerKey", "answer_index", "answer_idx", "label"):
        return 1 if {"choices", "options", "endings", "A"} & {*names} else word(name)
    return "maybe" if name == "final_decision" else word(name)


def words_in(value):
    """The texts of a value that end as `word` has them."""
    if isinstance(value, dict):
        return {w for inner in value.values() for w in words_in(inner)}
    if isinstance(value, list):
        return {w for inner in value for w in words_in(inner)}
    return {value} if isinstance(value, str) and value.endswith("zq") else set()


def said_by(row):
    """All that a row has of texts, the tools' names among them."""
    tools = [tool["function"]["name"] for tool in getattr(row, "tools", ())]
    return "\n".join([*texts_of(row), *tools])


def read(purpose, record):
    """The row of a record, or None where it is refused."""
    try:
        return Schema(purpose).row(PLACE, record)
    except BadValue:
        return None


# A prompt's row keeps the whole record, so of it nothing can be lost: test_rewards.py.
BASES = [
    (purpose, names, shape)
    for purpose, shapes in SHAPES.items()
    if purpose != "prompts"
    for shape in shapes
    for names in itertools.product(*shape.parts)
    if len({*names}) == len(names)
]


def record_of(names, purpose):
    record = {name: value_of(name, names) for name in names}
    return record | ({"label": 1} if purpose == "question" and "label" in names else {})


def test_every_shape_reads_its_own_names():
    assert len(BASES) > 100
    for purpose, names, _ in BASES:
        record = record_of(names, purpose)
        row = read(purpose, record)
        assert row is not None, (purpose, names)
        assert all(w in said_by(row) for w in words_in(record)), (purpose, names)


def test_a_column_that_means_something_is_read_or_its_row_refused():
    """Every shape under every choice of its names, with every other name that any tool gives a
    meaning, as a text, as messages and as a flag."""
    n_read = n_refused = 0
    every = [name for names in MEANINGS.values() for name in names]
    for purpose, names, shape in BASES:
        base = record_of(names, purpose)
        for name in every:
            if name in names:
                continue
            own = value_of(name, (*names, name))
            for value in (own, word(name), [user(word(name))], False, 0.5):
                record = base | {name: value}
                record |= {"A": "Azq", "B": "Bzq", name: value} if name in LETTERS else {}
                row = read(purpose, record)
                n_read, n_refused = n_read + (row is not None), n_refused + (row is None)
                if row is not None and name not in FLAGS:
                    said, lost = said_by(row), words_in(record)
                    assert value != 0.5, (purpose, names, name, value)
                    assert all(w in said for w in lost), (purpose, names, name, value)
                elif row is not None:
                    assert name in shape.names, (purpose, names, name, value)
    assert n_read > 300 and n_refused > 30_000


def test_a_column_that_says_nothing_more_is_no_reason_to_refuse():
    for purpose, names, _ in BASES:
        base = record_of(names, purpose)
        row = read(purpose, base)
        texts = texts_of(row)
        whole = " ".join(texts) if len(texts) > 1 else None
        for value in (None, "", "  ", [], {}, texts[0], [user(texts[0])], whole):
            record = base | {"user_prompt": value}
            assert read(purpose, record) == row, (purpose, names, value)
            assert Schema(purpose).unread(record | {"id": 3}) == ["id"]


def test_what_a_shape_may_have_beside_its_names_is_read():
    """One by one, and so that marks are obeyed."""
    for purpose, names, shape in BASES:
        for part in shape.extras:
            for name in part:
                if name in names or (purpose == "question" and name != "C"):
                    continue
                record = record_of(names, purpose) | {name: value_of(name, (*names, name))}
                row = read(purpose, record)
                assert row is not None, (purpose, names, name)
                assert all(w in said_by(row) for w in words_in(record)), (purpose, names, name)
                if name in MARKS:
                    assert read(purpose, record | {name: False}) is None, (purpose, names, name)


def test_records_of_the_same_names_are_looked_at_once(tmp_path, monkeypatch):
    """However many; of columns that say the same part, each record has its own."""
    shapes, of = [], RecordPlan.of
    monkeypatch.setattr(RecordPlan, "of", lambda *args: (shapes.append(args), of(*args))[1])
    rows = [
        {"prompt": "", "question": "q", "my id": 0},
        {"prompt": "p", "question": "", "my id": 1},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row | {"answer": "a"}) + "\n" for row in rows * 20))
    assert [row.prompt for row in read_rows(path)[1]] == ["q", "p"] * 20
    assert len(shapes) == 1


# -- the tools' own shapes ----------------------------------------------------------------------

Q, A, B, S = "askzq", "goodzq", "badzq", "systemzq"
ASKED, GOOD, BAD = user(Q), assistant(A), assistant(B)
HUMAN, GPT, OTHER = ({"from": f, "value": v} for f, v in (("human", Q), ("gpt", A), ("gpt", B)))
ROUNDS = [["onezq", "twozq"]]
PAIR, MESSAGES = {"chosen": A, "rejected": B}, {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
TOOLS = {
    "LLaMA-Factory": [
        ("training", {"instruction": Q, "input": "morezq", "output": A, "system": S}),
        ("training", {"instruction": Q, "input": "", "output": A, "history": ROUNDS}),
        ("training", {"conversations": [HUMAN, GPT], "system": S, "tools": ""}),
        ("pairs", {"instruction": Q, "input": "morezq", **PAIR, "system": S, "history": ROUNDS}),
        ("pairs", {"conversations": [HUMAN], "chosen": GPT, "rejected": OTHER, "system": S}),
        ("labels", {"instruction": Q, "input": "", "output": A, "kto_tag": True}),
        ("labels", {"conversations": [HUMAN, GPT], "kto_tag": "false"}),
        (None, {"messages": [ASKED, GOOD], "images": ["a.png"]}),
        (None, {"conversations": [HUMAN, GPT], "videos": ["a.mp4"]}),
    ],
    "Axolotl": [
        ("training", {"instruction": Q, "input": "", "response": A}),
        ("training", {"system_prompt": S, "question": Q, "response": A}),
        ("training", {"article": "morezq", "question": Q, "answer": A}),
        ("training", {"prompt": Q, "generation": A}),
        ("training", {"messages": [ASKED, GOOD | {"train": True}]}),
        ("pairs", {"system": S, "instruction": Q, "chosen_response": A, "rejected_response": B}),
        ("pairs", {"system": S, "input": Q, **PAIR}),
        ("pairs", {"system": S, "prompt": Q, **MESSAGES}),
        ("pairs", {"messages": [ASKED], "chosen": GOOD, "rejected": BAD}),
        ("labels", {"system": S, "question": Q, "completion": A, "label": True}),
        (None, {"instruction": Q, "output": A, "reflection": "r", "corrected": "c"}),
        (None, {"messages": [ASKED, GOOD | {"train_detail": [{"begin_offset": 0}]}]}),
        (None, {"segments": [{"label": True, "text": A}]}),
    ],
    "ms-swift": [
        ("training", {"system": S, "query": Q, "response": A, "history": ROUNDS}),
        ("training", {"messages": [ASKED, GOOD | {"loss": True}]}),
        ("pairs", {"messages": [ASKED, GOOD], "rejected_response": B}),
        ("pairs", {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD], "system": S}),
        ("pairs", {"query": Q, "response": A, "rejected_response": B, "history": ROUNDS}),
        ("labels", {"messages": [ASKED, GOOD], "label": False}),
        (None, {"query": Q, "response": A, "images": ["a.png"]}),
    ],
    "distilabel": [
        ("training", {"instruction": Q, "generation": A, "model_name": "m"}),
        ("training", {"system_prompt": S, "instruction": Q, "response": A}),
        ("pairs", {"system": S, "input": Q, **PAIR, "generations": [A, B], "rating": [9, 1]}),
        ("pairs", {"prompt": Q, **MESSAGES, "generation_models": ["a", "b"]}),
    ],
    "UltraFeedback": [
        ("pairs", {"prompt": Q, "prompt_id": "i", **MESSAGES, "messages": [ASKED, GOOD]}),
        ("pairs", {"source": "s", "instruction": Q, **PAIR, "chosen-rating": 5}),
        (None, {"instruction": Q, "completions": [{"response": A}], "models": ["m"]}),
    ],
    "Orca": [
        ("training", {"id": "i", "system_prompt": S, "question": Q, "response": A}),
        ("pairs", {"system": S, "question": Q, **PAIR}),
        ("training", {"conversations": [HUMAN | {"weight": None}, GPT | {"weight": 1.0}]}),
    ],
    "TRL": [
        ("training", {"text": f"so {A}"}),
        ("training", {"prompt": Q, "completion": A}),
        ("training", {"prompt": [ASKED], "completion": [GOOD]}),
        ("pairs", {"prompt": Q, **PAIR}),
        ("pairs", {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}),
        ("pairs", MESSAGES),
        ("labels", {"prompt": [ASKED], "completion": [GOOD], "label": True}),
        (None, {"prompt": Q, "completions": ["a"], "labels": [True]}),
        (None, {"prompt": Q, "completion": A, "images": ["a.png"]}),
    ],
    "Stanford": [
        ("training", {"instruction": Q, "input": "", "output": A, "text": f"Do: {Q} So: {A}."}),
    ],
}
CASES = [(tool, *each) for tool, shapes in TOOLS.items() for each in shapes]


@pytest.mark.quick
@pytest.mark.parametrize("tool, own, record", CASES)
def test_each_tool_s_shape_is_read_whole_by_every_objective_or_refused(tool, own, record):
    for purpose in SHAPES.keys() - {"prompts"}:
        row = read(purpose, record)
        if row is not None:
            assert all(w in said_by(row) for w in words_in(record)), purpose
        assert row is not None or purpose != own


@pytest.mark.parametrize("tool, own, record", [case for case in CASES if case[1]])
def test_what_a_tool_s_row_says_is_in_its_tokens(tmp_path, tool, own, record):
    path, tokens = tmp_path / "a.jsonl", vocabulary()
    path.write_text((json.dumps(record) + "\n") * 2)
    config = DataConfig(ctx=800, val_split=0.0, chat_template="alpaca")
    data = read_corpus(path, tokens, config, None, own).train
    text = tokens.decode(data.tokens[0], special=True)
    learned = tokens.decode(data.tokens[0][1:][data.targets()[0]])
    assert all(w in text for w in words_in(record))
    assert A in learned and Q not in learned and S not in learned


CLASHES = [
    ("training", {"system": S, "messages": [{"role": "system", "content": "t"}, ASKED, GOOD]},
     'has a "system" beside messages that begin with another system text'),
    ("pairs", {"prompt": "another", **MESSAGES}, 'begin with another chat than "prompt"'),
    ("pairs", {"system": S, "chosen": [{"role": "system", "content": "t"}, ASKED, GOOD],
               "rejected": [{"role": "system", "content": "t"}, ASKED, BAD]},
     'has a "system" beside answers that begin with another system text'),
    ("training", {"prompt": [ASKED, GOOD | {"weight": 1}, user("r")], "completion": "b"},
     "message 2 that is marked to be learned, and stands in a \"prompt\""),
    ("training", {"prompt": "q", "question": "r", "completion": "a"},
     'has "question", a prompt, beside prompt and completion: --columns prompt=prompt,completion='),
    ("training", {"messages": [ASKED, GOOD], "mask": 0}, 'has "mask", a mark of what is learned,'),
    ("training", {"messages": [ASKED, GOOD | {"mask": 0}]}, 'a "mask", a mark that is not obeyed'),
    ("training", {"messages": [ASKED, GOOD | {"loss": True, "train": 0}]}, 'a "loss" that is True'),
    ("training", {"conversations": [HUMAN, GPT], "image": "a.png"}, '"image", which is no text'),
    ("training", {"prompt": "q", "completion": "a", "history": [["q"]]}, "a list of 1, wanted a q"),
    ("training", {"messages": [{**ASKED, "value": "other"}, GOOD]}, 'a "content" and a "value"'),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("purpose, record, said", CLASHES)
def test_what_can_be_meant_in_two_ways_is_refused_with_both(tmp_path, purpose, record, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match="line 1 ") as told:
        read_rows(path, Schema(purpose))
    assert said in str(told.value)


@pytest.mark.parametrize("name", ["train", "loss"])
def test_an_answer_that_is_marked_is_read_and_not_learned(name):
    messages = [ASKED, GOOD | {name: False}, user("r"), BAD]
    assert read("training", {"messages": messages}).read_only == {0, 1, 2}
