"""The parts of a page, which lie beside the code; browsers fetch nothing but this server's."""

from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyggml.cli.web.pages import part

_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cross-origin-opener-policy": "same-origin",
}


def text_endpoint(
    text: str, kind: str, styles: str = "", more: str = ""
) -> Callable[[Request], Response]:
    """What answers with this text of a media type. styles: sources of styles beside this server,
    such as the hash of one; more: further directives of the policy."""
    policy = "; ".join(filter(None, (_policy(styles), more)))
    headers = {**_HEADERS, "content-security-policy": policy}

    def answer(request: Request) -> Response:
        return Response(text, media_type=kind, headers=headers)

    return answer


def file_routes(package: str, files: Mapping[str, str]) -> list[Route]:
    """Routes of files of a package: path -> name in its folder."""
    return [
        Route(path, text_endpoint(part(package, name), _KINDS[Path(name).suffix]))
        for path, name in files.items()
    ]


def _policy(styles: str) -> str:
    style = f"style-src 'self' {styles}".rstrip()
    return (
        f"default-src 'none'; script-src 'self'; {style}; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
