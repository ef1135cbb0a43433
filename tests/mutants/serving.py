"""Mutants of chapter 10, serving: answers, refusals, the queue, who may ask, log probabilities."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from edge0_ref.app.serve import chat_answer, guards, parts, requests, sse, worker
from edge0_ref.app.serve.log_probs import Held
from edge0_ref.engine import chances
from tests.mutants.replacing import replace_everywhere


def a_whole_message_is_tidied(patch: pytest.MonkeyPatch) -> None:
    original = chat_answer.ChatAnswer.whole

    def whole(answer: chat_answer.ChatAnswer, chunks: Any) -> Any:
        said = original(answer, chunks)
        message = said["choices"][0]["message"]
        message["content"] = message["content"] and message["content"].strip()
        return said

    patch.setattr(chat_answer.ChatAnswer, "whole", whole)


def a_call_cut_off_is_a_call(patch: pytest.MonkeyPatch) -> None:
    original = chat_answer.ChatAnswer._chunk

    def chunk(answer: chat_answer.ChatAnswer, delta: Any, entries: Any = None, finish_reason: Any = None) -> Any:
        return original(answer, delta, entries, "tool_calls" if finish_reason and answer._calls else finish_reason)

    patch.setattr(chat_answer.ChatAnswer, "_chunk", chunk)


def one_call_is_as_good_as_two(patch: pytest.MonkeyPatch) -> None:
    original = parts.Parts.__init__

    def initialize(self: parts.Parts, thinking: bool = False, schemas: Any = None, one_call: bool = False) -> None:
        original(self, thinking, schemas)

    patch.setattr(parts.Parts, "__init__", initialize)


def what_is_not_supported_is_ignored(patch: pytest.MonkeyPatch) -> None:
    nothing: Mapping[str, Any] = MappingProxyType({})
    patch.setattr(requests, "UNSUPPORTED", nothing)


def a_field_without_its_name(patch: pytest.MonkeyPatch) -> None:
    original = requests.field_error

    def field_error(error: Any) -> Any:
        found = original(error)
        found.param = None
        return found

    replace_everywhere(patch, original, field_error)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    class Stack(worker.deque):  # type: ignore[type-arg]
        popleft = worker.deque.pop

    patch.setattr(worker, "deque", Stack)


def the_one_that_is_answered_waits_too(patch: pytest.MonkeyPatch) -> None:
    original = worker.Worker.__init__

    def init(self: worker.Worker, open_model: Any, longest_queue: int, feed: Any) -> None:
        original(self, open_model, longest_queue - 1, feed)

    patch.setattr(worker.Worker, "__init__", init)


def a_client_that_leaves_is_served_to_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sse.Worker, "cancel", lambda worker, job: None)


def every_name_is_ours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guards.Access, "knows", lambda access, host: True)


def a_key_that_begins_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guards.hmac, "compare_digest", lambda given, key: given.startswith(key))


def chances_after_temperature(patch: pytest.MonkeyPatch) -> None:
    original = chances.chances
    replace_everywhere(
        patch, original, lambda logits, token, top: original((logits / np.float32(2)).astype(np.float32), token, top)
    )


def tokens_of_a_stop_string_told(patch: pytest.MonkeyPatch) -> None:
    def push(held: Held, event: Any) -> Any:
        return [(0, event.chances)] if getattr(event, "chances", None) else []

    patch.setattr(Held, "push", push)


def tokens_told_with_any_text_that_comes_out(patch: pytest.MonkeyPatch) -> None:
    original = Held.push

    def push(held: Held, event: Any) -> Any:
        released = original(held, event)
        if getattr(event, "text", ""):
            released, held._held = released + held._held, []
        return released

    patch.setattr(Held, "push", push)


MUTANTS = {
    a_whole_message_is_tidied: "ENG-090",
    a_call_cut_off_is_a_call: "ENG-090",
    one_call_is_as_good_as_two: "ENG-090",
    what_is_not_supported_is_ignored: "ENG-091",
    a_field_without_its_name: "ENG-091",
    last_come_first_served: "ENG-092",
    the_one_that_is_answered_waits_too: "ENG-092",
    a_client_that_leaves_is_served_to_the_end: "ENG-092",
    every_name_is_ours: "ENG-093",
    a_key_that_begins_right: "ENG-093",
    chances_after_temperature: "ENG-094",
    tokens_of_a_stop_string_told: "ENG-094",
    tokens_told_with_any_text_that_comes_out: "ENG-094",
}
