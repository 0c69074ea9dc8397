"""A conversation: rounds of a user and a model, kept within the model's context.

The cache keeps what the model has read: of a new prompt only the tokens behind those that are
already there are fed. Once a prompt does not fit, its oldest rounds are left out until it takes
half of the context, so that the cache serves the rounds that follow. The system's text stays.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyggml.chat import ChatEncoder, ChatTemplate, Message, answer_ending
from pyggml.chat.words import ALPACA
from pyggml.errors import DataError, cause_of
from pyggml.files import open_regular, replacing
from pyggml.generation import CacheType, Completion, Piece, Sampling, Session
from pyggml.generation.drafts import n_common
from pyggml.model import Model

_SEEDS = 1 << 64
_AT_ONCE = 512  # tokens of a prompt that are fed before a stop is heard


@dataclass(frozen=True, slots=True)
class Round:
    """What the user said, and what the model answered."""

    question: str
    answer: str


class Conversation:
    """A model that remembers the rounds before.

    rounds      all of them, the first ones too that no longer fit
    n_dropped   how many of these the model no longer reads
    n_ctx       most tokens that the model reads and writes
    how         its sampling, which also stops at what ends a turn in the template
    """

    def __init__(
        self,
        model: Model,
        template: ChatTemplate,
        how: Sampling,
        n_ctx: int,
        n_tokens: int | None = None,
        system: str | None = None,
        cache_type: CacheType = "f16",
        draft: Model | None = None,
    ) -> None:
        """n_tokens: most of an answer; None: until the context is full. cache_type, draft: as a
        Session has them.

        Raises ConfigError as a Session does, and TemplateError if the template does not take a
        user's message, or not the system's.
        """
        self.rounds: list[Round] = []
        self.n_dropped, self.n_ctx = 0, n_ctx
        self.system: str | None = None
        self.model, self.tokenizer, self._n_tokens = model, model.tokenizer, n_tokens
        self._encoder = ChatEncoder(template, model.tokenizer)
        self._encoder.prompt([_message("user", "a")])
        self.set_system(system)
        # Of a model without a token for it, the end of a turn is but text.
        ending = answer_ending(template)
        self.how = replace(how.with_seed(), stop=(*how.stop, *filter(None, [ending])))
        self._n_answers = 0  # each answer has a seed of its own
        self._session = Session(model, n_ctx, cache_type, draft)

    def ask(self, question: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """The pieces of the answer, without white space before it.

        It ends early once `stopped` says so; what was said stays. Raises DataError if the question
        alone exceeds the context, TemplateError if the template refuses it; the conversation is as
        before then.
        """
        ids = self._prompt(question)
        completion, answer = self._completion(ids), ""
        try:
            for piece in self._generate(completion, ids, is_stopped):
                begun, answer = bool(answer.strip()), answer + piece.text
                yield piece if begun else replace(piece, text=piece.text.lstrip())
        finally:
            if answer.strip():
                self.rounds.append(Round(question, answer))

    def go_on(self, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """The pieces that follow the last answer, which becomes longer by them.

        Raises DataError if there is none, or no room is left behind it, and TemplateError if the
        template cannot leave it open; the conversation is as before then.
        """
        if not self.rounds:
            raise DataError("nothing was said yet")
        last = self.rounds[-1]
        ids = self._encoder.prompt(self._messages(self.n_dropped), continues=True)
        if len(ids) >= self.n_ctx:
            raise DataError("the context is full, and the answer cannot become longer")
        completion, added = self._completion(ids), ""
        try:
            for piece in self._generate(completion, ids, is_stopped):
                added += piece.text
                yield piece
        finally:
            self.rounds[-1] = replace(last, answer=last.answer + added)

    def _completion(self, ids: Sequence[int]) -> Completion:
        """An answer to these tokens, with a seed of its own."""
        how = replace(self.how, seed=(self.how.seed + self._n_answers) % _SEEDS)
        self._n_answers += 1
        return Completion(self.tokenizer, how, ids, self._n_tokens, self.n_ctx)

    def load(self, messages: Sequence[Message]) -> None:
        """Begin with the rounds of these messages: a system's text, if there is one, then questions
        and answers in turn. DataError for anything else."""
        knows = self._encoder.template.knows_developers
        roles_of_system = ("system",) if knows else ("system", "developer")
        system = [m for m in messages[:1] if m["role"] in roles_of_system]
        turns = messages[len(system) :]
        roles = [m["role"] for m in turns]
        if roles != ["user", "assistant"] * (len(turns) // 2) or not turns:
            raise DataError("is no conversation: wanted questions and answers in turn")
        if any(m.keys() - {"role", "content", *ALPACA} for m in messages):
            raise DataError("has more than questions and answers, wanted these alone")
        if system:
            self.set_system(str(system[0]["content"]))
        texts = [str(m["content"]) for m in turns]
        self.rounds = [Round(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]

    def _generate(
        self, completion: Completion, ids: Sequence[int], is_stopped: Callable[[], bool]
    ) -> Iterator[Piece]:
        """The pieces of an answer to the prompt. Of that only the new tokens are fed."""
        n_same = n_common(self._session.tokens, ids[:-1])
        if n_same < self.n_read:
            self._session.truncate(n_same)
        new = ids[n_same:]
        while len(new) > _AT_ONCE and not is_stopped():
            self._session.feed(new[:_AT_ONCE])
            new = new[_AT_ONCE:]
        if not is_stopped():
            for piece in self._session.pieces(completion, new):
                yield piece
                if is_stopped():
                    return

    def _prompt(self, question: str) -> list[int]:
        """The tokens up to the answer. If they leave no room for it, the first rounds are left out
        until they take half of the context."""
        room = min(self._n_tokens or self.n_ctx, self.n_ctx // 4)
        most, n_dropped = self.n_ctx - room, self.n_dropped
        while True:
            ids = self._encoder.prompt([*self._messages(n_dropped), _message("user", question)])
            if len(ids) <= most or n_dropped == len(self.rounds):
                break
            most, n_dropped = self.n_ctx // 2, n_dropped + 1
        if len(ids) >= self.n_ctx:
            raise DataError(
                f"the message makes a prompt of {len(ids)} tokens, wanted fewer than the "
                f"{self.n_ctx} of the context"
            )
        self.n_dropped = n_dropped
        return ids

    def _messages(self, n_dropped: int = 0) -> list[Message]:
        """The system's message and the rounds but the first n_dropped."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for round_ in self.rounds[n_dropped:]:
            messages.append(_message("user", round_.question))
            messages.append(_message("assistant", round_.answer))
        return messages

    def set_system(self, text: str | None) -> None:
        """Change what stands before all rounds. TemplateError if the template refuses it."""
        if text is not None:
            self._encoder.prompt([_message("system", text), _message("user", "a")])
        self.system = text

    def undo(self) -> Round | None:
        """Take the last round back; None if there is none."""
        last = self.rounds.pop() if self.rounds else None
        self.n_dropped = min(self.n_dropped, len(self.rounds))
        return last

    def reset(self) -> None:
        """Begin anew; the system's text stays."""
        self.rounds.clear()
        self.n_dropped = 0

    @property
    def n_read(self) -> int:
        """Tokens in the cache."""
        return self._session.n_past

    def save(self, path: Path) -> int:
        """Append the conversation to a file of JSON Lines as {"messages": [...]}; its line number.

        PyggmlError if the file cannot be read or written, or no answer is there yet.
        """
        if not self.rounds:
            raise DataError("there is nothing to save yet")
        messages = [{**m, "content": m["content"].strip()} for m in self._messages()]
        try:
            before = _rows_before(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {cause_of(error)}") from None
        if before and not before.endswith(b"\n"):
            before += b"\n"
        line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
        with replacing(path) as out:
            out.write(before + line.encode())
        return before.count(b"\n") + 1


def _rows_before(path: Path) -> bytes:
    """What a file of JSON Lines holds already. DataError for any other file, which stays."""
    if not path.exists():
        return b""
    with open_regular(path) as file:
        if file.read(1) not in (b"", b"{"):
            raise DataError(f"{path}: is there already, and has no chats: wanted another name")
        file.seek(0)
        return file.read()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
