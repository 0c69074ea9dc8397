"""How good a model is: what it predicts of a text, and which choices it prefers.

rows         a file → text, rows or questions
scorer       log-probabilities of chosen tokens: the graphs that evaluation runs
perplexity   texts and rows → perplexity and token accuracy
asking       rows → rows as they are put: lettered choices, a text around them, examples
questions    rows of multiple choice → the tokens of each choice after its prompt
passes       many token sequences → few passes of the graph, common beginnings once
choices      the log-probability of each choice → which are right, by four measures
written      answers that a model writes, found by a regular expression
pairs        preference rows → which answer a model prefers
harness      a model for lm-evaluation-harness, an extra
compare      two models on the same tokens or questions → their difference
distance     models on the same tokens → how far each is from an original, and what of it is healed
"""

from pyggml.look.intervals import Interval
from pyggml.lora.evaluate.asking import Asking
from pyggml.lora.evaluate.choices import MEASURES, Answers, choose
from pyggml.lora.evaluate.compare import Difference, compare_answers, compare_tokens
from pyggml.lora.evaluate.pairs import encode_pairs, prefer
from pyggml.lora.evaluate.perplexity import Perplexity, TokenScores, perplexity
from pyggml.lora.evaluate.questions import Question, QuestionFormat, encode_questions
from pyggml.lora.evaluate.written import Finder, write_answers

__all__ = [
    "MEASURES", "Answers", "Asking", "Difference", "Finder", "Interval", "Perplexity", "Question",
    "QuestionFormat", "TokenScores", "choose", "compare_answers", "compare_tokens", "encode_pairs",
    "encode_questions", "perplexity", "prefer", "write_answers",
]  # fmt: skip
