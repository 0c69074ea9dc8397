"""Records of every shape become rows; hostile ones are told by place and reason."""

import json

import pytest
from extras import need

from pyggml.chat.messages import BadValue
from pyggml.errors import ConfigError, DataError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import (
    ChatRow,
    CompletionRow,
    LabelledRow,
    PreferenceRow,
    Source,
    read_rows,
)
from pyggml.lora.data.formats import source
from pyggml.lora.data.records import schema_of

from chats import Bytes, assistant, user


def rows_of(tmp_path, *records, purpose="training", columns=None):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_rows(path, schema_of(columns, purpose))[1]


CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = {"type": "function", "function": CALL}
SYSTEM = {"role": "system", "content": "s"}
CHATS = [
    ({"messages": [user("q"), assistant("a")]}, (user("q"), assistant("a")), {0}),
    (
        {"messages": [assistant("a", weight=0), user("q"), assistant("b", train=True)]},
        (assistant("a"), user("q"), assistant("b")),
        {0, 1},
    ),
    (
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "system": "s",
        },
        (SYSTEM, user("q"), assistant("a")),
        {0, 1},
    ),
    (
        {
            "conversations": [
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "2"},
            ]
        },
        (assistant("", tool_calls=[CALLED]), {"role": "tool", "content": "2"}),
        {1},
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "name": None,
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
                }
            ]
        },
        (assistant("", tool_calls=[CALLED]),),
        set(),
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                assistant("a", reasoning_content="r"),
            ]
        },
        (user("q"), assistant("a", reasoning_content="r")),
        {0},
    ),
    (
        {"instruction": "i", "input": "x", "output": "o", "text": "i, x: o"},
        (user("i\n\nx") | {"instruction": "i", "input": "x"}, assistant("o")),
        {0},
    ),
    ({"prompt": [user("q")], "completion": [assistant("a")]}, (user("q"), assistant("a")), {0}),
]


@pytest.mark.parametrize("record, messages, read_only", CHATS)
def test_chats_of_every_form_are_the_same_messages(tmp_path, record, messages, read_only):
    (row,) = rows_of(tmp_path, record)
    assert isinstance(row, ChatRow)
    assert (row.messages, row.read_only) == (messages, read_only)


