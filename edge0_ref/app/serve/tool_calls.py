"""How models write a call of a tool: between `<tool_call>` and `</tool_call>`, in one of two notations.

Qwen3.5 and later   <function=NAME> <parameter=KEY> VALUE </parameter> ... </function>
Ling, and Qwen3     {"name": NAME, "arguments": {KEY: VALUE, ...}}
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Notation = Literal["tags", "json"]
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)
Schemas = Mapping[str, Mapping[str, Any] | None]  # name of a tool -> JSON schema of its parameters


@dataclass(frozen=True)
class Call:
    """A tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def notation_of(prompt: str) -> Notation:
    """The notation that a prompt with tools in it teaches."""
    return "tags" if "<function=" in prompt else "json"


def opening(name: str | None, notation: Notation) -> str:
    """The beginning of a call, of this tool if one is named: written into the prompt, it leaves no other choice."""
    if name is None:
        return f"{OPEN}\n"
    if notation == "tags":
        return f"{OPEN}\n<function={name}>\n"
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


def read_call(text: str, schemas: Schemas) -> Call | None:
    """What stands between the marks; None if it is no call in either notation.

    >>> read_call('{"name": "add", "arguments": {"a": 1}}', {})
    Call(name='add', arguments='{"a": 1}')
    >>> read_call("<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>", {"add": None})
    Call(name='add', arguments='{"a": "1"}')
    """
    text = text.strip()
    return read_tags(text, schemas) if text.startswith("<function=") else read_object(text)


def read_object(text: str) -> Call | None:
    try:
        call = json.loads(text)
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, AttributeError, RecursionError):
        return None
    name = call.get("name")
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def read_tags(text: str, schemas: Schemas) -> Call | None:
    """Values are text; the tool's schema says which of them mean something else."""
    function = FUNCTION.fullmatch(text.removesuffix("</function>"))
    if function is None or PARAMETER.sub("", function[2]).strip():
        return None
    name = function[1].strip()
    properties = (schemas.get(name) or {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    values = {key: read_value(value, properties.get(key)) for key, value in PARAMETER.findall(function[2])}
    return Call(name, json.dumps(values, ensure_ascii=False)) if name else None


def read_value(text: str, schema: Any) -> Any:
    """JSON where the schema wants something else than text, and the text is that; otherwise the text.

    >>> [read_value(text, {"type": "integer"}) for text in ("7", "seven")], read_value("7", {"type": "string"})
    ([7, 'seven'], '7')
    """
    wanted = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if wanted == "string" or (isinstance(wanted, list) and "string" in wanted):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
