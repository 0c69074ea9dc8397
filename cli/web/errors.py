"""Faults → the API's error objects: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pyggml import __version__
from pyggml.errors import PyggmlError


class ApiError(Exception):
    """What is sent instead of an answer.

    status    of HTTP
    message   one or more sentences
    param     the field at fault
    code      a word that programs test for, such as context_length_exceeded
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        about = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {key: _sendable(value) for key, value in about.items()}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)

    @property
    def type(self) -> str:
        if self.status >= 500:
            return "server_error"
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error")


def _sendable(text: str | None) -> str | None:
    """The text with half of a surrogate pair, which UTF-8 cannot hold, written as \\ud800."""
    return text and text.encode(errors="backslashreplace").decode()


def of_input(error: PyggmlError) -> ApiError:
    """A fault of what the client sent, found by the library."""
    param = next((fault[0] for fault in error.faults if not isinstance(fault, str)), None)
    return ApiError(400, error.message(str), param)


def program_fault() -> ApiError:
    """A fault of this program, of which clients learn nothing more."""
    return ApiError(500, f"pyggml {__version__} failed; its log says more")


def too_long(n_prompt: int, n_ctx: int, param: str) -> ApiError:
    """The prompt leaves no room for an answer."""
    return ApiError(
        400,
        f"the prompt has {n_prompt} tokens, wanted fewer than the {n_ctx} of the context",
        param,
        "context_length_exceeded",
    )


def unknown_model(name: str, names: tuple[str, ...]) -> ApiError:
    shown = name if len(name) <= 64 else f"{name[:64]}…"
    message = f"there is no model {shown!r}, known are {', '.join(names)}"
    return ApiError(404, message, "model", "model_not_found")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is no such path", 405: "this path does not take this method"}
    message = said.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _fault(request: Request, error: Exception) -> Response:
    return program_fault().response()


# What a Starlette application answers instead of raising.
HANDLERS = {ApiError: _api_error, HTTPException: _http_error, Exception: _fault}
