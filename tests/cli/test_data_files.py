"""Every command that takes data reads the same of it: a table of commands, forms and kinds."""

import csv
import io
import json
import os

import pytest
from extras import need

from pyggml.requantize.imatrix import read_imatrix

from chats import assistant, user

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ROWS = [{"prompt": f"the {i}; ", "completion": f'pä"th {i}'} for i in range(6)]
CHATS = [{"messages": [user(r["prompt"]), assistant(r["completion"])]} for r in ROWS]
EXACT = ("--compute", "f32")


@pytest.fixture(scope="module")
def model(model_with):
    return model_with(tokenizer__chat_template=TEMPLATE)


def lines(records):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)


def table(records, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, [*records[0]], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


# -- commands: what each makes of data, for the same model ------------------------------------


def finetuned(call, model, data, folder):
    how = ("--ctx", 32, "--max-steps", 1, "--lora-rank", 1, "--no-report", "--val-split", 0)
    out = folder / "out.gguf"
    ended = call("finetune", "-m", model, "-f", data, "-o", out, *how, *EXACT, "--prompt", "the")
    return ended, out.read_bytes() if out.exists() else None


def perplexity_of(call, model, data, folder):
    ended = call("perplexity", "-m", model, "-f", data, "--ctx", 32, *EXACT)
    return ended, ended.out.splitlines()[-1:]


def importance(call, model, data, folder):
    out = folder / "out.imatrix"
    ended = call("imatrix", "-m", model, "-f", data, "-o", out, "--ctx", 16, *EXACT)
    made = read_imatrix(out) if out.exists() else None
    return ended, made and {name: s.squares.tolist() for name, s in made.sums.items()}


def evaluated(call, model, data, folder):
    ended = call("eval", "-m", model, "-f", data, "--ctx", 32, "--json", *EXACT)
    return ended, ended.code == 0 and json.loads(ended.out)["files"][0]["models"]


def answered(call, model, data, folder):
    how = ("-n", 2, "--temp", 0, "--json", "--seed", 1)
    ended = call("generate", "-m", model, "--messages", data, *how, *EXACT)
    return ended, [json.loads(line) for line in ended.out.splitlines()]


def talked(call, model, data, folder):
    ended = call("chat", "-m", model, "--messages", data, "-n", 1, "--temp", 0, *EXACT)
    return ended, None


COMMANDS = {
    "finetune": finetuned,
    "perplexity": perplexity_of,
    "imatrix": importance,
    "eval": evaluated,
    "generate": answered,
    "chat": talked,
}


@pytest.fixture(params=COMMANDS)
def command(request):
    return request.param


@pytest.fixture
def read(command, pyggml, model, tmp_path_factory, monkeypatch):
    """read(data): how the command ended, and what it made of the data."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return lambda data: COMMANDS[command](pyggml, model, data, tmp_path_factory.mktemp("made"))


# -- forms: the same rows, however they are written -------------------------------------------


def parquet(records):
    pyarrow = need("pyarrow")
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), out)
    return out.getvalue()


FORMS = {
    "b.jsonl": lines,
    "b.txt": lines,
    "bom.jsonl": lambda records: "\ufeff" + lines(records),
    "list.json": lambda records: json.dumps(records),
    "over-lines.json": lambda records: json.dumps(records, indent=1),
    "objects-over-lines.jsonl": lambda rs: "\n".join(json.dumps(r, indent=1) for r in rs),
    "data.json": lambda records: json.dumps({"data": records}),
    "by-name.json": lambda records: json.dumps({str(i): r for i, r in enumerate(records)}),
    "b.csv": table,
    "semicolons.csv": lambda records: table(records, ";"),
    "b.tsv": lambda records: table(records, "\t"),
    "b.parquet": parquet,
}
NESTED = ("csv", "tsv", "by-name", "parquet")  # what holds no lists, or is tried with one kind
# A run takes a second. It reads by the same door, so some forms do; the others are perplexity's.
TRAINED = ("bom.jsonl", "objects-over-lines.jsonl", "b.csv", "b.parquet")


@pytest.mark.parametrize("records", [ROWS, CHATS], ids=["rows", "chats"])
def test_the_same_rows_are_the_same_in_every_form(read, command, records, tmp_path):
    if command == "chat":
        return  # whose answer is to the last alone
    (tmp_path / "a.jsonl").write_text(lines(records))
    ended, wanted = read(tmp_path / "a.jsonl")
    assert ended.code == 0 and wanted, ended.err
    for name, written in FORMS.items():
        if records is CHATS and any(word in name for word in NESTED):
            continue
        if command == "finetune" and name not in TRAINED:
            continue
        content = written(records)
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        ended, found = read(path)
        assert (ended.code, found) == (0, wanted), f"{name}: {ended.err}"


def test_the_same_rows_are_the_same_wherever_they_come_from(read, command, tmp_path):
    if command == "chat":
        return
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(ROWS))
    (folder / "README.md").write_text("# rows")
    _, wanted = read(folder / "a.jsonl")
    for place in (folder, folder / "*.jsonl"):
        ended, found = read(place)
        assert (ended.code, found) == (0, wanted), ended.err
    ended, _ = read(folder)
    assert "README.md" in ended.out + ended.err  # it is left out, which is said
    reader, writer = os.pipe()
    os.write(writer, lines(ROWS).encode())
    os.close(writer)
    ended, found = read(f"/dev/fd/{reader}")
    os.close(reader)
    assert (ended.code, found) == (0, wanted), ended.err
    assert "pyggml-" not in ended.out, "the name of the copy"


# -- kinds: what each command makes of rows of each purpose -----------------------------------

PAIR = {"prompt": "the ", "chosen": "path", "rejected": "thing"}
ALPACA = {"instruction": "the ", "input": "path", "output": "thing"}
KINDS = {
    "text": "the path to the other thing\n" * 9,
    "texts": lines([{"text": "the path to the other thing"}] * 3),
    "prompts and completions": lines(ROWS),
    "chats": lines(CHATS),
    "chats without answers": lines([{"messages": [user("the ")]}] * 3),
    "instructions": lines([ALPACA] * 3),
    "instructions with history": lines([{**ALPACA, "history": [["a", "b"]]}] * 3),
    "questions and answers": lines([{"question": "the ", "answer": "path"}] * 3),
    "instructions with pairs": lines(
        [{"instruction": "the ", "input": "a", "chosen": "path", "rejected": "thing"}] * 3
    ),
    "prompts": lines([{"prompt": "the "}] * 3),
    "pairs": lines([PAIR] * 3),
    "labels": lines([{"prompt": "the ", "completion": "path", "label": True}] * 3),
    "questions": lines([{"question": "the ", "choices": ["path", "thing"], "answer": 0}] * 3),
}
PREFERS, LEARNS = (
    "--objective dpo (or orpo, simpo, ipo) learns to prefer",
    "--objective kto or classify",
)
ASKS, NO_ANSWER = "`pyggml eval` asks", "has no answer"
OTHERWISE = {  # what else a command says of a kind; the others read it
    **{
        (c, kind): PREFERS
        for c in ("finetune", "perplexity", "imatrix")
        for kind in ("pairs", "instructions with pairs")
    },
    **{(c, "labels"): LEARNS for c in ("finetune", "perplexity", "imatrix")},
    **{(c, "questions"): ASKS for c in ("finetune", "perplexity", "imatrix")},
    ("eval", "labels"): "has single answers with labels",
    **{
        (c, kind): said
        for c in ("finetune", "perplexity", "imatrix", "eval")
        for kind, said in (
            ("chats without answers", "no answer of the assistant"),
            ("prompts", 'is an object without "text" (it has prompt)'),
        )
    },
    **{(c, "text"): "is text, wanted {" for c in ("generate", "chat")},
    **{(c, "texts"): "is a text, in which nothing is asked" for c in ("generate", "chat")},
    ("chat", "chats without answers"): "is no conversation: wanted questions and answers in turn",
    **{
        ("chat", kind): "has no messages"
        for kind in (
            "prompts and completions",
            "prompts",
            "pairs",
            "labels",
            "questions",
        )
    },
}


def test_every_kind_is_read_or_refused_by_name(read, command, tmp_path):
    for kind, content in KINDS.items():
        path = tmp_path / (f"{kind}.txt" if kind == "text" else f"{kind}.jsonl")
        path.write_text(content)
        ended, _ = read(path)
        said = OTHERWISE.get((command, kind))
        assert ended.code == (2 if said else 0), f"{kind}: {ended.err}"
        assert said is None or (said in ended.err and path.name in ended.err), (
            f"{kind}: {ended.err}"
        )
        if command == "generate" and kind in ("chats", "prompts and completions"):
            assert "note: 6 rows with an answer, which is left out" in ended.err


# -- faults: one sentence, whatever the command -------------------------------------------------

FAULTS = {
    "empty.txt": (b" \n", "is empty, wanted text"),
    "utf-16.csv": ("prompt,completion\na,b".encode("utf-16"), "is UTF-16, wanted UTF-8"),
    "latin.csv": ("prompt;completion\nä;b".encode("cp1252"), "in Windows' cp1252 it is ä"),
    "latin.jsonl": ('{"prompt": "ä"}'.encode("cp1252"), "in Windows' cp1252 it is ä"),
    "model.gguf": (b"GGUF and more", "is a GGUF file, wanted text: -m names a model"),
    "comma.json": (b'[{"prompt": "a",\n"completion": "b",}]', "the comma at line 2, column 18 has"),
    "names.csv": (b"Frage;Antwort\na;b\n", "--columns prompt=Frage,completion=Antwort may be m"),
    "none.json": (b"[]", "has no rows; wanted"),
    "nowhere.txt": (None, "cannot be read: No such file"),
}


def test_what_is_wrong_with_a_file_is_one_sentence_for_all(read, command, tmp_path):
    for name, (content, said) in FAULTS.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        ended, _ = read(path)
        assert ended.code == 2 and ended.err.rstrip().count("\n") == 0, f"{name}: {ended.err}"
        assert said in ended.err and str(path) in ended.err, f"{name}: {ended.err}"
