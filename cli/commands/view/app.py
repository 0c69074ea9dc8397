"""The routes: the page with its parts, and what it asks for, as JSON. Nothing is written."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyggml.cli.commands.view import activations, backward, pictures, reading, weights
from pyggml.cli.commands.view.browser_page import page_routes
from pyggml.cli.commands.view.queries import (
    RANKS,
    TextQuery,
    read_number,
    read_pass,
    read_question,
    read_text,
)
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import NoSource, StoppableModel, ViewedFile
from pyggml.cli.commands.view.worker import ViewWorker
from pyggml.cli.web.body import Bodies
from pyggml.cli.web.errors import HANDLERS, ApiError
from pyggml.cli.web.guard import Access, Guard
from pyggml.lora import LoraConfig
from pyggml.model import Model

_MOST_BODY, _MOST_BODIES = 1 << 17, 1 << 21  # bytes, of one request and of all
_MOST_INDEX, _MOST_STAGES = 10**8, 99
_WIDE = 200, 900  # pixels of the axis of a plan
Endpoint = Callable[[Request], Awaitable[Response]]
_NO_RUNS = "no folder of runs was given: pyggml view --run FOLDER"


def make_app(source: ViewedFile | NoSource, runs: Runs | None, n_threads: int = 0) -> Starlette:
    """The application. Requests that name another host than this machine are refused."""
    routes = Routes(source, runs, ViewWorker(n_threads))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(routes.close)

    return Starlette(
        routes=[
            *page_routes(source.name),
            Route("/api/state", routes.state),
            Route("/api/model", routes.model),
            Route("/api/glance", routes.glance),
            Route("/api/tensor", routes.tensor),
            Route("/api/graph", routes.graph),
            Route("/api/graph/section", routes.section),
            Route("/api/graph/search", routes.search),
            Route("/api/plan", routes.plan),
            Route("/api/plan/moment", routes.moment),
            Route("/api/runs", routes.runs),
            Route("/api/runs/overlay", routes.overlay),
            Route("/api/run", routes.run),
            Route("/api/run/gradients", routes.gradients),
            Route("/api/backward", routes.backward, methods=["POST"]),
            Route("/api/compare", routes.compare, methods=["POST"]),
            *(
                Route(f"/api/{name}", routes.answering(answer), methods=["POST"])
                for name, answer in _OF_TEXTS.items()
            ),
        ],
        middleware=[Middleware(Guard, access=Access(fixed=True))],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )


class Json(Response):
    """An object, in ASCII: files and names may hold halves of characters, which UTF-8 cannot."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class Routes:
    """What answers each path. What takes long is done by the worker."""

    def __init__(
        self, source: ViewedFile | NoSource, runs: Runs | None, worker: ViewWorker
    ) -> None:
        self._source, self._runs, self.worker = source, runs, worker
        self._bodies = Bodies(_MOST_BODY, _MOST_BODIES)
        model = None if source.fault else source.model
        self._pictures = pictures.Pictures(model, source.fault)

    def close(self) -> None:
        self.worker.close()
        self._bodies.close()

    def state(self, request: Request) -> Response:
        """What the page looks at again and again."""
        runs = None if self._runs is None else self._runs.summaries()
        first = "model" if self._source.is_asked else "run"
        return Json({"model": self._source.state(), "runs": runs, "first": first})

    def model(self, request: Request) -> Response:
        runs = self._runs
        folder, sample = (None, "") if runs is None else (str(runs.folder), runs.sample())
        return Json(self._source.about() | {"folder": folder, "sample": sample or reading.SAMPLE})

    async def glance(self, request: Request) -> Response:
        query = request.query_params
        rank = read_number(query, "rank", *RANKS) if "rank" in query else LoraConfig.rank
        sections = await self.worker.run(request, lambda stop: self._source.glance(rank))
        return Json({"rank": rank, "sections": sections})

    async def tensor(self, request: Request) -> Response:
        name, run = read_text(request.query_params, "name"), request.query_params.get("run")
        return Json(await self.worker.run(request, lambda stop: self._tensor(name, run)))

    def _tensor(self, name: str, run: str | None) -> dict[str, Any]:
        about = weights.describe(self._source.file, name)
        if run and self._runs is not None:
            adapter = self._runs.output(run)
            about["charts"] = self._runs.norms(run, name)
            if adapter.is_file():
                about["update"] = weights.update(adapter, self._source.file, name)
        return about

    # -- graphs and plans --------------------------------------------------------------------------

    async def graph(self, request: Request) -> Response:
        return await self._picture(request, partial(pictures.graph_facts, stage=_stage(request)))

    async def section(self, request: Request) -> Response:
        i = read_number(request.query_params, "section", 0, _MOST_INDEX)
        direction, stage = request.query_params.get("direction", "forward"), _stage(request)
        if direction not in ("forward", "backward"):
            raise ApiError(400, "direction is unknown, wanted forward or backward", "direction")
        section = partial(pictures.section_facts, i=i, direction=direction, stage=stage)
        return await self._picture(request, section)

    async def search(self, request: Request) -> Response:
        words, stage = read_text(request.query_params, "words"), _stage(request)
        return await self._picture(request, partial(pictures.search, words=words, stage=stage))

    async def plan(self, request: Request) -> Response:
        query = request.query_params
        wide = read_number(query, "wide", *_WIDE) if "wide" in query else _WIDE[1]
        return await self._picture(request, partial(pictures.plan_facts, wide=wide))

    async def moment(self, request: Request) -> Response:
        i = read_number(request.query_params, "node", 0, _MOST_INDEX)
        return await self._picture(request, partial(pictures.moment_facts, i=i))

    async def _picture(
        self, request: Request, describe: Callable[[pictures.Picture], dict[str, Any]]
    ) -> Response:
        asked, drawings = read_pass(request.query_params), self._pictures
        return Json(await self.worker.run(request, lambda stop: describe(drawings.of(asked))))

    # -- runs --------------------------------------------------------------------------------------

    def runs(self, request: Request) -> Response:
        return Json(self._folder().table())

    def overlay(self, request: Request) -> Response:
        names = dict.fromkeys(request.query_params.getlist("name"))
        return Json({"charts": self._folder().overlay([*names])})

    def _folder(self) -> Runs:
        if self._runs is None:
            raise ApiError(404, _NO_RUNS)
        return self._runs

    def run(self, request: Request) -> Response:
        about = self._folder().describe(read_text(request.query_params, "name"))
        trained = about["settings"].get("model")
        model = self._source.comparison(Path(trained)) if isinstance(trained, str) else "same"
        return Json(about | {"model": model})

    async def gradients(self, request: Request) -> Response:
        runs, query = self._folder(), request.query_params
        name, kind = read_text(query, "name"), query.get("kind", "norm")
        step = read_number(query, "step", 0, _MOST_INDEX)
        return Json(await self.worker.run(request, lambda stop: runs.gradients(name, kind, step)))

    # -- texts -------------------------------------------------------------------------------------

    def answering(self, answer: Callable[[Model, TextQuery], dict[str, Any]]) -> Endpoint:
        """An endpoint: what the model makes of a text, maybe with what a run has written."""

        async def respond(request: Request) -> Response:
            question = await self._question(request)

            def work(stop: Event) -> dict[str, Any]:
                return answer(StoppableModel(self._model_of(question.run), stop), question)

            return Json(await self.worker.run(request, work))

        return respond

    async def compare(self, request: Request) -> Response:
        question = await self._question(request)

        def work(stop: Event) -> dict[str, Any]:
            base = StoppableModel(self._source.model, stop)
            adapted = StoppableModel(self._model_of(question.run), stop)
            return activations.compare(base, adapted, question)

        return Json(await self.worker.run(request, work))

    async def backward(self, request: Request) -> Response:
        """Of the small net, unless there is a text."""
        question = await self._bodies.read(
            request, lambda given: read_question(given, needs_text="text" in given)
        )

        def work(stop: Event) -> dict[str, Any]:
            if not question.text:
                return backward.of_net(question, stop)
            return backward.of_text(self._model_of(question.run), question, stop)

        if question.text:
            self._expect_model()
        return Json(await self.worker.run(request, work))

    def _model_of(self, run: str | None) -> Model:
        """The file's model, with the adapter of a run, or the whole model that the run wrote."""
        model, runs, output, kind = self._source.model, self._runs, None, ""
        if run is not None and runs is not None:
            output, kind = runs.output(run), runs.kind(run)  # the first knows its runs
        if output and kind == "model":
            model = self._source.other(output)
        assert model.tokenizer  # built here once, for all copies of the model
        return model if not output or kind == "model" else model.with_adapter_files(output)

    async def _question(self, request: Request) -> TextQuery:
        self._expect_model()
        return await self._bodies.read(request, read_question)

    def _expect_model(self) -> None:
        if self._source.fault:
            raise ApiError(409, self._source.fault)


# What is asked of a text: path -> its answer.
_OF_TEXTS: dict[str, Callable[[Model, TextQuery], dict[str, Any]]] = {
    "losses": reading.losses,
    "attention": reading.attention,
    "heads": activations.heads,
    "lens": activations.logit_lens,
    "attribution": activations.attribution,
    "patch": activations.patch,
}


def _stage(request: Request) -> int | None:
    """Which stage of a graph is asked for; None: the last one."""
    query = request.query_params
    return read_number(query, "stage", 0, _MOST_STAGES) if "stage" in query else None
