"""A request's body → a JSON object, and work that ends with its request.

The body is hostile: its size, its time and its depth end.
"""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from pyggml.cli.web.errors import ApiError

T = TypeVar("T")


async def read_object(request: Request, most_bytes: int, seconds: float) -> dict[str, Any]:
    """The object that a body holds.

    Raises ApiError: 413 for more than most_bytes, said or sent; 408 for a body that takes longer
    than `seconds`; 400 for what is no JSON object.
    """
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and (len(said) > 18 or int(said) > most_bytes):
        raise _too_large(most_bytes)
    try:
        raw = await asyncio.wait_for(_read(request, most_bytes), seconds)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the connection closed before the body's end") from None
    return _object(raw)


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


async def _read(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
    return bytes(body)


def _too_large(most_bytes: int) -> ApiError:
    # The rest of the body stays unread, so the connection is of no further use.
    return ApiError(
        413, f"the body has more than {most_bytes} bytes", headers={"connection": "close"}
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"the body is no JSON ({reason})") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    return value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields
