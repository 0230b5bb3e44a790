"""Our answers as Starlette's: JSON that is encoded already, and one shape for every error."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from router.openai_api.errors import ErrorAnswer


def json_response(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, media_type="application/json", headers=headers)


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """The request body for the OpenAPI document; handlers read it themselves, to keep one error shape."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def error_response(answer: ErrorAnswer, headers: dict[str, str] | None = None) -> Response:
    return Response(
        answer.content(),
        status_code=answer.status,
        media_type="application/json",
        headers={**answer.headers, **(headers or {})},
    )
