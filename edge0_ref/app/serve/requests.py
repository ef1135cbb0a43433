"""[ENG-091] Bodies of requests, checked once: JSON -> frozen data. The OpenAPI description is made of it as well.

As with OpenAI's server a field that is null is a field that is absent, and a field nobody knows is ignored; but a
field that would change the answer and is not supported is refused, rather than ignored.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from edge0_ref.app.serve.api_error import ApiError
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.errors import UsageError

MOST_MESSAGES, MOST_TOOLS, MOST_PROMPTS = 2048, 128, 64
MOST_STOPS, LONGEST_STOP = 16, 512
B = TypeVar("B", bound="Body")

# fields of OpenAI's that change an answer, and the values of them that ask for nothing
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}


def some_text(stop: str) -> str:
    if not stop:
        raise ValueError("an empty stop string would stop every text at once")
    return stop


Stop = Annotated[str, Field(max_length=LONGEST_STOP), AfterValidator(some_text)]


class Frozen(BaseModel):
    """Types are never converted: "5" is no number, and true is none either. A field that is null is absent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def without_null(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class TextPart(Frozen):
    """A part of a message; this server reads text only."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class CalledFunction(Frozen):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str = "{}"


class ToolCall(Frozen):
    """A call the model made earlier in the conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class SpokenMessage(Frozen):
    """What was said to the model. developer is OpenAI's newer word for system."""

    role: Literal["system", "developer", "user"]
    content: Content


class AssistantMessage(Frozen):
    """What the model said; without content if it only called tools."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Frozen):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None


Message = Annotated[SpokenMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Frozen):
    """parameters: a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Frozen):
    """A function the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Frozen):
    """Its name."""

    name: str


class NamedTool(Frozen):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Frozen):
    """include_usage: a last chunk with the counts."""

    include_usage: bool = False


class Most(NamedTuple):
    """Tokens that a text may have, None: as many as there is room for; and the field that says it."""

    field: str
    tokens: int | None


class Body(Frozen):
    """What both kinds of requests share. Ranges of sampling settings are those of `SamplingSettings`."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def settings(self) -> SamplingSettings:
        """Raises UsageError, which begins with the name of the field."""
        return SamplingSettings(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.seed,
        )

    @property
    def most(self) -> Most:
        return Most("max_tokens", self.max_tokens)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streams_usage(self) -> bool:
        return self.stream and self.stream_options.include_usage


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def most(self) -> Most:
        newer = self.max_completion_tokens
        return super().most if newer is None else Most("max_completion_tokens", newer)


TokenIds = Annotated[list[int], Field(min_length=1)]


class CompletionBody(Body):
    """`POST /v1/completions`. Several prompts have a choice each, in their order."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)


def read_body(raw: bytes, kind: type[B]) -> B:
    """Raises ApiError 400 with the field's name."""
    fields = read_json(raw)
    for name, harmless in UNSUPPORTED.items():
        if fields.get(name) is not None and fields[name] not in harmless:
            raise ApiError(400, f"{name} is not supported here", name, "unsupported_value")
    try:
        body = kind.model_validate(fields)
        body.settings  # noqa: B018  (checked here once)
    except ValidationError as error:
        raise field_error(error) from None
    except UsageError as error:
        raise ApiError(400, str(error), str(error).split()[0], "invalid_value") from None
    return body


def read_json(raw: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    try:
        fields = json.loads(raw, parse_constant=refuse_constant)
        json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not a JSON object")
    return fields


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def field_error(error: ValidationError) -> ApiError:
    """The first complaint, with the path of its field. Names of types in a path are pydantic's, not the client's."""
    errors = error.errors(include_url=False, include_input=False)
    # of the forms that a field may have, one of which fails a check of this file, the client meant that one
    first = next((one for one in errors if one["type"] == "value_error"), errors[0])
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif part.isidentifier() and part not in ("str", "system", "developer", "user", "assistant", "tool"):
            path += f".{part}"
    return ApiError(400, f"{path}: {first['msg'].removeprefix('Value error, ')}", path, "invalid_value")
