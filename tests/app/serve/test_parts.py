"""Thoughts, text and calls of tools, however a text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app.serve.parts import Part, Parts, Said, Thought
from edge0_ref.app.serve.tool_calls import Call, opening, read_call

MARKS = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", " ", "\n", '{"name":"f"}', "a"])
CALL = '{"name": "f", "arguments": {}}'
SCHEMAS = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["object", "null"]}}}}


def taken_apart(pieces: list[str], thinking: bool, tools: bool) -> list[Part]:
    """The parts, neighbours of one kind put together."""
    parts = Parts(thinking, SCHEMAS if tools else None)
    joined: list[Part] = []
    for part in [*(part for piece in pieces for part in parts.push(piece)), *parts.finish()]:
        if joined and isinstance(part, Said | Thought) and type(joined[-1]) is type(part):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.spec("ENG-090")
@given(text=st.lists(MARKS, max_size=12).map("".join), thinking=st.booleans(), tools=st.booleans())
def test_parts_do_not_depend_on_how_the_text_is_cut(text, thinking, tools) -> None:
    assert taken_apart(list(text), thinking, tools) == taken_apart([text], thinking, tools)


@given(text=st.lists(MARKS, max_size=12).map("".join))
def test_text_without_thought_and_tools_is_what_it_was(text) -> None:
    if not text.lstrip().startswith("<think>"):
        assert taken_apart([text], thinking=False, tools=False) == ([Said(text)] if text else [])


@pytest.mark.parametrize(
    ("text", "thinking", "parts"),
    [
        ("\nI think \n</think>\n\nSo.", True, [Thought("I think"), Said("So.")]),
        ("<think>\nI think</think>So.", False, [Thought("I think"), Said("So.")]),
        ("only a thought </thi", True, [Thought("only a thought </thi")]),
        ("no <think> here", False, [Said("no <think> here")]),
        ("  indented", False, [Said("  indented")]),
        (f"Well.\n\n<tool_call>\n{CALL}\n</tool_call>\n", False, [Said("Well."), Call("f", "{}")]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", False, [Call("f", "{}"), Call("f", "{}")]),
        (f"<tool_call>{CALL}</tool_call>\nDone.", False, [Call("f", "{}"), Said("Done.")]),
        ("a <tool_call>never closed", False, [Said("a <tool_call>never closed")]),
        ("a <tool_call>no call</tool_call> b", False, [Said("a <tool_call>no call</tool_call> b")]),
        (f"<tool_call>{CALL}</tool_call> <tool_c", False, [Call("f", "{}"), Said("<tool_c")]),
    ],
)
def test_a_text_is_taken_apart(text, thinking, parts) -> None:
    assert taken_apart([text], thinking, tools=True) == parts


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(arguments=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), VALUES, max_size=3))
def test_a_call_in_json_is_read_as_it_was_written(arguments) -> None:
    call = read_call("\n" + json.dumps({"name": "f", "arguments": arguments}) + "\n", {})
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == ("f", arguments)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<>")), number=st.integers())
def test_a_call_in_tags_is_read_by_its_schema(text, number) -> None:
    written = (
        "<function=f>\n"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("n", number), ("s", text), ("x", 7))
        )
        + "<parameter=o>\n{}\n</parameter>\n</function>"
    )
    call = read_call(written, SCHEMAS)
    assert call is not None
    assert json.loads(call.arguments) == {"n": number, "s": text, "x": "7", "o": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"name": 1}',
        '{"name": "f", "arguments": [1]}',
        "<function=f>loose</function>",
        "[" * 99999,
    ],
)
def test_what_is_no_call_is_none(text) -> None:
    assert read_call(text, SCHEMAS) is None


@pytest.mark.parametrize(
    ("notation", "rest"), [("json", '{"n": 1}}'), ("tags", "<parameter=n>\n1\n</parameter>\n</function>")]
)
def test_what_follows_an_opening_completes_the_call(notation, rest) -> None:
    assert taken_apart([opening("f", notation), rest, "\n</tool_call>"], False, True) == [Call("f", '{"n": 1}')]
