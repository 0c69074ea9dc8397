"""A text coloured by loss: escaped, its white space to be seen, its numbers under the pointer."""

from html.parser import HTMLParser

import numpy as np
import pytest

from pyggml.look.draw.tokens import LEVELS, fragment, level, texts
from pyggml.look.lens import TokenTable

pytestmark = pytest.mark.quick

NAN = float("nan")


class Spans(HTMLParser):
    """The text, class and title of every span of the second inner div, the coloured text."""

    def __init__(self, page):
        super().__init__()
        self.spans, self.tags = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "span":
            self.spans.append(["", dict(attributes)])

    def handle_data(self, data):
        if self.spans:
            self.spans[-1][0] += data

    @property
    def tokens(self):
        return [(text, about["class"], about["title"]) for text, about in self.spans if
                "title" in about]  # fmt: skip


def drawn(pieces, losses, ranks=None, op_counts=None):
    n = len(pieces)
    ranks = np.zeros(n, int) if ranks is None else np.array(ranks)
    op_counts = np.ones(n, bool) if op_counts is None else np.array(op_counts)
    table = TokenTable(np.arange(n) + 7, np.array(losses), ranks, op_counts)
    return Spans(fragment(table, pieces))


def test_a_token_has_its_loss_as_colour_and_its_numbers_as_words():
    found = drawn([b"The", b" cat"], [NAN, np.log(8)], [-1, 2], [False, True])
    assert found.tokens == [
        ("The", "masked", "token 7  b'The'\nnot counted"),
        (" cat", "t4", "token 8  b' cat'\nloss 2.079\nprobability 0.125\nrank 3"),
    ]
    assert [level(x) for x in (NAN, 0.0, *LEVELS)] == [0, 0, *range(1, 9)]


def test_white_space_is_seen_where_it_matters():
    pieces = [b" a", b"  b", b" ", b"\n", b"\tc", b"\n\n"]
    assert [t for t, *_ in drawn(pieces, [1.0] * 6).tokens] == [
        *(" a", "··b", "·", "↵\n", "⇥c", "↵\n↵\n")
    ]


def test_texts_of_others_are_no_markup_and_command_nothing():
    hostile = '<script>"&\x1b[31m\u202e'.encode()
    found = drawn([hostile, b'"><img src=x onerror=1>'], [1.0, 2.0])
    assert found.tags == {"div", "span", "i"}
    text, _, about = found.tokens[0]
    assert text == '<script>"&⟨1B⟩[31m⟨202E⟩' and "\x1b" not in about and "\u202e" not in about
    assert "<img" in found.tokens[1][0]


def test_a_character_in_several_tokens_stands_at_the_last():
    euro = "€".encode()
    pieces = [b"a", euro[:1], euro[1:2], euro[2:], b"", b"\xff", euro[:2]]
    assert list(texts(pieces)) == ["a", "‥", "‥", "€", "", "\ufffd", "\ufffd"]


@pytest.mark.parametrize("n", [1, 2])
def test_short_texts(n):
    assert len(drawn([b"x"] * n, [NAN, 1.0][:n]).tokens) == n
