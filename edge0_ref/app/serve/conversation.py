"""From a request to token ids: messages through the checkpoint's chat template, prompts as they are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge0_ref.app.serve import tool_calls
from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.app.serve.parts import Parts
from edge0_ref.app.serve.requests import (
    AssistantMessage,
    ChatBody,
    Content,
    Message,
    NamedTool,
    SpokenMessage,
    ToolCall,
)
from edge0_ref.errors import UsageError
from edge0_ref.tokens import END_OF_THOUGHT, THINK, Tokenizer

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt"})  # variables a client has other fields for


@dataclass(frozen=True)
class Conversation:
    """A prompt, and how the answer to it is to be read.

    asked: the prompt without the beginning of the answer, which is what the conversation's next prompt begins with;
    thinking: it ends inside a thought; opening: text that it ends with and the answer begins with.
    """

    prompt: str
    asked: str
    thinking: bool
    opening: str
    schemas: tool_calls.Schemas | None
    one_call: bool

    def parts(self) -> Parts:
        return Parts(self.thinking, self.schemas, self.one_call)


def read_conversation(body: ChatBody, tokenizer: Tokenizer) -> Conversation:
    """Raises ApiError 400 for what cannot be asked, and for a template that fails."""
    tools = [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = merge_system([template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)])
    prompt = render(tokenizer, body, messages, tools)
    asked = render(tokenizer, body, messages, tools, answer=False)
    thinking = prompt.removeprefix(asked).rstrip().endswith(THINK)  # what a message ends with is no thought
    opening = ""
    if body.tool_choice not in ("auto", "none"):
        opening = tool_calls.opening(chosen_tool(body), notation(tokenizer, body, tools))
        prompt += (f"\n{END_OF_THOUGHT}\n\n" if thinking else "") + opening
        thinking = False
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools} if tools else None
    return Conversation(prompt, asked, thinking, opening, schemas, not body.parallel_tool_calls)


def render(
    tokenizer: Tokenizer,
    body: ChatBody,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    answer: bool = True,
) -> str:
    """The template's text; `answer`: with the beginning of the model's answer."""
    variables = body.chat_template_kwargs
    if wrong := sorted(RESERVED & set(variables)):
        raise ApiError(400, f"{wrong[0]} is no variable of its own", f"chat_template_kwargs.{wrong[0]}")
    try:
        given = {"tools": tools} if tools else {}
        return tokenizer.chat(messages, add_generation_prompt=answer, **given, **variables)
    except UsageError as error:
        raise ApiError(400, str(error), "messages", "chat_template") from None


def notation(tokenizer: Tokenizer, body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> tool_calls.Notation:
    """As the template teaches it, whatever the conversation is about."""
    return tool_calls.notation_of(render(tokenizer, body, [{"role": "user", "content": ""}], tools))


def chosen_tool(body: ChatBody) -> str | None:
    """The name of the tool that must be called; None if any may be."""
    name = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    names = [tool.function.name for tool in body.tools]
    if not names or (name is not None and name not in names):
        known = ", ".join(names) or "none"
        raise ApiError(400, f"tool_choice wants {name or 'a tool'}; tools given: {known}", "tool_choice")
    return name


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages that begin a conversation are one; about later ones the template has its own opinion."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]] if count > 1 else messages


def template_message(message: Message, path: str) -> dict[str, Any]:
    """A message as templates know them: content is text, arguments of calls are objects."""
    match message:
        case SpokenMessage():
            role = "system" if message.role == "developer" else message.role
            return {"role": role, "content": text_of(message.content)}
        case AssistantMessage():
            said: dict[str, Any] = {"role": "assistant", "content": text_of(message.content or "")}
            if message.reasoning_content is not None:
                said["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                said["tool_calls"] = [
                    template_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
                ]
            return said
        case _:
            return {"role": "tool", "content": text_of(message.content), "tool_call_id": message.tool_call_id or ""}


def template_call(call: ToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{path}.function.arguments: not the text of a JSON object", f"{path}.function.arguments")
    return {"id": call.id or "", "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
