"""Windows and batches: every target once, nothing seen across documents; files that do not fit."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyggml.errors import DataError, PyggmlError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import Document, Documents, pack, read_rows
from pyggml.lora.data.texts import fit_documents
from pyggml.lora.data.tokens.spill import GrowingArray
from pyggml.lora.data.windows.units import Units


class Letters:
    """A tokenizer of one token for each character, with an end of text for documents."""

    end = 1
    bos_id, eos_id, eot_id, add_bos, add_eos = None, end, None, False, True
    chat_templates = ()

    def encode(self, text, parse_special=False):
        return [2 + ord(c) % 50 for c in text] + [self.end]


class Control(Letters):
    """The same between BOS and EOS, which have names in the text."""

    start = 0
    bos_id, add_bos = start, True

    def encode(self, text, parse_special=False):
        parts = re.split("(<s>|</s>)", text) if parse_special else [text]
        named = {"<s>": [self.start], "</s>": [self.end]}
        inside = [i for p in parts for i in named.get(p, Letters.encode(self, p)[:-1])]
        return [self.start, *inside, self.end]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def test_text_windows_follow_each_other_without_overlap(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(ord("a") + i % 26) for i in range(99)))
    corpus = read_corpus(path, Letters(), DataConfig(ctx=9, val_split=0.2))
    ids = Letters().encode(path.read_text())
    assert len(corpus.train) == 8 and len(corpus.validation) == 2
    np.testing.assert_array_equal(corpus.train.tokens.reshape(-1), ids[:80])
    np.testing.assert_array_equal(corpus.validation.tokens.reshape(-1), ids[80:])


def test_arguments_of_another_kind_are_named():
    with pytest.raises(DataError, match=r"^\(\) is no tokenizer, wanted one, as model.tokenizer"):
        read_corpus("a.txt", ())
    with pytest.raises(DataError, match=r"^\{'text': 'a'\} is no file; `corpus` takes rows"):
        read_corpus([{"text": "a"}], Letters())


def test_documents_are_held_out_whole(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["abcdefgh" * 3, "ijkl" * 9, "xyz" * 5])
    corpus = read_corpus(path, Letters(), DataConfig(ctx=6, val_split=0.3, val_shuffle=False))
    trained = set(corpus.train.tokens[corpus.train.documents >= 0].tolist())
    held_out = corpus.validation.tokens[corpus.validation.documents >= 0].tolist()
    ids = Letters().encode("xyz" * 5)  # in pieces, the last token of one the first of the next
    assert held_out == [*ids[:7], *ids[6:13], *ids[12:]]
    assert not trained & set(held_out[:-1])


HELD_OUT = [
    ([1, 3], 0.05, []),  # the last one alone is 75 %, the first one 25 %
    ([3, 1], 0.25, [1]),
    ([5] * 10, 0.05, [9]),  # as near as none: one is worth more
    ([5] * 9, 0.05, []),
    ([5] * 20, 0.1, [19, 18]),
    ([10, 10, 10, 2, 70], 0.1, [3, 2]),  # not the long one at the end, though it comes first
    ([1, 1, 98], 0.5, [1, 0]),
    ([4], 0.5, []),
    ([4, 4], 0.5, [1]),
    ([4, 4], 0.0, []),
]


@pytest.mark.parametrize("lengths, share, wanted", HELD_OUT)
def test_what_is_held_out_is_a_share_of_the_text_not_of_the_documents(
    tmp_path, lengths, share, wanted
):
    """Documents of so many times ten tokens, of which each has a letter of its own."""
    texts = [chr(ord("a") + i) * (10 * n - 1) for i, n in enumerate(lengths)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    corpus = read_corpus(
        path, Letters(), DataConfig(ctx=4, val_split=share, val_shuffle=share == 0)
    )
    assert (corpus.n_documents, corpus.n_held_out) == (len(lengths), len(wanted))
    held_out = corpus.validation.tokens.ravel().tolist() if corpus.validation else []
    for i, text in enumerate(texts):
        letter = Letters().encode(text)[0]
        assert (letter in held_out) == (i in wanted)
        assert (letter in corpus.train.tokens) == (i not in wanted)


def test_rows_in_order_of_class_are_held_out_of_every_class(tmp_path):
    """As if the file were shuffled before it is split, the same rows each time."""
    texts = [letter * 9 for letter in "aaaaaaaaaabbbbbbbbbb"]
    path = write_lines(tmp_path / "a.jsonl", texts)

    def held_out(**settings):
        read = DataConfig(ctx=16, val_split=0.3, **settings)
        tokens = read_corpus(path, Letters(), read).validation.tokens
        return [int((tokens == Letters().encode(letter)[0]).sum()) // 9 for letter in "ab"]

    assert held_out(val_shuffle=False) == [0, 6]
    drawn = held_out()
    assert sum(drawn) == 6 and min(drawn) > 0 and held_out() == drawn


TEXT = "a <s>b</s> c"
PLAIN, PARSED = Control().encode(TEXT), Control().encode(TEXT, parse_special=True)
MODES = [
    ("txt", "auto", PLAIN),
    ("txt", "plain", PLAIN),
    ("txt", "parse", PARSED),
    ("jsonl", "auto", PARSED),
    ("jsonl", "plain", PLAIN),
    ("jsonl", "parse", PARSED),
]


@pytest.mark.parametrize("ending, mode, wanted", MODES)
def test_special_tokens_are_tokens_where_they_are_meant(tmp_path, ending, mode, wanted):
    path = tmp_path / f"a.{ending}"
    path.write_text(TEXT if ending == "txt" else json.dumps({"text": TEXT}))
    n = len(wanted)
    corpus = read_corpus(path, Control(), DataConfig(ctx=n - 1, val_split=0.0, special_tokens=mode))
    np.testing.assert_array_equal(corpus.train.tokens, [wanted])


def test_the_ends_that_a_text_has_are_not_doubled(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["<s>abc</s>"])
    wanted = [Control.start, *Letters().encode("abc")]
    np.testing.assert_array_equal(
        read_corpus(path, Control(), DataConfig(ctx=4, val_split=0.0)).train.tokens, [wanted]
    )


def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path):
    """The byte order mark, which some editors write; also of files that were put together."""
    row = '{"text": "abcdefgh"}\n'
    for name, text in (("a.txt", "abcdefgh"), ("a.jsonl", f"{row}\ufeff{row}")):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8-sig")
        train = read_corpus(path, Letters(), DataConfig(ctx=8, val_split=0.0)).train
        assert train.tokens[0].tolist() == Letters().encode("abcdefgh")


def test_no_split_holds_nothing_out(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["abcdefgh", "ijkl"])
    assert read_corpus(path, Letters(), DataConfig(ctx=4, val_split=0.0)).validation is None


ROWS = [{"text": "abcdefgh"}, {"text": 'ij "kl", m'}]
CSV = 'n,text\n1,abcdefgh\n2,"ij ""kl"", m"\n'
FORMATS = [
    ("a.jsonl", "\n".join(map(json.dumps, ROWS)), "JSON Lines"),
    ("a.txt", "\n".join(map(json.dumps, ROWS)), "JSON Lines"),
    ("a.json", "\n\n".join(map(json.dumps, ROWS)), "JSON Lines"),
    ("a.json", json.dumps(ROWS, indent=1), "JSON"),
    ("a", json.dumps(ROWS), "JSON"),
    ("a.csv", CSV, "CSV"),
    ("a.txt", CSV.replace("\n", "\r\n"), "CSV"),
    ("a.csv", CSV.replace("n,", "n;").replace("1,", "1;").replace("2,", "2;"), "CSV"),
    ("a.tsv", CSV.replace("n,", "n\t").replace("1,", "1\t").replace("2,", "2\t"), "CSV"),
]


@pytest.mark.parametrize("name, content, kind", FORMATS)
def test_a_format_is_found_by_the_content(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content.encode())
    found, rows = read_rows(tmp_path / name)
    assert (found, [row.text for row in rows]) == (kind, [row["text"] for row in ROWS])


@pytest.mark.parametrize(
    "content", ["text\nand more", "{ a set }", '{"a": 1}', "[1, 2]", "Sir, text", '["text"]', "{"]
)
def test_what_only_looks_like_rows_is_text(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    assert [(k, [r.text for r in rows]) for k, rows in [read_rows(tmp_path / "a.txt")]] == [
        ("text", [content])
    ]


def test_of_prompt_and_completion_the_completion_is_learned(tmp_path):
    """And the end after it; a row lies whole in a window, where it has the room."""
    path = tmp_path / "a.jsonl"
    pairs = [("ab", "cdef"), ("gh", "ij"), ("", "klmno"), ("p", "q")]
    rows = ({"prompt": p, "completion": c} for p, c in pairs)
    path.write_text("\n".join(map(json.dumps, rows)))
    train = read_corpus(path, Letters(), DataConfig(ctx=11, val_split=0.0)).train
    learned = Letters().encode
    wanted = [[*learned("cdef"), *learned("ij")], [*learned("klmno")[1:], *learned("q")]]
    assert len(train) == 2
    for batch, ids in zip(train.batches(range(2), 1), wanted, strict=True):
        assert batch.targets[batch.weights > 0].tolist() == ids
    assert train.n_targets() == sum(map(len, wanted))
    whole = [[*learned("abcdef"), *learned("ghij")], [*learned("klmno"), *learned("pq")]]
    for tokens, documents, ids in zip(train.tokens, train.documents, whole, strict=True):
        assert tokens[documents >= 0].tolist() == ids


def test_a_token_across_the_seam_is_learned(tmp_path):
    class Pairs(Letters):
        """Every two characters are one token."""

        def encode(self, text, parse_special=False):
            return [2 + sum(map(ord, text[i : i + 2])) % 997 for i in range(0, len(text), 2)]

    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "abc", "completion": "def"}')
    train = read_corpus(path, Pairs(), DataConfig(ctx=3, val_split=0.0)).train
    assert train.trained.tolist() == [[False, True, True, True]]
    assert train.tokens[0].tolist() == [*Pairs().encode("abcdef"), Letters.end]


def test_an_answer_is_never_cut_without_a_word(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\nab,c\nde,fghijklm\nabcdefgh,ijkl\n")
    wanted = r"record 3 .* 13 tokens, the most of 2 that are too long, wanted at most 9, .* --ctx"
    with pytest.raises(DataError, match=wanted):
        read_corpus(path, Letters(), DataConfig(ctx=8, val_split=0.0))
    assert read_corpus(path, Letters(), DataConfig(ctx=12, val_split=0.0)).n_documents == 3


@given(
    st.lists(st.text("abcdefghij", min_size=1, max_size=15), min_size=1, max_size=8),
    st.integers(2, 7),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_batches_hold_every_target_once_and_cross_no_document(
    tmp_path_factory, texts, ctx, size, seed
):
    path = write_lines(tmp_path_factory.getbasetemp() / "drawn.jsonl", texts)
    documents = [Letters().encode(t) for t in texts]
    train = read_corpus(path, Letters(), DataConfig(ctx=ctx, val_split=0.0)).train
    order = train.order(seed, epoch=0)
    assert sorted(order) == list(range(len(train)))
    found, total = [], 0.0
    for batch in train.batches(order, size):
        assert len(batch.tokens) == size * ctx
        counted = np.flatnonzero(batch.weights)
        found += zip(batch.tokens[counted].tolist(), batch.targets[counted].tolist(), strict=True)
        total += batch.weights.sum(dtype=np.float64)
        for i, (start, end) in enumerate(batch.span):
            assert 0 <= start <= i and end == i + 1
            assert i // ctx == start // ctx
            assert batch.positions[i] == i - start
            inside = batch.tokens[start:i]
            assert Letters.end not in inside, "a token sees past the end of the document before it"
    assert sorted(found) == sorted(pair for ids in documents for pair in pairwise(ids))
    assert total == pytest.approx(1.0, abs=1e-5)
    every, second = (list(train.batches(order, size, which)) for which in (None, range(1, 2)))
    assert [len(b.tokens) for b in second] == [
        len(b.tokens) if i == 1 else 0 for i, b in enumerate(every)
    ]
    assert all((a.weights == b.weights).all() for a, b in zip(every[1:2], second[1:2], strict=True))


def test_the_order_depends_on_seed_and_epoch_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 60)
    train = read_corpus(path, Letters(), DataConfig(ctx=5, val_split=0.0)).train
    first = train.order(3, 1)
    np.testing.assert_array_equal(first, train.order(3, 1))
    assert (first != train.order(3, 2)).any() and (first != train.order(4, 1)).any()


def test_other_text_has_another_digest(tmp_path):
    digests = set()
    for i, text in enumerate(["abcdefghijkl", "abcdefghijkm"]):
        path = tmp_path / f"{i}.txt"
        path.write_text(text)
        digests.add(read_corpus(path, Letters(), DataConfig(ctx=3, val_split=0.3)).digest())
    assert len(digests) == 2


FAULTY = [
    ("a.txt", b"", "a.txt: is empty"),
    ("a.txt", b" \n\t", "a.txt: is empty"),
    ("a.txt", b"abc\xff", "line 1: byte 3 is 0xff, which is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: byte 24 is 0xff, which is not UTF-8"),
    ("a.txt", "words".encode("utf-16"), "is UTF-16, wanted UTF-8"),
    (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\\ud800"}',
        r'line 2 is .* "text" has .ud800, half of a',
    ),
    ("a.jsonl", b'{"text": "a"}\n{}', r'line 2 is an object without "text" \(it has nothing\)'),
    ("a.jsonl", b'{"text": null}', 'whose "text" is a null; wanted one JSON object with a string'),
    ("a.jsonl", b"null", "line 1 is a JSON null"),
    ("a.txt", b"abcd", "holds 5 tokens, wanted at least 9 for one window of 8 .* smaller --ctx"),
    ("a.jsonl", b'{"text": "abc"}\n{"text": 3}\n', "is a number"),
    (
        "a.jsonl",
        b'{"text": "abc"}\n\n{"text": 3}\n',
        'line 3 is an object whose "text" is a number',
    ),
    ("a.jsonl", b'["abc"]\n', "line 1 is a JSON list; wanted one JSON object"),
    ("a.jsonl", b'{"txt": "abc"}\n', r'line 1 is an object without "text" \(it has txt\)'),
    (
        "a.jsonl",
        b'{"text": ""}\n',
        'line 1 is an object whose "text" is empty; .* that is not empty',
    ),
    ("a.json", b"{\n", "line 1 is no JSON"),
    ("a.jsonl", b"[" * 100_000, "line 1 is no JSON"),
    ("a.json", b'[{"text": "a"}, 3]', "item 2 is a JSON number; wanted"),
    ("a.json", b"[]", "has no rows; wanted"),
    (
        "a.csv",
        b"n,words\n1,a\n",
        "columns n, words: --columns prompt=n,completion=words may be meant; wanted text, or",
    ),
    ("a.csv", b'n,text\n1,"a\nb"\n2\n', r'record 2 \(to line 4\) is .* whose "text" is a null'),
    ("a.jsonl", b'{"prompt": "a", "completion": " "}', 'whose "completion" is empty; wanted'),
    ("a.jsonl", b'{"prompt": 1, "completion": "b"}', 'whose "prompt" is a number; wanted'),
    (
        "a.jsonl",
        b"1\n" * 8 + b"[]\n",
        r"line 1 is a JSON number \(so too line 2, line 3, line 4, line 5 and 3 more\); line 9 is "
        "a JSON list; wanted",
    ),
    (
        "a.jsonl",
        b"".join(b'{"text": "a", "weight": %d}\n' % n for n in range(2, 10)),
        'line 5 is an object whose "weight" is 6, wanted 0 to 1; and 3 more; wanted',
    ),
]


@pytest.mark.parametrize("name, content, message", FAULTY)
def test_a_file_that_does_not_fit_is_explained(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus(path, Letters(), DataConfig(ctx=8, val_split=0.1))


@pytest.mark.parametrize(
    ("name", "said"), [("missing.txt", "cannot be read"), (".", "this folder holds no data")]
)
def test_what_cannot_be_read_is_named(tmp_path, name, said):
    with pytest.raises(DataError, match=said):
        read_corpus(tmp_path / name, Letters(), DataConfig(ctx=8, val_split=0.1))


def test_what_is_learned_is_noted_from_the_first_document_on():
    """Documents that are learned whole, then one with a mask, then one with weights."""
    mask, weights = np.array([False, True, True]), np.array([0, 0.5, 1], np.float32)
    for masks in ([None, mask], [None, None, mask, weights], [weights, None, weights]):
        made = Documents.of([Document([1, 2, 3], trained) for trained in masks])
        wanted = [np.ones(3) if trained is None else trained for trained in masks]
        np.testing.assert_array_equal(made.trained, np.concatenate(wanted))


def test_a_text_fills_a_window_and_has_the_token_after_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh")
    tokenizer = Letters()
    n = len(tokenizer.encode("abcdefgh"))
    assert len(read_corpus(path, tokenizer, DataConfig(ctx=n - 1, val_split=0.0)).train) == 1
    with pytest.raises(DataError, match="ctx"):
        read_corpus(path, tokenizer, DataConfig(ctx=n, val_split=0.0))


def test_a_disk_without_room_for_tokens_is_named(tmp_path, monkeypatch):
    def full(**about):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr("pyggml.lora.data.tokens.spill._IN_MEMORY", 8)
    with pytest.raises(PyggmlError) as caught:
        GrowingArray(np.int32, tmp_path).extend([1, 2, 3])
    assert str(caught.value) == (
        f"{tmp_path}: tokens cannot be written there: No space left on device"
    )


def test_rows_are_the_same_however_many_windows_are_looked_at_together(monkeypatch):
    data = pack([Document(list(range(n)), np.arange(n) > 0) for n in (3, 9, 4, 7, 2, 8)], 9, True)
    whole = Units.of(data)
    monkeypatch.setattr("pyggml.lora.data.windows.batches.BLOCK", 10)
    parts = Units.of(data)
    assert len(whole) == 6 and len(list(data.blocks())) > 1
    assert whole.starts.tolist() == parts.starts.tolist()
    assert whole.lengths.tolist() == parts.lengths.tolist()


@pytest.mark.parametrize("n", [1, 2])
def test_plain_documents_are_cut_to_a_window(n):
    """The second one is longer than a window of n; of two tokens the second one is learned."""
    ids = np.arange(1, 8, dtype=np.int32)
    both = Documents(ids, np.array([0, n]), np.array([n, 5]))
    kept, n_cut = fit_documents(both, n, "truncate")
    assert (kept.lengths.tolist(), n_cut) == ([n, n + 1], 1)
    kept, n_cut = fit_documents(both, n, "drop")
    assert (kept.lengths.tolist(), n_cut) == ([n], 0)


@pytest.mark.parametrize("n, wanted", [(0, []), (1, [4]), (3, [1, 4, 7]), (20, [*range(9)])])
def test_a_few_of_many_are_spread_evenly(n, wanted):
    assert Units(np.arange(9), np.ones(9, np.int64)).spread(n).tolist() == wanted
