"""Requests nobody thought of: whatever is sent, the server refuses or answers, and does not fail."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.serve.servers import Server

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def description(parrot: Server) -> dict[str, Any]:
    return dict(parrot.client.get("/openapi.json").json())


def values(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema of the description allows, and now and then anything."""
    if "$ref" in schema:
        return st.deferred(lambda: values(components[schema["$ref"].rpartition("/")[2]], components))
    if variants := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of([values(variant, components) for variant in variants])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object":
            fields = {name: values(inner, components) for name, inner in schema.get("properties", {}).items()}
            required = {name: fields.pop(name) for name in schema.get("required", [])}
            return st.fixed_dictionaries(required, optional=fields) | st.dictionaries(
                st.text(max_size=8), JSON, max_size=2
            )
        case "array":
            return st.lists(values(schema.get("items", {}), components), max_size=3)
        case "integer":
            return st.integers(-2, 40) | st.integers()
        case "number":
            return st.floats(0, 2) | st.floats()
        case "string":
            return st.text(max_size=20)
        case "boolean":
            return st.booleans()
        case _:
            return JSON


@settings(max_examples=100)
@given(data=st.data())
def test_no_request_makes_the_server_fail(parrot: Server, description, data) -> None:
    """Valid in shape or nearly so; prompts are short, so that any of them may be answered."""
    path = data.draw(st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
    content = description["paths"][path]["post"]["requestBody"]["content"]
    components = description["components"]["schemas"]
    body = data.draw(values(content["application/json"]["schema"], components))
    if isinstance(body, dict):
        for name in data.draw(st.lists(st.sampled_from(sorted(body) or ["n"]), max_size=2)):
            body[name] = data.draw(JSON)
        if data.draw(st.booleans()):
            body["model"] = "parrot"
    raw = json.dumps(body).encode()
    response = parrot.client.post(path, content=raw)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@given(body=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_make_the_server_fail(parrot: Server, body) -> None:
    assert 400 <= parrot.client.post("/v1/chat/completions", content=body).status_code < 500


def test_the_description_is_of_what_is_there(parrot: Server, description) -> None:
    """Each path answers to the methods it says; every reference leads somewhere."""
    assert description["openapi"].startswith("3.1")
    for path, operations in description["paths"].items():
        for method in operations:
            response = parrot.client.request(method, path.replace("{name}", "parrot"), content=b"")
            assert response.status_code == (200 if method == "get" else 400)
    text = json.dumps(description)
    for name in {reference.split('"')[0] for reference in text.split("#/components/schemas/")[1:]}:
        assert name in description["components"]["schemas"]
