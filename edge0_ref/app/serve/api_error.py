"""A refusal as OpenAI's clients read it: a status and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

from edge0_ref.errors import Edge0Error, UsageError

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """param: the field of the request that is wrong, `messages[2].content`; code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def too_long(prompt_tokens: int, max_tokens: int | None, context: int, field: str) -> ApiError:
    """A prompt, or a prompt with the text asked for, that the context has no room for."""
    asked = f"{prompt_tokens} tokens of prompt" + ("" if max_tokens is None else f" and {max_tokens} of text")
    return ApiError(
        400,
        f"this server's context is {context} tokens; asked for: {asked}",
        field,
        "context_length_exceeded",
    )


def shutting_down() -> ApiError:
    return ApiError(503, "this server is shutting down", code="shutting_down")


def unexpected(error: Exception) -> ApiError:
    """A bug: the client learns its kind, the rest stays here."""
    return ApiError(500, f"unexpected {type(error).__name__}; the server's log has it", code="internal_error")


def from_failure(error: Exception) -> ApiError:
    """What ended a text that had been begun. What is no error of edge0's own is a bug."""
    match error:
        case ApiError():
            return error
        case UsageError():
            return ApiError(400, str(error))
        case Edge0Error():
            return ApiError(500, str(error), code="generation_failed")
        case _:
            return unexpected(error)
