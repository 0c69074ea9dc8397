"""A hub on the loopback: the part of its protocol that huggingface_hub lists and downloads with."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """repositories: ("model" or "dataset", name) -> its files. breaks_after: bytes of a file after
    which the connection is lost, once. gated: names. requests: (method, path, range) of all."""

    def __init__(self, repositories):
        self.repositories, self.gated, self.breaks_after = repositories, set(), None
        self.requests = []

    def handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *about):
                pass

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

        return Handler

    def answer(self, request, body):
        path = unquote(urlsplit(request.path).path).strip("/")
        self.requests.append((request.command, path, request.headers.get("Range")))
        kind = "dataset" if path.removeprefix("api/").startswith("datasets/") else "model"
        is_listing = path.startswith("api/")
        words = (
            path.removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
        )
        name, rest = "/".join(words[:2]), words[2:]
        files = self.repositories.get((kind, name))
        if files is None:
            return self._refuse(request, 401, "RepoNotFound")
        if name in self.gated:
            return self._refuse(request, 403, "GatedRepo")
        if len(rest) > 1 and rest[1] not in ("main", REVISION):
            return self._refuse(request, 404, "RevisionNotFound")
        if is_listing:
            about = {"id": name, "sha": REVISION, "siblings": [{"rfilename": f} for f in files]}
            return self._send(request, json.dumps(about).encode(), body, {})
        data = files.get("/".join(rest[2:]))
        if data is None:
            return self._refuse(request, 404, "EntryNotFound")
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        self._send(request, data, body, headers)

    def _refuse(self, request, code, reason):
        self._send(request, b"{}", True, {"X-Error-Code": reason, "X-Error-Message": reason}, code)

    def _send(self, request, data, body, headers, code=200):
        asked = request.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if start and code == 200:
            code = 206
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        request.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(data) - start)}).items():
            request.send_header(key, value)
        request.end_headers()
        if not body:
            return
        if "ETag" in headers and self.breaks_after is not None and request.command == "GET":
            request.wfile.write(data[start : start + self.breaks_after])
            request.wfile.flush()
            self.breaks_after = None
            request.connection.close()
            request.close_connection = True
            return
        request.wfile.write(data[start:])


@contextmanager
def serving(repositories):
    """The hub, and the address that HF_ENDPOINT is to name."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
