"""What clients may ask of a server: every limit's default, range and help."""

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.settings import Settings, at_least, setting

_GROUP = "server"


@dataclass(frozen=True, kw_only=True)
class Limits(Settings):
    """Raises ConfigError with every setting that is out of range."""

    parallel: int = setting(
        8, "answers written at once", "1 to 64", lambda n: 1 <= n <= 64, group=_GROUP, common=True
    )
    ctx: int = setting(
        0,
        "most tokens of a prompt and its answer (0: the model's context, at most 4096)",
        *at_least(0),
        group=_GROUP,
        common=True,
    )
    deterministic: bool = setting(
        False,
        "the same seed, prompt and settings give the same text, whoever else is served and "
        "whatever was asked before: each answer has passes of its own, so several together take "
        "longer",
        group=_GROUP,
        brief="the same text whoever else is served; slower for many",
    )
    max_prompt: int = setting(
        0, "most tokens of a prompt (0: what the context holds)", *at_least(0), group=_GROUP
    )
    max_tokens: int = setting(
        0, "most tokens of an answer (0: what the context holds)", *at_least(0), group=_GROUP
    )
    queue: int = setting(
        64, "answers that may wait for their turn; more are refused", *at_least(0), group=_GROUP
    )
    timeout: float = setting(
        600.0,
        "seconds after which an answer is cut off",
        "above 0",
        lambda s: 0 < s < 1e6,
        group=_GROUP,
    )
    max_body: int = setting(
        1 << 22, "most bytes of a request", "1024 or more", lambda n: n >= 1024, group=_GROUP
    )

    max_bodies: int = setting(
        1 << 26,
        "most bytes of all requests together that are not read yet; more are refused",
        *at_least(1024),
        group=_GROUP,
    )
    share_prompts: bool = setting(
        False,
        "let every key have its prompts' beginnings from those of other keys in the cache",
        group=_GROUP,
    )

    def _faults(self) -> list[Fault]:
        if self.max_bodies < self.max_body:
            said = f"is {self.max_bodies}, wanted at least the {self.max_body} of one request"
            return [*super()._faults(), ("max_bodies", said)]
        return super()._faults()

    @property
    def choices(self) -> int:
        """The most answers to one request."""
        return min(self.parallel + self.queue, 128)


MOST_TOP_LOGPROBS = 20
MOST_BIASES = 1024
