"""A conversation with whoever is at standard input: messages in, answers out, commands between.

Notes go to standard error, so that a pipe gets answers alone.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import click

from pyggml.cli.commands.chat.conversation import Conversation, Round
from pyggml.cli.commands.chat.lines import END_KEYS, read_messages
from pyggml.cli.terminal.exit import FAILED
from pyggml.cli.terminal.generation import Pace, say_piece
from pyggml.cli.terminal.show import has_colours, plural, printable, say
from pyggml.errors import PyggmlError
from pyggml.generation import Finish, Piece

_ENDS = {
    Finish.LENGTH: "the answer ends here, at --n-tokens",
    Finish.CONTEXT: "the answer ends here, the context is full",
}


class Console:
    """Asks a conversation what a user types.

    interactive   whether a user is at a terminal: there are prompts, colours and notes of speed,
                  and Ctrl-C ends the answer, not the program
    """

    def __init__(self, conversation: Conversation, interactive: bool) -> None:
        self._chat, self._interactive, self._failed = conversation, interactive, False
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("these commands", self._help),
            "/bye": (f"end the chat, as {END_KEYS}; /exit too", self._end),
            "/exit": ("the same", self._end),
            "/undo": ("take the last message and its answer back", self._undo),
            "/retry": ("answer the last message anew", self._retry),
            "/continue": ("go on with the last answer", self._go_on),
            "/reset": ("begin anew; the system's text stays", self._reset),
            "/system": ("show the system's text, or set it to TEXT; - is none", self._system),
            "/save": ("append the conversation to a FILE that pyggml-finetune reads", self._save),
        }

    def run(self, continues: bool = False) -> int:
        """Until the input ends; the exit code: of a pipe 2 if a message was not answered.

        continues: go on with the last answer first
        """
        if continues:
            self._go_on("")
        for line in read_messages(self._interactive):
            try:
                self._handle(line)
            except EOFError:
                break
            except PyggmlError as error:
                self._failed = True
                self._note(str(error))
        return FAILED if self._failed and not self._interactive else 0

    def _handle(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self._answer(line.strip())
        elif name in self._commands:
            self._commands[name][1](rest.strip())
        else:
            names = ", ".join(self._commands)
            raise PyggmlError(
                f"{name} is no command, known are {names}; put a space before a message that "
                "begins with /"
            )

    def _note(self, text: str) -> None:
        text = printable(text)
        coloured = has_colours(sys.stderr)
        print(click.style(text, dim=True) if coloured else text, file=sys.stderr, flush=True)

    # -- answers --------------------------------------------------------------------------------

    def _answer(self, question: str) -> None:
        self._say(partial(self._chat.ask, question))

    def _say(self, pieces: Callable[[Callable[[], bool]], Iterator[Piece]]) -> None:
        """Print the pieces of an answer as they are made, and how it ended."""
        before, pace, finish = self._chat.n_dropped, Pace(self._chat.model), None
        with self._stop_on_interrupt() as is_stopped:
            for piece in pieces(is_stopped):
                if not pace.n and (n := self._chat.n_dropped - before):
                    rounds = "first round" if n == 1 else f"first {n} rounds"
                    self._note(f"(the context is full: the model forgets the {rounds})")
                say_piece(piece, self._chat.how, self._chat.tokenizer)
                pace.count()
                finish = piece.finish
        if self._chat.how.logprobs is None:
            say("")
        if finish in _ENDS:
            self._note(f"({_ENDS[finish]})")
        if self._interactive:
            context = f"{self._chat.n_read:,} of {self._chat.n_ctx:,} of the context"
            how_ended = "" if finish else "stopped; "
            self._note(f"({how_ended}{plural(pace.n, 'token')}, {pace}; {context})")

    @contextmanager
    def _stop_on_interrupt(self) -> Iterator[Callable[[], bool]]:
        """A context in which Ctrl-C at a terminal asks for a stop; a second one ends the program.

        Yields whether it was asked for: between tokens, since a cache is of no use whose tokens
        were half computed.
        """
        signals: list[int] = []

        def handle(number: int, frame: FrameType | None) -> None:
            if signals:
                raise KeyboardInterrupt
            signals.append(number)

        before = signal.signal(signal.SIGINT, handle) if self._interactive else None
        try:
            yield lambda: bool(signals)
        finally:
            if self._interactive:
                signal.signal(signal.SIGINT, before)

    # -- commands -------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        self._note("\n".join(f"{name:<9} {about}" for name, (about, _) in self._commands.items()))
        self._note(
            f"A line that ends with \\ goes on in the next. Ctrl-C ends an answer, {END_KEYS} all."
        )

    def _end(self, rest: str) -> None:
        raise EOFError

    def _undo(self, rest: str) -> None:
        self._note(f"(taken back: {self._last().question})")

    def _retry(self, rest: str) -> None:
        last = self._last()
        n_before = len(self._chat.rounds)
        try:
            self._answer(last.question)
        finally:
            if len(self._chat.rounds) == n_before:  # refused, or stopped before a word
                self._chat.rounds.append(last)

    def _go_on(self, rest: str) -> None:
        self._say(self._chat.go_on)

    def _last(self) -> Round:
        """The last round, which is taken back."""
        last = self._chat.undo()
        if last is None:
            raise PyggmlError("nothing was said yet")
        return last

    def _reset(self, rest: str) -> None:
        self._chat.reset()
        self._note("(a new conversation)")

    def _system(self, rest: str) -> None:
        if rest:
            self._chat.set_system(None if rest == "-" else rest)
        self._note(f"(system: {self._chat.system or 'none'})")

    def _save(self, rest: str) -> None:
        if not rest:
            raise PyggmlError("/save wants the name of a file")
        line = self._chat.save(Path(rest).expanduser())
        self._note(f"({plural(len(self._chat.rounds), 'round')} saved as line {line} of {rest})")
