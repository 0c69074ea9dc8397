"""Call: a kernel with the arguments that it is bound to."""

from collections.abc import Callable, Sequence
from typing import Any


class Call:
    """Calling it runs `kernel(*arguments)`."""

    __slots__ = ("arguments", "kernel")

    def __init__(self, kernel: Callable[..., Any], *arguments: Any) -> None:
        self.kernel, self.arguments = kernel, arguments

    def __call__(self) -> None:
        self.kernel(*self.arguments)


def one_by_one(calls: Sequence[Call]) -> None:
    """Make these calls in turn."""
    for call in calls:
        call()
