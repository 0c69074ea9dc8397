"""Several files, each read as often as its weight says, and a file of its own held out."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from pyggml.errors import ConfigError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import Corpus, Dataset

from chats import Bytes


def files(tmp_path, *names):
    """Files of 12 windows of 4 tokens, each of letters of its own."""
    for name in names:
        (tmp_path / name).write_text(name[0] * 60)
    return [tmp_path / name for name in names]


CONFIG = DataConfig(ctx=4, val_split=0.0)


def read(train, seed, epoch):
    """How often an epoch reads each window, by the letter of its file."""
    counts = Counter(train.order(seed, epoch).tolist())
    letters = [chr(t) for t in train.tokens[:, 0]]
    return {x: [counts[i] for i, y in enumerate(letters) if x == y] for x in sorted(set(letters))}


def test_a_weight_is_how_often_an_epoch_reads_a_row(tmp_path):
    a, b, c = files(tmp_path, "a.txt", "b.txt", "c.txt")
    train = read_corpus([f"{a}:2", f"{b}:0.25", f"{c}:1.5"], Bytes(), CONFIG).train
    assert train.n_read == 24 + 3 + 18
    epochs = [read(train, seed=3, epoch=e) for e in range(4)]
    for epoch in epochs:
        assert {x: sum(n) for x, n in epoch.items()} == {"a": 24, "b": 3, "c": 18}
        assert set(epoch["a"]) == {2} and set(epoch["c"]) == {1, 2}
    for letter, times in (("b", 1), ("c", 6)):
        assert {*np.sum([epoch[letter] for epoch in epochs], axis=0)} == {times}, "in four epochs"


def test_the_order_depends_on_seed_and_epoch_only(tmp_path):
    (a,) = files(tmp_path, "a.txt")
    train = read_corpus(f"{a}:1.5", Bytes(), CONFIG).train
    first = train.order(3, 1)
    np.testing.assert_array_equal(first, train.order(3, 1))
    assert any((first != train.order(*other)).any() for other in ((3, 2), (4, 1)))


def test_a_weight_of_one_changes_nothing(tmp_path):
    (a,) = files(tmp_path, "a.txt")
    plain, weighted = (read_corpus(f, Bytes(), CONFIG) for f in (a, f"{a}:1"))
    assert plain.digest() == weighted.digest() != read_corpus(f"{a}:2", Bytes(), CONFIG).digest()


def test_no_window_has_rows_of_two_files(tmp_path):
    paths = files(tmp_path, "a.txt", "b.txt")
    for path in paths:
        path.write_text(path.read_text() + path.name[0] * 3)
    corpus = read_corpus(paths, Bytes(), DataConfig(ctx=4, val_split=0.3))
    for part in (corpus.train, corpus.validation):
        for tokens, documents in zip(part.tokens, part.documents, strict=True):
            assert len({*tokens[documents >= 0]}) == 1
    assert [found.n_tokens for found in corpus.files] == [63, 63]


def test_a_file_is_held_out_in_place_of_a_share(tmp_path):
    a, b = files(tmp_path, "a.txt", "b.txt")
    with pytest.raises(ConfigError, match="val_split does nothing beside val_file"):
        DataConfig(ctx=4, val_split=0.3, val_file=(str(b),))
    corpus = read_corpus(a, Bytes(), DataConfig(ctx=4, val_split=0.0, val_file=(str(b),)))
    assert (len(corpus.train), len(corpus.validation)) == (12, 12)
    assert {*corpus.train.tokens.ravel()} == {ord("a")}
    assert {*corpus.validation.tokens.ravel()} == {ord("b")}


@pytest.mark.parametrize("weight", ["0.01", "1e-2", "1.0e-02"])
def test_what_is_read_more_often_by_a_fraction_is_read_once_more_at_least(tmp_path, weight):
    """Twelve windows at 0.01: one in each epoch, another each time."""
    (a,) = files(tmp_path, "a.txt")
    train = read_corpus(f"{a}:{weight}", Bytes(), CONFIG).train
    read_once = [train.order(0, epoch).tolist() for epoch in range(12)]
    assert {len(order) for order in read_once} == {1}
    assert sorted(chain(*read_once)) == list(range(12))


def test_the_digest_of_a_corpus_has_its_shapes():
    """The same numbers in windows of another length are another corpus."""
    numbers = np.arange(24, dtype=np.int32)
    digests = {
        Corpus(Dataset(numbers.reshape(n, -1), numbers.reshape(n, -1)), None).digest()
        for n in (2, 3, 4)
    }
    assert len(digests) == 3
