"""`/openapi.json`: made of the declarations that check the requests."""

from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from edge0_ref.app.serve.requests import ChatBody, CompletionBody

SCHEMAS = "#/components/schemas/"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def description(keyed: bool) -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, schemas = models_json_schema(
        [(ChatBody, "validation"), (CompletionBody, "validation")], ref_template=SCHEMAS + "{model}"
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"] | {"Error": ERROR}}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edge0", "version": version("edge0")},
        "paths": {
            "/v1/chat/completions": {"post": generating("ChatBody", "The next message of a conversation.")},
            "/v1/completions": {"post": generating("CompletionBody", "How a text goes on.")},
            "/v1/models": {"get": reading("The models: one.")},
            "/v1/models/{name}": {
                "get": reading("One model.")
                | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
            "/healthz": {"get": reading("Whether texts are generated.")},
            "/metrics": {"get": reading("Counters, in Prometheus' format.", "text/plain")},
        },
        "components": components,
    } | ({"security": [{"key": []}]} if keyed else {})


def generating(schema: str, text: str) -> dict[str, Any]:
    """A request with a body; its answer is one object, or a stream of events."""
    body = {"application/json": {"schema": {"$ref": SCHEMAS + schema}}}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
            },
            **refusals(),
        },
    }


def reading(text: str, media_type: str = "application/json") -> dict[str, Any]:
    return {
        "summary": text,
        "responses": {"200": {"description": text, "content": {media_type: {}}}, **refusals()},
    }


def refusals() -> dict[str, Any]:
    """Every refusal has the same shape."""
    content = {"application/json": {"schema": {"$ref": SCHEMAS + "Error"}}}
    return {"default": {"description": "Refused, or failed.", "content": content}}
