"""A checked body becomes texts to generate, and the answer that will be made of them; every limit is checked here."""

from collections.abc import Sequence
from dataclasses import dataclass

from edge0_ref.app.serve.answers import Answer, Identity
from edge0_ref.app.serve.api_error import ApiError, too_long
from edge0_ref.app.serve.chat_answer import ChatAnswer
from edge0_ref.app.serve.completion_answer import CompletionAnswer, Echo
from edge0_ref.app.serve.conversation import read_conversation
from edge0_ref.app.serve.requests import ChatBody, CompletionBody, Most
from edge0_ref.app.serve.work import Text
from edge0_ref.engine.prefixes import turn_of
from edge0_ref.engine.prompts import check_ids
from edge0_ref.engine.session import Asked
from edge0_ref.errors import UsageError
from edge0_ref.tokens import Tokenizer

CHARACTERS_A_TOKEN = 64  # text longer than this, by the context's tokens, is refused before it is tokenized


@dataclass(frozen=True)
class Served:
    """The model as requests see it. names: by which they may call it, the first is its own; context: tokens."""

    names: tuple[str, ...]
    context: int
    vocab_size: int
    tokenizer: Tokenizer
    fingerprint: str

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"model {name!r} does not exist; this server has {self.names[0]}", "model", "model_not_found"
            )

    def identity(self, prefix: str) -> Identity:
        return Identity(prefix, self.names[0], self.fingerprint)

    def encode(self, text: str, special: bool, field: str) -> list[int]:
        """Ids of a prompt. Raises ApiError 400."""
        if len(text) > self.context * CHARACTERS_A_TOKEN:
            most = self.context * CHARACTERS_A_TOKEN
            raise ApiError(400, f"{len(text)} characters of prompt; this server takes {most}", field, "prompt_too_long")
        try:
            ids = self.tokenizer.encode(text, special=special)
        except UsageError as error:
            raise ApiError(400, str(error), field) from None
        return self.check_ids(ids, field)

    def check_ids(self, ids: list[int], field: str) -> list[int]:
        """The same ids. Raises ApiError 400."""
        try:
            check_ids(ids, self.vocab_size)
        except UsageError as error:
            raise ApiError(400, str(error), field) from None
        return ids

    def room(self, prompt: Sequence[int], most: Most, least: int, field: str) -> int:
        """How many tokens the text may have. Raises ApiError 400, with both numbers, if that is too few."""
        if most.tokens is not None and most.tokens < least:
            raise ApiError(400, f"{most.field} is {most.tokens}, wanted at least {least}", most.field, "invalid_value")
        left = self.context - len(prompt)
        if left < (least if most.tokens is None else most.tokens):
            raise too_long(len(prompt), most.tokens, self.context, field if most.tokens is None else most.field)
        return left if most.tokens is None else most.tokens


@dataclass(frozen=True)
class Plan:
    """What a request comes to."""

    texts: tuple[Text, ...]
    answer: Answer


def plan_chat(body: ChatBody, served: Served) -> Plan:
    """Raises ApiError."""
    conversation = read_conversation(body, served.tokenizer)
    ids = served.encode(conversation.prompt, special=False, field="messages")
    text = Text(
        tuple(ids),
        served.room(ids, body.most, 1, "messages"),
        body.settings,
        body.stops,
        Asked(body.top_logprobs) if body.logprobs else None,
        turn_of(ids, served.tokenizer.encode(conversation.asked, special=False)),
    )
    answer = ChatAnswer(
        served.identity("chatcmpl"),
        conversation.parts(),
        conversation.opening,
        served.tokenizer,
        body.logprobs,
        body.streams_usage,
    )
    return Plan((text,), answer)


def plan_completion(body: CompletionBody, served: Served) -> Plan:
    """Raises ApiError."""
    asked = None if body.logprobs is None else Asked(body.logprobs, of_prompt=body.echo)
    texts, echoes = [], []
    for prompt in body.prompts:
        ids = served.encode(prompt, True, "prompt") if isinstance(prompt, str) else served.check_ids(prompt, "prompt")
        most = served.room(ids, body.most, 0 if body.echo else 1, "prompt")
        texts.append(Text(tuple(ids), most, body.settings, body.stops, asked))
        echoes.append(Echo(prompt if isinstance(prompt, str) else served.tokenizer.decode(ids), tuple(ids)))
    answer = CompletionAnswer(
        served.identity("cmpl"),
        len(texts),
        echoes if body.echo else (),
        served.tokenizer,
        asked is not None,
        body.streams_usage,
    )
    return Plan(tuple(texts), answer)