def test_tools_are_objects_or_their_text(tmp_path):
    tool = {"name": "add", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": tool}
    for tools in ([whole], json.dumps([whole]), [tool], [json.dumps(tool)]):
        (row,) = rows_of(tmp_path, {"messages": [user("q"), assistant("a")], "tools": tools})
        assert row.tools == (whole,)


PREFERENCES = [
    ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", "a", "b"),
    ({"chosen": "ask: yes", "rejected": "ask: no"}, "ask:", " yes", " no"),
    (
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        (user("q"),),
        (assistant("a"),),
        (assistant("b"),),
    ),
    (
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        (user("q"),),
        (assistant("a"),),
        (assistant("b"),),
    ),
    (
        {
            "prompt": "q",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
        },
        (user("q"),),
        (assistant("a"),),
        (assistant("b"),),
    ),
    (
        {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
        (user("q"),),
        (assistant("a"),),
        (assistant("b"),),
    ),
]


@pytest.mark.parametrize("record, prompt, chosen, rejected", PREFERENCES)
def test_preferences_have_a_prompt_that_no_answer_repeats(
    tmp_path, record, prompt, chosen, rejected
):
    (row,) = rows_of(tmp_path, record, purpose="pairs")
    assert isinstance(row, PreferenceRow)
    assert (row.prompt, row.chosen, row.rejected) == (prompt, chosen, rejected)


def test_an_answer_that_is_wanted_or_not(tmp_path):
    record = {"prompt": "p", "completion": "c", "label": False}
    (row,) = rows_of(tmp_path, record, purpose="labels")
    assert isinstance(row, LabelledRow) and (row.prompt, row.completion, row.label) == (
        "p",
        "c",
        False,
    )
    for label in (True, "false", "sports"):  # answers that nobody wants are not learned by mistake
        with pytest.raises(
            DataError, match='"label", which --objective kto or classify learns from, beside'
        ):
            rows_of(tmp_path, record | {"label": label})
    columns = ("prompt=prompt", "completion=completion")
    assert isinstance(rows_of(tmp_path, record, columns=columns)[0], CompletionRow)


def test_a_column_map_alone_says_what_is_read(tmp_path):
    record = {"question": "q", "answer": "a", "text": "t", "prompt": "p"}
    columns = ("prompt=question", "completion=answer")
    (row,) = rows_of(tmp_path, record, columns=columns)
    assert (row.prompt, row.completion) == ("q", "a")
    with pytest.raises(
        DataError, match='has "question", a prompt, beside text: --columns text=text '
    ):
        rows_of(tmp_path, record)
    for wrong, message in (
        ("txt=a", "the name 'txt', wanted some of"),
        ("prompt=a", "gives prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            schema_of([wrong])
    for wrong in (("prompt",), ("a=b", "a=c"), ()):
        with pytest.raises(ConfigError, match="columns is"):
            DataConfig(columns=wrong)


HOSTILE = [
    ({"text": "a\0b"}, '"text" has a NUL at character 1'),
    ({"messages": [user("q")]}, '"messages" has no answer of the assistant to learn'),
    ({"messages": [user("q"), assistant("")]}, "has no answer of the assistant to learn"),
    ({"messages": []}, '"messages" is empty'),
    ({"messages": {}}, '"messages" is a object, wanted a list'),
    ({"messages": "[1"}, '"messages" is no JSON'),
    ({"messages": [3]}, "has a message 1 that is a number"),
    ({"messages": [{"role": "bot", "content": ""}]}, "the \"role\" 'bot', wanted one of system"),
    ({"messages": [{"content": ""}]}, 'the "role" a null, wanted one of'),
    ({"conversations": [{"from": "x", "value": ""}]}, "the \"from\" 'x', wanted one of system"),
    ({"messages": [user(3)]}, 'message 1 that has a "content" that is a number'),
    ({"messages": [user([{"type": "image"}])]}, "a part of type 'image', wanted text alone"),
    ({"messages": [user("\ud800")]}, "half of a surrogate pair"),
    ({"messages": [assistant("a", x={"\ud800": 1})]}, "half of a surrogate pair"),
    ({"messages": [assistant("a", x={"a\0": 1})]}, "has a NUL at character 1"),
    ({"messages": [assistant("", tool_calls=[{}])]}, '"tool_calls" that holds what is no call'),
    (
        {"messages": [assistant("", tool_calls=[{"name": "f", "arguments": [1]}])]},
        '"arguments" that are a list, wanted an object',
    ),
    (
        {"messages": [assistant("", tool_calls=[{"name": "f", "arguments": "["}])]},
        '"tool_calls" that is no JSON',
    ),
    ({"messages": [assistant("a", x=float("inf"))]}, "holds inf, which is no JSON"),
    ({"messages": [assistant("a")], "tools": [{}]}, '"tools" holds a function without "name"'),
    ({"prompt": [user("q")], "completion": 3}, '"completion" is a number'),
]


@pytest.mark.parametrize("record, message", HOSTILE)
def test_hostile_rows_are_refused_by_name(tmp_path, record, message):
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, {"text": "a"}, record)
    assert "a.jsonl: line 2 is an object whose" in str(error.value)
    assert message in str(error.value)


LINES = [
    (b'{"text": "a", "text": "b"}', "the name 'text' stands twice in one object"),
    (b'{"text": ' + b"9" * 5000 + b"}", "is no JSON"),
    (b'{"messages": ' + b"[" * 100_000, "it is nested too deeply"),
    (b'{"text": "\xff"}', "line 2: byte 24 is 0xff, which is not UTF-8"),
    (b'{"text": "' + b"a" * 300 + b'"}', "is longer than 0 MiB"),
    (
        json.dumps({"messages": [assistant("a", x=json.loads("[" * 80 + "]" * 80))]}).encode(),
        "is nested more than 64 deep",
    ),
]


@pytest.mark.parametrize("line, message", LINES)
def test_hostile_lines_are_refused_and_the_next_one_read(tmp_path, monkeypatch, line, message):
    if "longer" in message:
        monkeypatch.setattr(source, "MOST_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "bcdefghij"}\n')
    with pytest.raises(DataError, match="line 2.*; wanted one JSON object") as error:
        read_corpus(path, Bytes(), DataConfig(ctx=4))
    assert message in str(error.value)
    (found,) = read_corpus(path, Bytes(), DataConfig(ctx=4, skip_bad_rows=True)).files
    assert (found.n_documents, found.skipped.total) == (2, 1) and message in str(found.skipped)


FILES = [
    ("a.txt", b"abc\n\0d", "line 2: holds a NUL, wanted UTF-8 text"),
    ("a.txt", b"\n\0d", "line 2: holds a NUL, wanted UTF-8 text"),
    ("a.json", b'[{"text": "a"}, {"text": ', "item 2 is no JSON"),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', "column 16: after item 1 stands '{', wanted a c"),
    (
        "a.json",
        b'[{"text": "a"},\n{"text": "b"},\n]\n',
        "json: the comma at line 2, column 14 has",
    ),
    (
        "a.json",
        b'[{"text": "a"},\n{"text": "b",\n}]',
        r"item 2 .*the comma at line 2, column 13 h",
    ),
    ("a.jsonl", b'{"text": "a"}\n{"text": ["b",]}', r"line 2 .* \(the comma at column 14 has noth"),
    ("a.jsonl", b'{"text": "a"}\n{"text" "b"}', r"line 2 is no JSON \(.* delimiter at column 9\)"),
    (
        "a.json",
        b'{\n"text": "a"\n},\n{}',
        "line 3, column 2: after item 1 stands ',', wanted the",
    ),
    ("a.json", b'{"n": 1, "data": [{"text": "a"}]}', r"rows in its \"data\" .*`jq .data FILE`"),
    ("a.json", b'{"data": [{"text": "a"}, 3]}', "item 2 is a JSON number"),
    ("a.txt", "caf\xe9 noir".encode("cp1252"), "in Windows' cp1252 it is é: save the file as UTF"),
    (
        "a.csv",
        b"Nr;Frage;Antwort\n1;a;b\n",
        "columns Nr, Frage, Antwort: --columns prompt=Frage,completion=Antwort may be meant",
    ),
    ("a.json", b'[{"text": "a"}', "after item 1 stands the end of the file"),
    ("a.json", b'[{"text": "a"}] 3', "after the list of 1 items stands '3'"),
    ("a.csv", b"text,text\na,b\n", "the first line names text twice"),
    ("a.csv", b"n,text\n1,a,b\n", r"record 1 \(to line 2\) has 3 fields, the first line names 2"),
    ("a.csv", b"\n\nn,text\n1,a,b\n", r"record 1 \(to line 4\) has 3 fields"),
    ("a.parquet", b"PAR1 and no more", "cannot be read after row 0"),
]


@pytest.mark.parametrize("name, content, message", FILES)
def test_hostile_files_are_refused(tmp_path, name, content, message):
    if name.endswith("parquet"):
        need("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus(tmp_path / name, Bytes(), DataConfig(ctx=4))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
@pytest.mark.parametrize("form", ["over lines", "data", "data over lines"])
def test_objects_over_lines_and_a_list_within_an_object_are_rows(tmp_path, name, form):
    records = [{"text": "a"}, {"text": "b"}]
    indent = 2 if "lines" in form else None
    values = [{"data": records}] if "data" in form else records
    (tmp_path / name).write_text("\n".join(json.dumps(v, indent=indent) for v in values))
    kind, rows = read_rows(tmp_path / name)
    assert (kind, [(row.text, str(row.place)) for row in rows]) == (
        "JSON",
        [("a", "item 1"), ("b", "item 2")],
    )


def test_lines_and_columns_are_those_of_the_file(tmp_path, monkeypatch):
    """Also where the part of the file that is in memory begins much later."""
    monkeypatch.setattr(source, "_BLOCK", 16)
    rows = [{"text": f"{i} ä"} for i in range(300)]
    text = json.dumps(rows, indent=1, ensure_ascii=False).replace('"200 ä"', '"200 ä",')
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match="item 201 .*the comma at line 603, column 18 has"):
        read_rows(tmp_path / "a.json")


def test_long_files_are_read_in_parts(tmp_path):
    """Items across the blocks that are read, and a first one longer than any of them."""
    texts = ["x" * (3 << 20), *(f"é{i}" * 5000 for i in range(40))]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": t} for t in texts], ensure_ascii=False, indent=1))
    kind, rows = read_rows(path)
    assert kind == "JSON" and [row.text for row in rows] == texts
    path = tmp_path / "a.txt"
    path.write_text("".join(texts[1:]))
    assert [row.text for row in read_rows(path)[1]] == ["".join(texts[1:])]


def test_a_text_is_encoded_some_characters_at_a_time(tmp_path):
    """What the tokenizer takes for a text does not grow with the text."""

    class Notes(Bytes):
        most = 0

        def encode(self, text, **how):
            self.most = max(self.most, len(text))
            return super().encode(text, **how)

    path = tmp_path / "a.txt"
    path.write_text("some words " * 100_000)
    tokenizer = Notes()
    read_corpus(path, tokenizer, DataConfig(ctx=64))
    assert 0 < tokenizer.most < 100_000


def test_parquet_rows(tmp_path):
    pyarrow = need("pyarrow")
    from pyarrow import parquet

    records = [
        {"messages": [user("q"), assistant("a")], "n": 1},
        {"messages": [assistant("", tool_calls=[{"function": CALL}])], "n": 2},
    ]
    path = tmp_path / "a"
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    kind, (first, second) = read_rows(path)
    assert kind == "parquet" and first.messages == (user("q"), assistant("a"))
    assert second.messages == (assistant("", tool_calls=[CALLED]),)
    assert str(second.place) == "row 2"


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install '.*\[parquet\]'"):
        read_rows(tmp_path / "a.parquet")


SOURCES = [
    ("a.jsonl", "a.jsonl", 1),
    ("a.jsonl:2", "a.jsonl", 2),
    ("a.jsonl:.5", "a.jsonl", 0.5),
    ("C:\\x", "C:\\x", 1),
    ("a:2:1", "a:2", 1),
    ("a:b.txt", "a:b.txt", 1),
]


@pytest.mark.parametrize("given, path, weight", SOURCES)
def test_a_weight_stands_after_the_last_colon(given, path, weight):
    found = Source.of(given)
    assert (str(found.path), found.weight) == (path, weight)


def test_every_fault_of_every_file_is_told(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("1\n")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(DataError, match=r"a\.jsonl: line 1 .*b\.jsonl: line 1 "):
        read_corpus(files, Bytes(), DataConfig())
    for weight in ("0", "1001", "1" * 400):
        with pytest.raises(DataError, match="the weight .* is out of range"):
            Source.of(f"a.txt:{weight}")


def test_a_text_is_named_by_its_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("words")
    kind, (row,) = read_rows(path)
    assert kind == "text" and (row.place.file, row.place.unit, row.place.number) == (
        str(path),
        "text",
        0,
    )


def test_a_system_column_stands_before_the_messages_and_moves_their_weights(tmp_path):
    messages = [user("q"), assistant("a", weight=0), user("r"), assistant("b", weight=1)]
    (row,) = rows_of(tmp_path, {"system": "s", "messages": messages})
    assert [m["role"] for m in row.messages] == ["system", *("user", "assistant") * 2]
    (plain,) = rows_of(tmp_path, {"messages": messages})
    assert row.read_only == {0} | {i + 1 for i in plain.read_only}
    assert 2 in row.read_only and 4 not in row.read_only


def test_an_answer_with_a_label_has_no_weight_and_may_have_no_prompt(tmp_path):
    for completion, wanted in (("c", ""), ([assistant("a")], ())):
        record = {"prompt": None, "completion": completion, "label": True}
        assert rows_of(tmp_path, record, purpose="labels")[0].prompt == wanted
    with pytest.raises(DataError, match='has the "weight" 0.5, and rows that are compared count'):
        rows_of(tmp_path, {"prompt": "p", "completion": "c", "label": True, "weight": 0.5},
                purpose="labels")  # fmt: skip


def test_a_record_fits_by_its_names_alone():
    schema = schema_of(None, "pairs")
    assert schema.fits({"chosen": 1, "rejected": 2}) and schema.fits(
        {"chosen": 1, "rejected": 2, "x": 3}
    )
    assert not schema.fits({"chosen": 1})


def test_a_line_may_be_as_long_as_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "abc"}\n')
    monkeypatch.setattr(source, "MOST_BYTES", 16)
    assert list(source.lines(path)) == ['{"text": "abc"}\n']
    monkeypatch.setattr(source, "MOST_BYTES", 15)
    assert [type(line) for line in source.lines(path)] == [BadValue]
