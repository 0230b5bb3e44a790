"""`/v1/prefixes` over HTTP: make, list, look at and give back what is held.

Knows HTTP; what holding means is in `prefixes.py`.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from cache.errors import ServingError
from router.openai_api.errors import answer_to
from router.openai_api.fields import Endpoint
from router.openai_api.handling import Handling, Received
from router.openai_api.keys import visit_of
from router.openai_api.middleware import id_of
from router.openai_api.prefixes import PrefixBody, parse_prefix
from router.openai_api.replies import error_response, json_body, json_response
from router.openai_api.service import Service
from router.openai_api.streams import unless_gone
from router.openai_api.tokenization import unknown_fields

PATH = "/v1/prefixes"


class PrefixRoutes:
    """The handlers. Stateless beside the service."""

    def __init__(self, service: Service, handling: Handling) -> None:
        self._service = service
        self._handling = handling

    def register(self, api: FastAPI) -> None:
        body = json_body(PrefixBody.model_json_schema())
        api.add_api_route(PATH, self.create, methods=["POST"], response_model=None, openapi_extra=body)
        api.add_api_route(PATH, self.listed, methods=["GET"], response_model=None)
        one = f"{PATH}/{{prefix_id}}"
        api.add_api_route(one, self.one, methods=["GET"], response_model=None)
        api.add_api_route(one, self.delete, methods=["DELETE"], response_model=None)

    async def create(self, request: Request) -> Response:
        async def handle(body: Received) -> bytes:
            self._service.metrics.unknown_fields.inc(unknown_fields(PrefixBody, body.fields))
            parsed = await self._handling.checked(request, body, parse_prefix)
            body.place.leave()  # what follows waits for a replica that computes it
            making = self._service.prefixes.create(parsed, id_of(request), visit_of(request))
            return (await unless_gone(request, making)).encoded()

        return await self._handling.plainly(request, Endpoint.PREFIXES, handle)

    async def listed(self, request: Request) -> Response:
        return json_response((await self._service.prefixes.listed(visit_of(request))).encoded())

    async def one(self, request: Request, prefix_id: str) -> Response:
        try:
            shown = await self._service.prefixes.one(prefix_id, visit_of(request))
        except ServingError as error:
            return error_response(answer_to(error))
        return json_response(shown.encoded())

    async def delete(self, request: Request, prefix_id: str) -> Response:
        tally = self._handling.tally(request, Endpoint.PREFIXES)
        try:
            content = (await self._service.prefixes.delete(prefix_id, visit_of(request))).encoded()
        except (Exception, asyncio.CancelledError) as error:
            return self._handling.refusal(error, request, tally)
        tally.end("ok")
        return json_response(content)
