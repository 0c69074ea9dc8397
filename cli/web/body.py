"""A request's body → what is made of its JSON object, and work that ends with its request.

The body is hostile: its size, its time and its depth end. The objects of a text take dozens of
times its memory. So bodies wait as they came, all together within a bound; one at a time is parsed
and read, by a thread that keeps nothing of it but the result.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from pyggml.cli.web.connections import Patience
from pyggml.cli.web.errors import ApiError, of_input
from pyggml.errors import PyggmlError
from pyggml.files.json_text import once

T = TypeVar("T")


class Bodies:
    """The bodies of a server's requests.

    most       bytes of one
    together   bytes of all that are not read yet
    patience   with one that comes slowly
    n_held     bytes that have come and are not read yet
    """

    def __init__(self, most: int, together: int, patience: Patience | None = None) -> None:
        self.most, self.together, self.patience = most, together, patience or Patience()
        self.n_held = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pyggml-reader")

    async def read(self, request: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """make(the object that the body holds), in the thread that reads.

        Raises ApiError: 413 for too many bytes, said or sent; 408 for a body that comes too
        slowly; 429 where too much waits; 400 for what is no JSON object, and for a PyggmlError of
        `make`.
        """
        chunks = list[bytes]()
        try:
            await self._receive(request, chunks)
            return await self.between(lambda: make(_object(b"".join(chunks))))
        except PyggmlError as error:
            raise of_input(error) from None
        finally:
            self.n_held -= sum(map(len, chunks))

    async def between(self, work: Callable[[], T]) -> T:
        """What the work gives, in the thread that reads, while it reads nothing."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    async def _receive(self, request: Request, chunks: list[bytes]) -> None:
        """Put what comes into `chunks`."""
        said = request.headers.get("content-length", "0")
        if said.isdecimal() and (len(said) > 18 or int(said) > self.most):
            raise self._too_large()
        loop, stream, n = asyncio.get_running_loop(), request.stream(), 0
        begin = loop.time()
        while True:
            seconds = self.patience.body + n / self.patience.rate
            try:
                async with asyncio.timeout_at(begin + seconds):
                    chunk = await anext(stream, b"")
            except TimeoutError:
                raise _refusal(
                    408, f"the body comes too slowly: {n} bytes in {seconds:g} s"
                ) from None
            except ClientDisconnect:
                raise ApiError(400, "the connection closed before the body's end") from None
            if not chunk:
                return
            n += len(chunk)
            if n > self.most:
                raise self._too_large()
            if self.n_held + len(chunk) > self.together:
                waiting = f"{self.n_held} bytes of requests are waiting already"
                raise _refusal(429, waiting, "queue_full", {"retry-after": "1"})
            self.n_held += len(chunk)
            chunks.append(chunk)

    def _too_large(self) -> ApiError:
        return _refusal(413, f"the body has more than {self.most} bytes")


def _refusal(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> ApiError:
    """Of a body that stays unread in part, so that its connection is of no further use."""
    return ApiError(status, message, code=code, headers={"connection": "close", **(headers or {})})


async def refuse_body(request: Request) -> None:
    """ApiError 413 if a request has a body, of those that should have none."""
    async for chunk in request.stream():
        if chunk:
            raise _refusal(413, "this path takes no body")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What the work gives, unless the client closes the connection before."""
    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ApiError(499, "the client closed the connection")
        return done.result()
    finally:
        done.cancel()
        gone.cancel()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"the body is no JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
