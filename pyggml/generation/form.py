"""Answers that follow a form: a JSON schema, a regular expression or a grammar.

The package llguidance compiles a form, and says after each token which tokens may come next. The
logits of all others become -inf before the samplers see them, so whatever a model prefers, its
answer follows the form, or the beginning of one if it ends early.

form      text → compiled once per vocabulary, and copied for each answer
mask      computed by another thread while the model makes the next logits
forced    tokens that the form leaves no choice of: they are fed together, without sampling
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.chat.tools.thoughts import opened_by
from pyggml.errors import ConfigError
from pyggml.extras import how_to_install
from pyggml.generation.sampling import FORMS, Sampling
from pyggml.tokenizer import Tokenizer

MOST_FORCED = 32  # tokens fed in one pass
_KEPT = 8  # compiled forms of a vocabulary
_MOST_STATES = 20_000  # of a form's automaton, 2 kB each
_BEFORE = 16  # tokens of a prompt's end that may open a thought
_SPACE = (
    r"( |\n{1,2}[ \t]{0,20})"  # between parts of JSON, as in llama.cpp: models write no end of it
)
# In Lark's form: texts and classes, which stay, and any character; in llama.cpp a new line is one.
_ANY = re.compile(r'("(?:[^"\\]|\\.)*"|/\[(?:[^\]\\]|\\.)*\]/)|/\./')
_TOKEN = re.compile(r"(?:^|[\s(|])(!?<\[?\w+\]?>)")  # of llama.cpp's vocabulary, by name or id
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


class Follower:
    """One answer's place in its form.

    is_complete   whether the form is at its end: nothing may follow
    """

    def __init__(self, matcher: Any, tokenizer: Tokenizer, forces: bool, after: str = "") -> None:
        """after: the text that ends a thought, which no form holds; the answer begins behind it."""
        self._matcher, self._forces, self._after = matcher, forces, after
        self._thought, self._characters = "", tokenizer.stream(special=True)
        self._coming: Future[bytes] | None = None
        self.is_complete = False
        self.prepare()

    def mask(self, n: int) -> np.ndarray | None:
        """(n,) bool: which of n tokens may come next; None: all."""
        if self._after:
            return None
        coming, self._coming = self._coming, None
        bits = self._matcher.compute_bitmask() if coming is None else coming.result()
        self._check()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:n]
        return np.pad(allowed, (0, n - len(allowed))).view(np.bool_)

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow tokens that the answer goes on with."""
        for i, token in enumerate(tokens):
            if not self._after:
                self._settle()
                self._matcher.consume_tokens(list(tokens[i:]))
                self._check()
                self.is_complete = self._matcher.is_stopped()
                return
            self._thought += self._characters.feed(token)
            if self._after in self._thought:  # what the same token has behind it is not held
                self._after = self._thought = ""

    def forced_tokens(self, most: int) -> list[int]:
        """Up to `most` tokens, also of MOST_FORCED, that must come next. They are not accepted."""
        if not self._forces or self._after or self.is_complete or most < 1:
            return []
        self._settle()
        return list(self._matcher.compute_ff_tokens()[: min(most, MOST_FORCED)])

    def n_fitting(self, tokens: Sequence[int]) -> int:
        """How many first tokens may come next, one after the other."""
        if self._after or not tokens:
            return len(tokens)
        if self._coming is not None:  # its mask is still to be had
            self._coming.result()
        n: int = self._matcher.validate_tokens(list(tokens))
        return n

    def prepare(self) -> None:
        """Begin to compute the mask."""
        if not self._after and not self.is_complete:
            self._settle()
            self._coming = _threads().submit(self._matcher.compute_bitmask)

    def _settle(self) -> None:
        """Wait for the thread that has the matcher, which serves one at a time."""
        if self._coming is not None:
            self._coming.result()
            self._coming = None

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _fault("", self._matcher.get_error())


def follower(
    how: Sampling, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray
) -> Follower | None:
    """The place of an answer to this prompt in the settings' form; None if they have none.

    A prompt that ends with <think> or the like has opened a thought: the form begins behind it.
    Raises ConfigError for a form that is none, and if llguidance is missing.
    """
    compiled = compile_form(how, tokenizer)
    if compiled is None:
        return None
    end = [t for t in map(int, prompt[-_BEFORE:]) if t < tokenizer.n_vocab]
    thought = opened_by(tokenizer.decode(end, special=True))
    after = thought.close if thought else ""
    return Follower(compiled.deep_copy(), tokenizer, _vocabulary(tokenizer).forces, after)


def compile_form(how: Sampling, tokenizer: Tokenizer) -> Any | None:
    """llguidance's matcher at the start of the settings' form, kept for later; None without a form.

    Raises as `follower`. A form takes at most a second, bounded by llguidance's own limits.
    """
    forms = [(name, text) for name in FORMS if (text := getattr(how, name)) is not None]
    if not forms:
        return None
    (kind, text), *_ = forms
    _llguidance(kind)
    return _vocabulary(tokenizer).compile(kind, text)


