"""What clients may ask of a server: every limit's default, range and help."""

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.settings import Settings, of_server


@dataclass(frozen=True, kw_only=True)
class Limits(Settings):
    """Raises ConfigError with every setting that is out of range."""

    parallel: int = of_server(8, "answers written at once", "1 to 64", common=True)
    ctx: int = of_server(
        0,
        "most tokens of a prompt and its answer (0: the model's context, at most 4096)",
        "0 or more",
        common=True,
    )
    deterministic: bool = of_server(
        False,
        "the same seed, prompt and settings give the same text, whoever else is served and "
        "whatever was asked before: each answer has passes of its own, so several together take "
        "longer",
        brief="the same text whoever else is served; slower for many",
    )
    max_prompt: int = of_server(
        0, "most tokens of a prompt (0: what the context holds)", "0 or more"
    )
    max_tokens: int = of_server(
        0, "most tokens of an answer (0: what the context holds)", "0 or more"
    )
    queue: int = of_server(
        64, "answers that may wait for their turn; more are refused", "0 or more"
    )
    timeout: float = of_server(
        600.0, "seconds after which an answer is cut off", "above 0, below 1e6"
    )
    max_body: int = of_server(1 << 22, "most bytes of a request", "1024 or more")

    max_bodies: int = of_server(
        1 << 26,
        "most bytes of all requests together that are not read yet; more are refused",
        "1024 or more",
    )
    share_prompts: bool = of_server(
        False, "let every key have its prompts' beginnings from those of other keys in the cache"
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
