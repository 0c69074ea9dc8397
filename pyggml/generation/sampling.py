"""How a token is sampled: every setting's default, range and help stand here once.

The options of `pyggml generate` and `chat` and the fields of `serve`'s requests are made of these.
Names, order and formulas are llama.cpp's. Of a model's logits z (n_vocab,), the samplers in order:

logit_bias          z_i += bias of token i
repeat_penalty r    z_i := z_i / r where z_i > 0, else z_i · r, of the tokens i that are recent
frequency_penalty   z_i -= f · how often i is recent
presence_penalty    z_i -= p if i is recent
top_k               the k greatest z stay
top_p               of softmax(z), sorted downwards, the shortest head with a sum ≥ top_p stays
min_p               those with softmax(z)_i ≥ min_p · the greatest stay
temperature T       a token is drawn from softmax(z / T); T = 0 takes the greatest z

Before them all, a json_schema, regex or grammar takes the tokens that cannot come next
(pyggml.generation.form). Recent are the last repeat_last_n tokens, those of the prompt among them.
top_p and min_p look at the tokens that the samplers before them left, and never drop the likeliest.
ngram and draft_max change the speed, and no token (pyggml.generation.speculation).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pyggml.errors import Fault
from pyggml.settings import Settings, of_sampling

MOST_STOPS, MOST_STOP = 16, 256  # stop strings, and characters of one
MOST_LOGPROBS = 100
FORMS = ("json_schema", "regex", "grammar")  # settings that hold an answer to a form
ALIKE = 3  # tokens of a pass at most, of which the CPU gives each one the bits that it has alone
_MOST_FORM = 1 << 16  # characters
_MOST_BIAS = 10_000


def _biases_fit(value: object) -> bool:
    """Whether a value maps ids or texts to numbers. -inf forbids a token, inf has no meaning."""
    return value is None or (
        isinstance(value, Mapping)
        and all(isinstance(token, str | int) and token != "" for token in value)
        and all(type(bias) in (int, float) for bias in value.values())
        and all(bias == -math.inf or abs(bias) <= _MOST_BIAS for bias in value.values())
    )


def _stops_fit(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= MOST_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MOST_STOP for text in value)
    )


_FORM = (f"a text of 1 to {_MOST_FORM:,} characters", lambda text: 0 < len(text) <= _MOST_FORM)


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How to sample tokens, when to stop, and what to tell of them; formulas above.

    Raises ConfigError with every setting that is out of range.
    """

    temperature: float = of_sampling(
        0.8,
        "temperature; 0 takes the likeliest token (greedy)",
        "0 to 100",
        aliases=("temperature",),
        common=True,
    )
    top_k: int = of_sampling(
        40, "sample from the k likeliest tokens (0: all)", "0 or more", common=True
    )
    top_p: float = of_sampling(
        0.95,
        "sample from the likeliest tokens whose probabilities add up to this (1: all)",
        "0 to 1",
        common=True,
        brief="likeliest tokens up to this probability",
    )
    min_p: float = of_sampling(
        0.05,
        "sample from tokens with at least this share of the likeliest one's probability (0: all)",
        "0 to 1",
        common=True,
        brief="least probability, against the likeliest",
    )
    repeat_penalty: float = of_sampling(
        1.0,
        "penalty on recent tokens: divides their logits (1: off)",
        "0.01 to 100",
        common=True,
        brief="penalty on recent tokens",
    )
    repeat_last_n: int = of_sampling(
        64,
        "tokens that count as recent for the penalties, prompt included (-1: all, 0: none)",
        "-1 or more",
    )
    frequency_penalty: float = of_sampling(
        0.0, "lowers a logit for every time its token is recent", "-100 to 100"
    )
    presence_penalty: float = of_sampling(0.0, "lowers the logits of recent tokens", "-100 to 100")
    logit_bias: Mapping[str | int, float] | None = of_sampling(
        None,
        "added to the logit of a token, which is an id, or a text of which each token gets it; "
        "-inf forbids it; may be given several times",
        f"TOKEN=NUMBER, -{_MOST_BIAS} to {_MOST_BIAS} or -inf",
        _biases_fit,
        repeated=True,
    )
    seed: int = of_sampling(
        -1,
        "seed of the sampling: the same one gives the same text (-1: another each time)",
        "-1 to 2^64 - 1",
        lambda seed: -1 <= seed < 1 << 64,
        common=True,
        brief="the same seed gives the same text",
    )
    stop: tuple[str, ...] = of_sampling(
        (),
        "stop string: the text ends before it; may be given several times",
        f"at most {MOST_STOPS} texts of 1 to {MOST_STOP} characters",
        _stops_fit,
        common=True,
        repeated=True,
    )
    json_schema: str | None = of_sampling(
        None, "JSON schema that the answer follows; {} is any JSON", *_FORM, aliases=("j",), like=""
    )
    regex: str | None = of_sampling(
        None, "regular expression that the answer follows", *_FORM, like=""
    )
    grammar: str | None = of_sampling(
        None,
        "grammar that the answer follows, in llama.cpp's GBNF or in Lark's form",
        *_FORM,
        like="",
    )
    ngram: bool | None = of_sampling(
        None,
        "look the last tokens up in the text so far, guess that what followed them follows again, "
        "and check several guesses in one pass where that is faster; the text stays the same. "
        "Without the option only where that leaves every bit: of one answer alone, on the CPU, "
        "without a form",
        brief="faster where text repeats itself; the same text",
        like=False,
    )
    draft_max: int = of_sampling(
        ALIKE - 1,
        "most tokens guessed at once, by --ngram or a draft model (0: none); passes of more than "
        f"{ALIKE} tokens round otherwise",
        "0 to 64",
    )
    logprobs: int | None = of_sampling(
        None,
        "print each token's log-probability, and those of the N likeliest",
        f"0 to {MOST_LOGPROBS}",
        like=0,
    )

    def _faults(self) -> list[Fault]:
        forms = [name for name in FORMS if getattr(self, name) is not None]
        twice: list[Fault] = [(name, f"is given beside {forms[0]}") for name in forms[1:]]
        return super()._faults() + twice

    @property
    def has_form(self) -> bool:
        return any(getattr(self, name) is not None for name in FORMS)

    def with_seed(self) -> Sampling:
        """These settings with a seed: their own, or one that is drawn."""
        return self if self.seed >= 0 else replace(self, seed=secrets.randbits(32))