class _Vocabulary:
    """A tokenizer's tokens as llguidance reads them, and the forms that were compiled for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        library, ids = _llguidance(), range(tokenizer.n_vocab)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id, special=True) for id in ids]
        self.special_token_ids = [id for id in ids if not tokenizer.token_bytes(id)]
        ends = [id for id in ids if tokenizer.is_eog(id)]
        if not ends:  # one that no model writes
            ends = [len(self.tokens)]
            self.tokens.append(b"</s>")
            self.special_token_ids += ends
        self.eos_token_id = ends[0]
        self._longest_token = max(map(len, self.tokens))
        self._encode = tokenizer.encode
        # One that puts a space before a text cannot say how a text goes on.
        self.forces = self._spells("{", tokenizer.encode("{", add_special=False))
        self._ids = {text: id for id, text in enumerate(self.tokens)} if not self.forces else {}
        self._tokenizer = library.LLTokenizer(library.TokenizerWrapper(self), eos_token=ends)
        self._lock, self._compiled = Lock(), OrderedDict[tuple[str, str], Any]()

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids that spell a text."""
        raw = text.encode() if isinstance(text, str) else text
        shown = raw.decode("utf-8", "replace")
        ids = self._encode(shown, add_special=False) if self.forces else []
        return ids if self._spells(shown, ids) else self._longest(raw)

    def _spells(self, text: str, ids: Sequence[int]) -> bool:
        return b"".join(self.tokens[id] for id in ids) == text.encode()

    def _longest(self, raw: bytes) -> list[int]:
        """Of each place the longest token."""
        ids_by_text = self._ids or {text: id for id, text in enumerate(self.tokens)}
        ids, at = list[int](), 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest_token), at, -1)
            end = next((end for end in ends if raw[at:end] in ids_by_text), None)
            if end is None:
                return ids
            ids.append(ids_by_text[raw[at:end]])
            at = end
        return ids

    def compile(self, kind: str, text: str) -> Any:
        with self._lock:
            if (kind, text) not in self._compiled:
                self._compiled[kind, text] = self._match(kind, text)
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            return self._compiled[kind, text]

    def _match(self, kind: str, text: str) -> Any:
        try:
            grammar = _READERS[kind](text)
        except ValueError as error:
            raise _fault(kind, str(error)) from None
        library = _llguidance()
        limits = library.LLParserLimits(max_lexer_states=_MOST_STATES)
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _fault(kind, matcher.get_error())
        return matcher


_VOCABULARIES = WeakKeyDictionary[Tokenizer, _Vocabulary]()
_LOCK = Lock()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    """That of a tokenizer, made once: it takes up to seconds."""
    with _LOCK:
        if tokenizer not in _VOCABULARIES:
            _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
        return _VOCABULARIES[tokenizer]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="pyggml-form")


def _llguidance(setting: str = "the answer's form") -> Any:
    """The package. ConfigError, about the setting that wants it, if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError([(setting, f"needs llguidance: {how_to_install('forms')}")]) from None
    return llguidance


# -- forms as llguidance reads them ---------------------------------------------------------------


def _read_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("is no object, wanted a JSON schema")
    grammar: str = _llguidance().LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": _SPACE}
    )
    return grammar


def _read_regex(text: str) -> str:
    grammar: str = _llguidance().LLMatcher.grammar_from_regex(text)
    return grammar


def _read_grammar(text: str) -> str:
    """Of GBNF, as llama.cpp has it, or Lark."""
    if "::=" not in text:
        grammar: str = _llguidance().LLMatcher.grammar_from_lark(text)
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(_ESCAPE.sub(_character, text))
    except (RecursionError, IndexError, KeyError):
        raise ValueError("is no GBNF, or nested too deeply") from None
    except Exception as error:  # of a class of its own, with the place
        token = _TOKEN.search(text)
        if token:
            raise ValueError(f"has {token[1]}, wanted characters: tokens have no names") from None
        raise ValueError(str(error)) from None
    return _llguidance().LLMatcher.grammar_from_lark(
        _ANY.sub(lambda match: match[1] or "/(?s:.)/", lark)
    )


def _character(escape: re.Match[str]) -> str:
    """The character of \\x41, \\u0041 or \\U00000041; one that has a meaning of its own stays."""
    digits = escape[1] or escape[2] or escape[3]
    if digits is None or int(digits, 16) > 0x10FFFF:
        return escape[0]
    character = chr(int(digits, 16))
    if character.isalnum() and not 0xD800 <= ord(character) < 0xE000:
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 0x80 else character


_READERS: dict[str, Callable[[str], str]] = {
    "json_schema": _read_schema,
    "regex": _read_regex,
    "grammar": _read_grammar,
}


def _fault(kind: str, what: str) -> ConfigError:
    """One sentence of what llguidance says, which may have lines of the grammar and its state."""
    lines = [line.strip() for line in what.splitlines()]
    said = " ".join(line for line in lines if line and set(line) - set("^ "))
    said = said.split(" <state>")[0].replace("NoExtensionBias", "no token fits here")
    fault = f"cannot be followed: {said[:300]}"
    return ConfigError([(kind, fault) if kind else f"the answer's form {fault}"])
