"""Adapters that clients load and drop while the server runs, if `--adapters FOLDER` allows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pyggml.chat.messages import BadValue
from pyggml.cli.commands.serve.fields import Fields, brief, text
from pyggml.cli.commands.serve.voices import Voice
from pyggml.cli.web.errors import ApiError
from pyggml.models.stack import doubts

if TYPE_CHECKING:
    from pyggml.cli.commands.serve.service import Service

_MOST = 64  # loaded at once
_MOST_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class Loading:
    """What may be loaded. folder: with the files; voice: one with such a file, by name, of that of
    its model, and the file with its weight."""

    folder: Path
    voice: Callable[[str, Voice, tuple[Path, float]], Voice]

    def file(self, name: str) -> Path:
        """A file of the folder. Raises BadValue for a name that leads out of it, or to no file."""
        folder = self.folder.resolve()
        with suppress(OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
            path = (folder / name).resolve()
            if path.is_relative_to(folder) and path.is_file():
                return path
        raise BadValue(f"is {brief(name)}, wanted the name of a file in the folder of adapters")


class AdapterRoutes:
    """/v1/adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loaded = dict[str, dict[str, str]]()  # those that were loaded here, by name
        self.routes = [
            Route("/v1/adapters", self.list, methods=["GET"]),
            Route("/v1/adapters", self.load, methods=["POST"]),
            Route("/v1/adapters/{name:path}", self.drop, methods=["DELETE"]),
        ]

    @property
    def _loading(self) -> Loading:
        if self._service.loading is None:
            raise ApiError(403, "no adapter may be loaded or dropped here (--adapters FOLDER)")
        return self._service.loading

    async def list(self, request: Request) -> Response:
        """Names and files of those that were loaded, and the files that can be."""
        files = sorted(path.name for path in self._loading.folder.glob("*.gguf"))
        data = [*self._loaded.values()]
        return JSONResponse({"object": "list", "data": data, "files": files})

    async def load(self, request: Request) -> Response:
        """{"name", "file", "weight", "model"}: from then on there is a model of this name."""
        loading, voices = self._loading, self._service.voices

        def read(given: dict[str, Any]) -> dict[str, Any]:
            f = Fields(given)
            name = f.need("name", text, "")
            path = f.need("file", lambda value: loading.file(text(value)), Path())
            weight = f.take("weight", _weight, 1.0)
            of = f.take("model", text, None)
            f.check()
            if not name or name in voices or len(self._loaded) >= _MOST:
                said = "is there already" if name in voices else "cannot be one more"
                raise ApiError(409, f"{brief(name)} {said}, of at most {_MOST} adapters", "name")
            base = voices.ask(of)
            if base.model.adapters:
                raise ApiError(400, f"model is {brief(of)}, which has adapters already", "model")
            of = base.name
            voice = voices.add(name, lambda: loading.voice(name, voices.ask(of), (path, weight)))
            about = {"id": name, "object": "adapter", "file": path.name, "model": of}
            self._loaded[name] = about
            doubted = doubts(voice.model.adapters, voice.model.file)
            return {**about, "warnings": doubted} if doubted else about

        return JSONResponse(await self._service.bodies.read(request, read))

    async def drop(self, request: Request) -> Response:
        """Forget an adapter that was loaded here. Answers under way go on."""
        name = request.path_params["name"]
        assert self._loading
        await self._service.bodies.between(partial(self._drop, name))
        return JSONResponse({"id": name, "object": "adapter", "deleted": True})

    def _drop(self, name: str) -> None:
        if self._loaded.pop(name, None) is None:
            raise ApiError(404, "no adapter of this name was loaded", "name", "model_not_found")
        self._service.voices.drop(name)


def _weight(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MOST_WEIGHT:
        raise BadValue(f"is {brief(value)}, wanted -{_MOST_WEIGHT} to {_MOST_WEIGHT}")
    return float(value)
