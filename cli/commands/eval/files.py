"""A file of data → what each model makes of it, and how they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyggml import Model
from pyggml.chat import MODEL
from pyggml.cli.commands.eval.progress import PassProgress
from pyggml.cli.terminal.hub import data_files
from pyggml.cli.terminal.show import plural
from pyggml.errors import ConfigError, DataError
from pyggml.lora.config import EvalConfig
from pyggml.lora.data import Encoding, QuestionRow, Row, TextRow
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.records.rows import ChatRow, ClassRow, CompletionRow, GroupRow, PreferenceRow
from pyggml.lora.data.tokens.chats import Chats
from pyggml.lora.evaluate import (
    Answers,
    Asking,
    Perplexity,
    QuestionFormat,
    TokenScores,
    choose,
    encode_pairs,
    encode_questions,
    perplexity,
    prefer,
    write_answers,
)
from pyggml.lora.evaluate.asking import category_of
from pyggml.lora.evaluate.classes import classify, labels_in
from pyggml.lora.evaluate.groups import find_nearest
from pyggml.lora.evaluate.rows import (
    CLASSES,
    GROUPS,
    PAIRS,
    QUESTIONS,
    RECORDS,
    TEXT,
    WRITTEN,
    read_file,
    windows,
)

_SHOTS = ("dev", "validation", "valid", "val", "train")  # splits of the hub for examples


@dataclass(frozen=True, slots=True, eq=False)
class TokenResult:
    """What a model predicts of a file, and rows that are too long.

    made_by   what made its tokens: the tokenizer, of chats the template too
    """

    total: Perplexity
    scores: TokenScores
    made_by: str
    n_long: int = 0


@dataclass(frozen=True, slots=True)
class File:
    """A file of data: its kind, as `read_file` tells it, and its rows."""

    path: Path
    kind: str
    rows: list[Row]

    @staticmethod
    def read(path: Path, config: EvalConfig) -> File:
        """The file, or its first rows. Raises ConfigError and DataError."""
        kind, rows = read_file(path, config.columns)
        if config.match is not None and kind in (QUESTIONS, RECORDS):
            kind = WRITTEN
            other = next((r for r in rows if not isinstance(r, QuestionRow | CompletionRow)), None)
            if other is not None:
                fault = f"wants questions with their answers: {path}: {other.place} is none"
                raise ConfigError([("match", fault)])
        if kind in (QUESTIONS, PAIRS, CLASSES, GROUPS) and config.long == "drop":
            fault = f"is drop, wanted refuse or cut for {kind}: all models answer the same"
            raise ConfigError([("long", fault)])
        if kind == TEXT:
            return File(path, kind, rows)
        if kind in (CLASSES, GROUPS):
            return File(path, kind, rows[: config.limit])
        shots = rows
        if config.shots_file:
            splits = data_files(Path(config.shots_file), _SHOTS)
            shots = [row for file in splits for row in read_file(file, config.columns)[1]]
        return File(path, kind, Asking.of(config).rows(rows[: config.limit], shots))

    @property
    def categories(self) -> dict[str, np.ndarray]:
        """Which rows are of each category, (n,) bool, by name; empty where there are not two."""
        of_rows = [category_of(row) for row in self.rows]
        names = sorted({*of_rows})
        return {n: np.array([c == n for c in of_rows]) for n in names} if len(names) > 1 else {}

    @property
    def questions(self) -> list[QuestionRow]:
        return [row for row in self.rows if isinstance(row, QuestionRow)]

    @property
    def texts(self) -> list[ClassRow]:
        return [row for row in self.rows if isinstance(row, ClassRow)]

    @property
    def chance(self) -> float:
        """The share of questions or pairs that are answered right by chance."""
        if self.kind == PAIRS:
            return 0.5
        if self.kind == CLASSES:
            return 1 / len({row.label for row in self.texts})
        return sum(1 / len(row.choices) for row in self.questions) / len(self.rows)

    @property
    def commonest(self) -> float:
        """The share of questions that are right with always the same answer, by its number."""
        answers = [row.answer for row in self.questions] + [row.label for row in self.texts]
        return Counter(answers).most_common(1)[0][1] / len(self.rows)

    def about(self) -> str:
        """The kind and the number of the rows, in words."""
        if self.kind == PAIRS:
            return f"{plural(len(self.rows), 'pair')} of a chosen answer and a rejected one"
        if self.kind == WRITTEN:
            return f"{plural(len(self.rows), 'question')}, answers written"
        if self.kind == CLASSES:
            n = len({row.label for row in self.texts})
            return f"{plural(len(self.rows), 'text')} of {plural(n, 'class', 'classes')}"
        if self.kind == GROUPS:
            return f"{plural(len(self.rows), 'text')} and the one that belongs to each"
        if self.kind != QUESTIONS:
            return plural(len(self.rows), self.kind.removesuffix("s"))
        counts = sorted({len(row.choices) for row in self.questions})
        choices = " to ".join(str(n) for n in {counts[0]: 0, counts[-1]: 0})
        return f"{plural(len(self.rows), 'question')} of {choices} choices"

    @property
    def has_chats(self) -> bool:
        """Whether any row is written by a chat template."""
        pairs = (row for row in self.rows if isinstance(row, PreferenceRow))
        is_chat = any(isinstance(row, ChatRow) for row in self.rows)
        return is_chat or any(not isinstance(pair.chosen, str) for pair in pairs)

    def evaluate(
        self,
        model: Model,
        config: EvalConfig,
        label: str,
        template: str = MODEL,
        labels: Labels | None = None,
    ) -> Answers | TokenResult:
        """What a model makes of it.

        template   of chats where the settings name none
        labels     of classes; None: those of the file
        """
        progress = PassProgress(label)
        if self.kind == QUESTIONS:
            encoded = encode_questions(
                self.questions, model.tokenizer, QuestionFormat.of(config, model)
            )
            return choose(model, encoded, progress)
        if self.kind == CLASSES:
            labels = labels_in(self.texts, model.tokenizer) if labels is None else labels
            return classify(model, self.texts, labels, *_reading(model, config), progress)
        if self.kind == GROUPS:
            groups = [row for row in self.rows if isinstance(row, GroupRow)]
            return find_nearest(model, groups, *_reading(model, config), progress)
        if self.kind == WRITTEN:
            rows = [row for row in self.rows if isinstance(row, QuestionRow | CompletionRow)]
            return write_answers(model, rows, config, progress)
        if self.kind == PAIRS:
            return self._prefer(model, config, progress, template)
        try:
            return self._score_tokens(model, config, progress, template)
        except DataError as error:
            about = "" if str(self.path) in str(error) else f"{self.path}: "
            raise DataError(f"{about}{error}") from None

    def _prefer(
        self, model: Model, config: EvalConfig, progress: PassProgress, template: str
    ) -> Answers:
        pairs = [row for row in self.rows if isinstance(row, PreferenceRow)]
        # Both answers of a pair lose the same tokens, so no rounds are cut from either alone.
        rows = replace(config.rows(model.config.n_ctx, template), long_chats="refuse")
        encoding = Encoding.of(rows, model.tokenizer)
        most = config.ctx or model.config.n_ctx
        return prefer(
            model, encode_pairs(pairs, model, encoding, most, config.long == "cut"), progress
        )

    def _score_tokens(
        self, model: Model, config: EvalConfig, progress: PassProgress, template: str
    ) -> TokenResult:
        rows, n_long = config.rows(model.config.n_ctx, template), 0
        if self.kind == TEXT:
            (row,) = self.rows
            assert isinstance(row, TextRow)
            text = row.text.removesuffix("\n")  # llama.cpp's -f drops one
            parse = config.special_tokens == "parse"
            results = perplexity(model, text, rows.ctx, parse, config.limit)
        else:
            data, n_long = windows(self.rows, model.tokenizer, rows)
            results = perplexity(model, data)
        parts: list[Perplexity] = []
        for so_far in results:
            parts.append(so_far)
            progress(so_far.chunk, so_far.n_chunks)
        scores = TokenScores.join([part.scores for part in parts])
        made_by = model.tokenizer.identity
        if self.has_chats:
            made_by = f"{made_by}, {Chats.of(rows, model.tokenizer)}"
        return TokenResult(parts[-1], scores, made_by, n_long)


def _reading(model: Model, config: EvalConfig) -> tuple[Encoding, int, bool]:
    """How texts become tokens, how many they have at most, and whether longer ones are cut."""
    most = min(config.ctx or model.config.n_ctx, model.config.n_ctx)
    return Encoding(config.special_tokens), most, config.long == "cut"


def are_comparable(results: Sequence[TokenResult]) -> bool:
    """Whether all cut the file into the same tokens."""
    return len({result.made_by for result in results}) == 1
