"""What a chat answer holds: calls, thoughts, reasons, counts, chances; and how conversations reach the model."""

import json
from typing import Any

import pytest

from tests.app.serve.parrot import told
from tests.app.serve.servers import Server

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}, "place": {"type": "string"}}},
    },
}
IN_TAGS = "<function=weather>\n<parameter=place>\nUr\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
IN_JSON = json.dumps({"name": "weather", "arguments": {"place": "Ur", "days": 3}})
ARGUMENTS = {"place": "Ur", "days": 3}


def choice(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    response = server.chat(text, **fields)
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return only


@pytest.mark.spec("ENG-090")
@pytest.mark.parametrize("call", [IN_TAGS, IN_JSON], ids=["tags", "json"])
def test_a_call_is_told_as_one(parrot: Server, call) -> None:
    answer = choice(parrot, f"Let me see.\n<tool_call>\n{call}\n</tool_call>", tools=[WEATHER])
    (told_call,) = answer["message"]["tool_calls"]
    assert answer["message"]["content"] == "Let me see."
    assert answer["finish_reason"] == "tool_calls"
    assert (told_call["type"], told_call["function"]["name"]) == ("function", "weather")
    assert json.loads(told_call["function"]["arguments"]) == ARGUMENTS
    assert told_call["id"]


def test_a_message_of_calls_alone_has_no_content(parrot: Server) -> None:
    answer = choice(parrot, f"<tool_call>{IN_JSON}</tool_call>\n<tool_call>{IN_JSON}</tool_call>", tools=[WEATHER])
    assert answer["message"]["content"] is None
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2


@pytest.mark.spec("ENG-090")
def test_who_wants_one_call_gets_no_second_one(parrot: Server) -> None:
    """Nor what is said after the first; what is no call does not count as one."""
    no_call, call = "<tool_call>?</tool_call>", f"<tool_call>{IN_JSON}</tool_call>"
    fields = {"tools": [WEATHER], "parallel_tool_calls": False}
    answer = choice(parrot, f"So {no_call}{call}\n{call} Amen.", **fields)
    assert answer["message"]["content"] == f"So {no_call}"
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}], ids=["no tools", "none chosen"])
def test_without_tools_a_call_is_text(parrot: Server, fields) -> None:
    text = f"<tool_call>{IN_JSON}</tool_call>"
    answer = choice(parrot, text, **fields)
    assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")


def test_a_call_that_never_closes_is_text(parrot: Server) -> None:
    answer = choice(parrot, f"<tool_call>{IN_JSON}", tools=[WEATHER])
    assert answer["message"] == {"role": "assistant", "content": f"<tool_call>{IN_JSON}"}
    assert answer["finish_reason"] == "stop"


@pytest.mark.spec("ENG-090")
def test_a_text_cut_off_after_a_call_says_length(parrot: Server) -> None:
    answer = choice(parrot, f"<tool_call>{IN_JSON}</tool_call>" + " and" * 50, tools=[WEATHER], max_tokens=80)
    assert len(answer["message"]["tool_calls"]) == 1
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("tags", "rest"),
    [(True, IN_TAGS.removeprefix("<function=weather>\n")), (False, json.dumps(ARGUMENTS) + "}")],
    ids=["tags", "json"],
)
def test_a_tool_that_is_chosen_is_called(parrot: Server, tags, rest, thinking) -> None:
    """The call is begun in the prompt; the model has only arguments to give."""
    chosen = {"type": "function", "function": {"name": "weather"}}
    variables = {"tags": tags, "enable_thinking": thinking}
    answer = choice(
        parrot, f"{rest}\n</tool_call>", tools=[WEATHER], tool_choice=chosen, chat_template_kwargs=variables
    )
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)


def test_some_tool_must_be_called(parrot: Server) -> None:
    answer = choice(parrot, f"{IN_JSON}</tool_call>", tools=[WEATHER], tool_choice="required")
    assert answer["finish_reason"] == "tool_calls"


def test_thoughts_are_apart(parrot: Server) -> None:
    begun = choice(parrot, "Hm.\n</think>\n\nYes.", chat_template_kwargs={"enable_thinking": True})
    own = choice(parrot, "<think>\nHm.\n</think>\n\nYes.")
    assert begun["message"] == own["message"]
    assert begun["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert choice(parrot, "Yes.", messages=[{"role": "user", "content": told("Yes.") + "<think>"}])["message"] == {
        "role": "assistant",
        "content": "Yes.",
    }
    unfinished = choice(parrot, "Hm, well", chat_template_kwargs={"enable_thinking": True}, max_tokens=2)
    assert unfinished["finish_reason"] == "length"
    assert unfinished["message"]["content"] == ""
    assert unfinished["message"]["reasoning_content"]


@pytest.mark.spec("ENG-090")
def test_reasons_and_counts(parrot: Server) -> None:
    ended = parrot.chat("Amen").json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    made = ended["usage"]["completion_tokens"]
    short = parrot.chat("Amen", max_tokens=made).json()
    assert (short["choices"][0]["finish_reason"], short["usage"]["completion_tokens"]) == ("length", made)
    assert short["usage"]["total_tokens"] == short["usage"]["prompt_tokens"] + made
    assert choice(parrot, "Amen, amen", stop=",")["finish_reason"] == "stop"
    newer = parrot.chat("Amen" * 9, max_tokens=9, max_completion_tokens=1).json()
    assert newer["usage"]["completion_tokens"] == 1


def test_chances_are_told_for_each_token(parrot: Server) -> None:
    entries = choice(parrot, "Ur é", logprobs=True, top_logprobs=2)["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Ur é"
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    assert choice(parrot, "Ur", logprobs=False)["logprobs"] is None


def prompt_tokens(server: Server, *messages: dict[str, Any]) -> int:
    body = {"messages": [*messages, {"role": "user", "content": told("")}]}
    return int(server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"])


def test_content_may_come_in_parts(parrot: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_tokens(parrot, {"role": "user", "content": parts}) == prompt_tokens(
        parrot, {"role": "user", "content": "one\ntwo"}
    )


def test_system_messages_that_begin_a_conversation_are_one(parrot: Server) -> None:
    """A developer's message is a system message of a newer name. The template would refuse a second one."""
    two = ({"role": "system", "content": "one"}, {"role": "developer", "content": "two"})
    assert prompt_tokens(parrot, *two) == prompt_tokens(parrot, {"role": "system", "content": "one\n\ntwo"})


def test_a_conversation_with_calls_goes_through_the_template(parrot: Server) -> None:
    """Templates walk through arguments as an object; clients send them as text."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ur"}'}}
    messages = (
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Ask."},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
    )
    assert prompt_tokens(parrot, *messages) > prompt_tokens(parrot, messages[0])


def test_models(parrot: Server) -> None:
    (only,) = parrot.client.get("/v1/models").json()["data"]
    assert (only["id"], only["object"], only["max_model_len"]) == ("parrot", "model", 4096)
    assert parrot.client.get("/v1/models/parrot").json()["id"] == "parrot"
    assert parrot.client.get("/v1/models/other").status_code == 404
    assert parrot.chat("Yes", model="parrot").json()["model"] == "parrot"
    assert parrot.chat("Yes", model="edge0").json()["model"] == "parrot"
