"""/v1/embeddings and /v1/rerank: texts → vectors and scores.

Passes are computed by the worker's thread, one between two passes of the answers under way.
"""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pyggml.cli.commands.serve.answers import Usage
from pyggml.cli.commands.serve.fields import Fields, flag, text, whole
from pyggml.cli.commands.serve.journal import Cost
from pyggml.cli.commands.serve.params import Prompt, read_prompts
from pyggml.cli.commands.serve.service import Service, told_if_refused
from pyggml.cli.commands.serve.voices import Voice
from pyggml.cli.web.body import unless_gone
from pyggml.cli.web.errors import ApiError, of_input, too_long
from pyggml.errors import PyggmlError
from pyggml.models.embedder import Embedder, in_passes
from pyggml.models.texts import check_text

MOST_TEXTS = 2048  # of a request, as in OpenAI's API
_RERANK = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")  # llama-server's paths


@dataclass(frozen=True, slots=True)
class EmbedParams:
    voice: Voice
    texts: Sequence[np.ndarray]
    encodes: bool  # as base64 of little-endian float32
    dimensions: int | None


@dataclass(frozen=True, slots=True)
class RerankParams:
    """returns: documents come back beside their scores."""

    voice: Voice
    documents: Sequence[str]
    texts: Sequence[np.ndarray]
    top_n: int
    returns: bool


class EmbedRoutes:
    """What answers these paths."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        embed = [Route("/v1/embeddings", self.embed, methods=["POST"])]
        return embed + [Route(path, self.rerank, methods=["POST"]) for path in _RERANK]

    async def embed(self, request: Request) -> Response:
        params = await self._service.bodies.read(request, self._read_embed)
        embedder = self._embedder(params.voice, ranks=False)
        request.state.entry.cost = partial(_cost, params)
        vectors = await unless_gone(request, self._run(embedder, params.texts))
        n = len(vectors[0])
        if params.dimensions is not None and params.dimensions > n:
            fault = f"dimensions is {params.dimensions}, wanted at most the {n} of the model"
            raise ApiError(400, fault, "dimensions")
        vectors = [_shortened(vector, params.dimensions or n) for vector in vectors]
        data = [
            {"object": "embedding", "index": i, "embedding": _written(vector, params.encodes)}
            for i, vector in enumerate(vectors)
        ]
        named = {"object": "list", "model": params.voice.name, "data": data}
        return JSONResponse({**named, **_usage(params.texts)})

    async def rerank(self, request: Request) -> Response:
        params = await self._service.bodies.read(request, self._read_rerank)
        embedder = self._embedder(params.voice, ranks=True)
        request.state.entry.cost = partial(_cost, params)
        scores = await unless_gone(request, self._run(embedder, params.texts))
        order = sorted(range(len(scores)), key=lambda i: -float(scores[i][0]))[: params.top_n]
        results: list[dict[str, Any]] = [
            {"index": i, "relevance_score": float(scores[i][0])} for i in order
        ]
        for result in results if params.returns else ():
            result["document"] = {"text": params.documents[result["index"]]}
        named = {"object": "list", "model": params.voice.name, "results": results}
        return JSONResponse({**named, **_usage(params.texts)})

    # -- requests ---------------------------------------------------------------------------------

    def _read_embed(self, given: dict[str, Any]) -> EmbedParams:
        f = Fields(given)
        prompts: list[Prompt] = f.need("input", read_prompts, [])
        voice = self._service.voices.ask(f.take("model", text, None))
        f.only("encoding_format", ("float", "base64"), "wanted float or base64")
        encodes = given.get("encoding_format") == "base64"
        dimensions = f.take("dimensions", whole(1, 1 << 16), None)
        f.ignore("user")
        self._check_count(f, "input", prompts)
        encode = partial(voice.model.tokenizer.encode, parse_special=True)
        ids = [encode(p) if isinstance(p, str) else p for p in prompts]
        return EmbedParams(voice, _token_arrays(voice, ids, "input"), encodes, dimensions)

    def _read_rerank(self, given: dict[str, Any]) -> RerankParams:
        f = Fields(given)
        query = f.need("query", text, "")
        documents: list[str] = f.need("documents", lambda v: [*map(text, read_prompts(v))], [])
        voice = self._service.voices.ask(f.take("model", text, None))
        top_n = f.take("top_n", whole(1, 1 << 31), len(documents))
        returns = f.take("return_documents", flag, False)
        f.ignore("user")
        self._check_count(f, "documents", documents)
        tokenizer = voice.model.tokenizer
        ids = [tokenizer.encode_pair(query, document) for document in documents]
        return RerankParams(
            voice, documents, _token_arrays(voice, ids, "documents"), top_n, returns
        )

    def _check_count(self, f: Fields, name: str, given: Sequence[Any]) -> None:
        if len(given) > MOST_TEXTS:
            f.fault(name, f"has {len(given)}, wanted at most {MOST_TEXTS}")
        f.check()

    # -- computing --------------------------------------------------------------------------------

    def _embedder(self, voice: Voice, ranks: bool) -> Embedder:
        """Raises ApiError for a model that gives no vectors, or no scores."""
        if ranks in voice.embedders:
            return voice.embedders[ranks]
        model = voice.controls.model(voice.model, None)
        try:
            embedder = model.embedder("rank" if ranks else self._service.pooling)
        except PyggmlError as error:
            raise of_input(error) from None
        if embedder.ranks and not ranks:
            raise ApiError(
                400, f"{voice.name} gives scores, no vectors: wanted /v1/rerank", "model"
            )
        voice.embedders[ranks] = embedder
        return embedder

    async def _run(self, embedder: Embedder, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        of_texts: list[np.ndarray] = [np.zeros(0)] * len(texts)
        for part in in_passes(texts):
            with told_if_refused():
                future = self._service.worker.call(partial(embedder.run, [texts[i] for i in part]))
            try:
                vectors = await asyncio.wrap_future(future)
            except PyggmlError as error:
                raise ApiError(500, str(error)) from None
            for i, vector in zip(part, vectors, strict=True):
                of_texts[i] = vector
        return of_texts


def _token_arrays(voice: Voice, texts: Sequence[Any], param: str) -> list[np.ndarray]:
    for ids in texts:
        if len(ids) > voice.n_ctx:
            raise too_long(len(ids), voice.n_ctx + 1, param)
    config = voice.model.config
    try:
        return [check_text(ids, config, f"{param} {i + 1}") for i, ids in enumerate(texts)]
    except PyggmlError as error:
        raise ApiError(400, str(error), param) from None


def _shortened(vector: np.ndarray, n: int) -> np.ndarray:
    """Its first n numbers, normalised anew."""
    if n == len(vector):
        return vector
    length = float(np.linalg.norm(vector[:n]))
    return vector[:n] / np.float32(max(length, 1e-12))


def _written(vector: np.ndarray, encodes: bool) -> str | list[float]:
    if encodes:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(x) for x in vector]


def _cost(params: EmbedParams | RerankParams) -> Cost:
    return Cost(params.voice.name, Usage(sum(map(len, params.texts)), 0, 0), None, ())


def _usage(texts: Sequence[np.ndarray]) -> dict[str, Any]:
    n = sum(map(len, texts))
    return {"usage": {"prompt_tokens": n, "total_tokens": n}}
