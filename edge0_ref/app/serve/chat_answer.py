"""The answer to a chat request: chunks with deltas of a message, and the message they make."""

import secrets
from collections.abc import Iterable
from typing import Any

from edge0_ref.app.serve.answers import Chunk, Identity, by_index, finish_of, usage, with_usage
from edge0_ref.app.serve.log_probs import Held, chat_entry
from edge0_ref.app.serve.parts import Part, Parts, Said, Thought
from edge0_ref.app.serve.token_texts import TokenTexts
from edge0_ref.app.serve.tool_calls import Call
from edge0_ref.app.serve.work import Ended, PromptRead, TokenMade
from edge0_ref.tokens import Tokenizer

STREAMED = "chat.completion.chunk"


class ChatAnswer:
    """One text taken apart. opening: text the prompt ended with, which is part of the answer."""

    texts = 1

    def __init__(
        self,
        identity: Identity,
        parts: Parts,
        opening: str,
        tokenizer: Tokenizer,
        log_probs: bool,
        include_usage: bool,
    ) -> None:
        self._identity, self._parts, self._opening = identity, parts, opening
        self._token_texts = TokenTexts(tokenizer) if log_probs else None
        self._include_usage = include_usage
        self._held, self._calls = Held(tokenizer), 0
        self._ended: list[Ended] = []

    def chunks(self, event: PromptRead | TokenMade | Ended) -> list[Chunk]:
        """What this event adds."""
        match event:
            case PromptRead():
                found = [self._chunk({"role": "assistant", "content": ""})]
                found += self._deltas(self._parts.push(self._opening))
            case TokenMade():
                found = self._deltas(self._parts.push(event.text), self._entries(event))
            case Ended():
                self._ended.append(event)
                found = self._deltas(self._parts.finish(), self._entries(event))
                reason = "tool_calls" if self._calls and event.reason == "stop" else event.reason
                found.append(self._chunk({}, finish_reason=reason))
        last = isinstance(event, Ended)
        return with_usage(found, self._identity, STREAMED, self._ended, last) if self._include_usage else found

    def _entries(self, event: TokenMade | Ended) -> list[dict[str, Any]]:
        if self._token_texts is None:
            return []
        return [chat_entry(chances, self._token_texts) for _, chances in self._held.push(event)]

    def _deltas(self, parts: list[Part], entries: list[dict[str, Any]] | None = None) -> list[Chunk]:
        """A chunk for each part; log probabilities come with the first."""
        deltas = [self._delta(part) for part in parts] or ([{}] if entries else [])
        return [self._chunk(delta, None if i else entries) for i, delta in enumerate(deltas)]

    def _delta(self, part: Part) -> dict[str, Any]:
        match part:
            case Thought():
                return {"reasoning_content": part.text}
            case Said():
                return {"content": part.text}
            case Call():
                self._calls += 1
                function = {"name": part.name, "arguments": part.arguments}
                call = {"index": self._calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                return {"tool_calls": [call | {"function": function}]}

    def _chunk(
        self, delta: dict[str, Any], entries: list[dict[str, Any]] | None = None, finish_reason: str | None = None
    ) -> Chunk:
        log_probs = {"content": entries, "refusal": None} if entries else None
        choice = {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": finish_reason}
        return self._identity.chunk(STREAMED, [choice])

    def whole(self, chunks: Iterable[Chunk]) -> Chunk:
        """All of its chunks as one answer."""
        ((_, parts),) = by_index(chunks)
        deltas = [part["delta"] for part in parts]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        said = "".join(delta.get("content", "") for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": said if said or not calls else None}
        if thought := "".join(delta.get("reasoning_content", "") for delta in deltas):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": entries, "refusal": None} if self._token_texts else None,
            "finish_reason": finish_of(parts),
        }
        return self._identity.chunk("chat.completion", [choice]) | {"usage": usage(self._ended)}
