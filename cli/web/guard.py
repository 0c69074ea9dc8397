"""Who may call: asked of every request before its body is read.

host      A page of the web may name this machine as its own host (DNS rebinding), and would then
          be of the same origin as this server. So the Host header must be one of those allowed.
origin    A page of another origin may not read answers, but could send requests. They are refused,
          unless the origin was allowed.
site      Browsers say where a request comes from. One from another site may open the page, as a
          link does, and nothing else.
key       Compared in constant time. Pages and /health are open: they tell nothing.
"""

import hmac
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyggml.cli.terminal.show import printable
from pyggml.cli.web.connections import Connection
from pyggml.cli.web.errors import ApiError

_LOG = logging.getLogger("pyggml.web")
_KEYED = ("/v1/", "/tokenize", "/detokenize", "/props", "/slots", "/metrics")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/@]+))(?::[0-9]{1,5})?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SECURE = {
    "x-content-type-options": "nosniff",
    "x-dns-prefetch-control": "off",  # else a browser looks up the hosts of links that it shows
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call.

    hosts     names that the Host header may have; empty: any
    origins   origins of other sites whose pages may call
    keys      one of which a request must have; empty: none is asked for
    fixed     whether no option allows more
    """

    hosts: Collection[str] = LOOPBACK
    origins: Collection[str] = ()
    keys: Collection[str] = ()
    fixed: bool = False

    def fault(self, scope: Scope) -> ApiError | None:
        """Why this request is refused, if it is."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1 or len(headers.getlist("origin")) > 1:
            return ApiError(400, "a header is there twice, wanted one Host and one Origin")
        if self.hosts and name_of(host) not in self.hosts:
            return self._refusal("the Host header names no host of this server", "--allow-host")
        origin = headers.get("origin")
        is_own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        if not (origin is None or is_own or origin in self.origins):
            return self._refusal("pages of this origin may not call", "--allow-origin")
        if origin is None and not _is_from_here(scope, headers):
            return self._refusal("pages of other sites may not call", "--allow-origin")
        if scope["path"].startswith(_KEYED) and scope["method"] != "OPTIONS":
            return self._key_fault(scope)
        return None

    def _refusal(self, why: str, option: str) -> ApiError:
        return ApiError(403, why if self.fixed else f"{why} ({option})")

    def holder(self, scope: Scope) -> int | None:
        """The number of the key that a request has; 0 where none is asked for, None without one."""
        if not self.keys:
            return 0
        theirs = _key_in(Headers(scope=scope))
        # All are compared, so that the time does not tell which one it is.
        right = [hmac.compare_digest(theirs, key.encode()) for key in self.keys]
        return right.index(True) if any(right) else None

    def _key_fault(self, scope: Scope) -> ApiError | None:
        if self.holder(scope) is not None:
            return None
        has_key = _key_in(Headers(scope=scope))
        what = "is not one of this server's" if has_key else "is missing"
        return ApiError(
            401,
            f"the API key {what}: wanted the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _key_in(headers: Headers) -> bytes:
    """The key that a request has; b"" for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else b""


def name_of(host: str) -> str:
    """The name in a Host header: localhost:8080 -> localhost, [::1]:8080 -> ::1; "" for none."""
    parts = _HOST.fullmatch(host)
    return (parts[1] or parts[2]).lower() if parts else ""


def _is_from_here(scope: Scope, headers: Headers) -> bool:
    """Whether a request comes from a page of this server, from no page, or opens the first page."""
    if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
        return True
    is_link = headers.get("sec-fetch-mode") == "navigate"
    is_whole = headers.get("sec-fetch-dest", "document") == "document"
    return is_link and is_whole and scope["method"] == "GET" and scope["path"] == "/"


class Guard:
    """Refuses requests by `access`; answers get headers that bind browsers.

    An application finds the number of the key that a request has as scope["state"]["holder"].
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # this server speaks no other protocol
            return None

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURE.items():
                    headers.setdefault(name, value)
            await send(message)

        fault = self.access.fault(scope) or self._welcome(scope)
        await (self.app if fault is None else fault.response())(scope, receive, send_secured)

    def _welcome(self, scope: Scope) -> ApiError | None:
        """Note who sends a request that is not refused; what of a stranger's is refused, or goes
        unsaid, is said of one with a key."""
        state = scope.setdefault("state", {})
        state["holder"] = holder = self.access.holder(scope)
        if holder is None:
            return None
        connection: Connection | None = state.get("connection")
        if protocol := Headers(scope=scope).get("upgrade"):
            _LOG.warning("a client asks for %s, wanted HTTP/1.1 alone", printable(protocol[:40]))
        if connection is None:
            return None
        connection.is_welcome = True
        if not connection.places.are_full:
            return None
        _LOG.warning("all %d connections have a request under way", connection.places.most)
        return ApiError(503, "all connections are taken", code="busy", headers={"retry-after": "1"})
