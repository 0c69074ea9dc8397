"""What operators ask, as of llama-server: tokens of texts, settings, slots, metrics."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pyggml import __version__
from pyggml.cli.commands.serve.fields import Fields, anything, flag, text
from pyggml.cli.commands.serve.service import Service
from pyggml.tokenizer import Tokenizer

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class OperatorRoutes:
    """What answers these paths, all of which want a key where one is asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.routes = [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/props", self.props),
            Route("/slots", self.slots),
            Route("/metrics", self.metrics),
        ]

    async def tokenize(self, request: Request) -> Response:
        """A text → its ids; with_pieces: each with its text, or bytes that are no text."""

        def read(given: dict[str, Any]) -> list[Any]:
            f = Fields(given)
            content = f.need("content", text, "")
            special = f.take("add_special", flag, False)
            parse = f.take("parse_special", flag, True)
            pieces = f.take("with_pieces", flag, False)
            name = f.take("model", text, None)
            f.check()
            tokenizer = self._service.voices.ask(name).model.tokenizer
            ids = tokenizer.encode(content, add_special=special, parse_special=parse)
            return [{"id": id, "piece": _piece(tokenizer, id)} for id in ids] if pieces else ids

        return JSONResponse({"tokens": await self._service.bodies.read(request, read)})

    async def detokenize(self, request: Request) -> Response:
        """Ids → their text."""

        def read(given: dict[str, Any]) -> str:
            f = Fields(given)
            tokens: Any = f.need("tokens", anything, [])
            name = f.take("model", text, None)
            if not isinstance(tokens, list) or any(type(id) is not int for id in tokens):
                f.fault("tokens", "is no list of whole numbers")
            f.check()
            return self._service.voices.ask(name).model.tokenizer.decode(tokens, special=True)

        return JSONResponse({"content": await self._service.bodies.read(request, read)})

    async def props(self, request: Request) -> Response:
        """Of the model that the query names: ?model=NAME."""
        service, asked = self._service, request.query_params.get("model")
        voice = await service.bodies.between(partial(service.voices.ask, asked))
        how, chat = service.sampling, voice.chats
        numbers = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        params = {field: getattr(how, field) for field in numbers}
        return JSONResponse(
            {
                "model_alias": voice.name,
                "models": list(service.voices),
                "build_info": f"pyggml {__version__}",
                "total_slots": len(service.worker.slots),
                "default_generation_settings": {"n_ctx": voice.n_ctx, "params": params},
                "chat_template": chat.encoder.template.source if chat.encoder else None,
                "tool_calls": chat.calls.syntax.family if chat.calls else None,
                "modalities": {"vision": False, "audio": False},
                **voice.model.tokenizer.special_texts(),
            }
        )

    async def slots(self, request: Request) -> Response:
        """The places of answers: how many tokens each has in the cache, and whether it is used."""
        slots = [
            {
                "id": slot.number,
                "n_ctx": slot.batch.n_ctx,
                "n_past": slot.n_past,
                "is_processing": slot.is_open,
            }
            for slot in self._service.worker.slots
        ]
        return JSONResponse(slots)

    async def metrics(self, request: Request) -> Response:
        worker = self._service.worker
        cached = sum(slot.n_past for slot in worker.slots)
        gauges = {
            "answers_active": worker.n_active,
            "answers_waiting": worker.n_waiting,
            "slots": len(worker.slots),
            "cache_tokens": cached,
            "cache_share": cached / max(1, sum(slot.batch.n_ctx for slot in worker.slots)),
        }
        return PlainTextResponse(self._service.journal.metrics(gauges), media_type=_METRICS)


def _piece(tokenizer: Tokenizer, id: int) -> str | list[int]:
    raw = tokenizer.token_bytes(id, special=True)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
