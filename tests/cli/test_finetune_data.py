"""What the command says of the data, and which settings reach it."""

import json
import os

import pytest
from extras import need


def rows(path, *lengths):
    path.write_text("".join('{"text": "%s"}\n' % ("the path " * n) for n in lengths))
    return path


def test_the_share_that_is_held_out_is_one_of_the_text(finetune, tmp_path):
    ended = finetune(
        "--val-split", 0.1, "--no-val-shuffle", data=rows(tmp_path / "a.jsonl", *[5] * 8, 2, 3)
    )
    said = ended.row("data")
    assert ended.code == 0 and " tokens to learn in 8 documents, " in said
    assert said.endswith("2 documents held out, 11 % of the tokens")


@pytest.mark.parametrize(
    "lengths, why",
    [((20, 60), "each document has more than twice the 5 % that --val-split asks for"),
     ((20,), "there is one document")],
)  # fmt: skip
def test_why_nothing_is_held_out(finetune, tmp_path, lengths, why):
    ended = finetune(data=rows(tmp_path / "a.jsonl", *lengths))
    assert ended.code == 0 and f"           nothing is held out: {why}\n" in ended.out
    assert "validation" not in ended.out


def test_completions_of_a_table_are_learned_with_their_end(finetune, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\n" + "what?,that\n" * 6)
    ended = finetune("--val-split", 0, data=path)  # "that" is th, a, t; and the end
    assert ended.row("data").startswith("a.csv (CSV): 24 tokens to learn in 6 doc")
    assert ended.code == 0 and "step 4 of 4" in ended.row("result")
    refused = finetune("--ctx", 4, data=path)
    assert refused.code == 2 and "record 1 (to line 2) has 9 tokens, the most of 6" in refused.err


def test_special_tokens_reach_the_data(finetune, tmp_path):
    path, found = rows(tmp_path / "a.jsonl", 30), []
    path.write_text(path.read_text().replace("path", "<|endoftext|>"))
    for mode in ("auto", "parse", "plain"):
        ended = finetune("--special-tokens", mode, data=path)
        found.append(int(ended.row("data").split(" tokens")[0].split()[-1].replace(",", "")))
    assert found[0] == found[1] < found[2]


def test_several_files_with_weights_as_options_and_as_settings(finetune, tmp_path):
    """The second one is read every second time; a run of the settings written is the same run."""
    rows(tmp_path / "a.jsonl", 30), rows(tmp_path / "b.jsonl", 60)
    more = ("-f", f"{tmp_path / 'b.jsonl'}:0.5", "--val-split", 0, "--max-steps", 0)
    ended = finetune(*more, data=tmp_path / "a.jsonl")
    assert ended.code == 0 and "a.jsonl (JSON Lines)" in ended.row("data")
    assert "read 0.5 times an epoch" in ended.out
    adapter = (tmp_path / "adapter.gguf").read_bytes()
    again = finetune("--config", tmp_path / "adapter.yaml", "--max-steps", 0, data=None)
    assert again.code == 0 and (tmp_path / "adapter.gguf").read_bytes() == adapter


def test_bad_rows_end_the_run_or_are_told_and_skipped(finetune, tmp_path):
    path = rows(tmp_path / "a.jsonl", 30)
    path.write_text(path.read_text() + "3\n")
    refused = finetune(data=path)
    assert refused.code == 2 and "a.jsonl: line 2 is a JSON number; wanted" in refused.err
    ended = finetune("--skip-bad-rows", data=path)
    assert ended.code == 0
    assert ended.row("skipped") == "a.jsonl: 1 bad row: line 2 is a JSON number"


def test_other_names_are_mapped(finetune, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "what?", "a": "that"}\n' * 6)
    assert "--columns maps other names" in finetune(data=path).err
    assert finetune("--columns", "prompt=q,completion=a", data=path).code == 0
    refused = finetune("--columns", "prompt=q,completion=b", data=path)
    assert 'without "b" (it has q, a)' in refused.err
    assert 'wanted one JSON object with "q" (prompt) and "b" (completion)' in refused.err


def test_folders_and_several_files_held_out_are_told_by_name(finetune, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows(data / "a.jsonl", 5, 6)
    rows(data / "b.jsonl", 7)
    (data / "README").write_text("about the data")
    held_out = [rows(tmp_path / name, 3) for name in ("x.jsonl", "y.jsonl")]
    ended = finetune(*(w for path in held_out for w in ("--val-file", path)), data=data)
    assert ended.code == 0, ended.err
    assert ended.row("left out") == "README is plain text beside files of rows"
    assert ended.row("data").startswith("a.jsonl (JSON Lines): ")
    assert "y.jsonl (JSON Lines): " in ended.out and ended.out.count(", held out\n") == 2
    again = finetune("--config", tmp_path / "adapter.yaml", data=None)
    assert again.code == 0 and again.row("result") == ended.row("result")
    inside = finetune(data=data, output=data / "adapter.gguf")
    assert inside.code == 2 and f"lies in {data}, all of which is read as data" in inside.err


def test_standard_input_is_read_once_and_copied(finetune, text):
    (read, write), before = os.pipe(), os.dup(0)
    os.write(write, text.read_bytes())
    os.close(write)
    os.dup2(read, 0)
    try:
        piped = finetune("--max-memory", "4GB", data="-")
    finally:
        os.dup2(before, 0)
        for each in (read, before):
            os.close(each)
    assert piped.code == 0, piped.err
    assert piped.row("data").startswith("stdin: ")
    assert piped.row("result") == finetune().row("result")


def test_columns_that_are_not_read_and_faults_of_many_rows_are_one_line_each(finetune, tmp_path):
    path, pyarrow = tmp_path / "a.jsonl", need("pyarrow")
    rows = [{"id": i, "text": f"the path {i}", "meta": {}} for i in range(12)]
    bad = [{"id": i, "words": "a"} for i in range(9)]
    lines = [json.dumps(row) + "\n" for row in [*rows, *bad]]
    path.write_text("".join(lines))
    ended = finetune("--skip-bad-rows", data=path)
    assert ended.code == 0 and ended.row("not read") == "a.jsonl: 2 columns: id, meta"
    said = 'a.jsonl: 9 bad rows: line 13 is an object without "text" (it has id, words)'
    assert ended.row("skipped").startswith(said)
    assert ended.row("skipped").endswith(" (so too line 14, line 15, line 16, line 17 and 4 more)")
    again = finetune("--skip-bad-rows", data=path)
    assert (again.row("not read"), again.row("skipped")) == (
        *(ended.row("not read"), ended.row("skipped")),
    ), "also from the cache of tokens"
    named = finetune("--skip-bad-rows", "--columns", "text=words", data=path)
    assert named.row("not read") == "a.jsonl: 1 column: id"
    table = pyarrow.Table.from_pylist([{"text": "the path", "id": 3}] * 9)
    from pyarrow import parquet

    parquet.write_table(table, tmp_path / "a.parquet")
    ended = finetune(data=tmp_path / "a.parquet")
    assert ended.row("not read") == "a.parquet: 1 column: id"


def test_the_command_reports_on_rows_and_records_it(finetune, tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"the path {i}"} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[3]]))
    ended = finetune("--preview", 1, "--val-split", 0, data=path)
    assert ended.code == 0 and "1 row repeating an earlier one" in ended.row("findings")
    assert ended.row("texts").startswith("13 rows of text, each ends in <|endoftext|> once (--no")
    assert "half up to" in ended.row("tokens") and ended.row("scripts") == "Latin 100 %"
    assert ended.row("languages")
    assert len(ended.row("highest").split()[0]) == 4
    lines = (tmp_path / "adapter.metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (run,) = (r for r in records if r["event"] == "run")
    assert run["data"]["n_rows"] == 13 and run["data"]["findings"][0]["n"] == 1
    (last,) = (r for r in records if r["event"] == "answers")
    assert last["languages"].keys() == {"shares", "untold", "findings"}
    assert len(last["rows"]) >= 8 and all(len(row) == 3 for row in last["rows"])
    assert [row[2] for row in last["rows"]] == sorted(
        (row[2] for row in last["rows"]), reverse=True
    )


def test_a_switch_takes_a_value_as_other_trainers_write_it(finetune, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "the path to the other thing"}\n' * 9)
    settings = tmp_path / "adapter.yaml"
    words = [("--packing", "false"), ("--packing=no",), ("--no-packing",), ("--packing", "True")]
    for given, wanted in zip(words, ["false", "false", "false", "true"], strict=True):
        assert finetune(*given, "--report-to", "none", data=path).code == 0
        assert f"packing: {wanted}" in settings.read_text(), given
    assert not [p for p in tmp_path.iterdir() if p.is_dir()], "no folder of a tracker"
