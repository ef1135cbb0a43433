"""Text <-> token ids: the model folder's own tokenizer.json, its chat template, and decoding one token at a time."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from edge0_ref.errors import CheckpointError, Edge0Error, UsageError
from edge0_ref.json_files import is_there, read_file, read_json

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]
Fill = Callable[[Mapping[str, Any]], str]  # what a template says, given its variables
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
THINK, END_OF_THOUGHT = "<think>", "</think>"  # as published templates mark what a model thinks
MOST_SAID = 300  # characters of what a library says, in one line
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """[ENG-001] encode and decode are those of tokenizer.json; text never gains or loses a character in between."""

    def __init__(self, inner: "tokenizers.Tokenizer", template: str | None, names: Mapping[str, str]) -> None:
        self._inner, self._template, self._names = inner, template, names

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; `special` lets the tokenizer add its begin token, which a chat template writes itself.

        Raises UsageError for text that is no Unicode (a command line can hold any bytes), or that the tokenizer has no
        ids for.
        """
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError("the text holds bytes that are not UTF-8")
        with failing_as(UsageError, "the model's tokenizer cannot encode this text"):
            return list(self._inner.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """How the vocabulary writes one token, for people ("Ġthe"); "?" for an id it does not have."""
        return self._inner.id_to_token(token_id) or "?"

    def stream(self) -> "TextStream":
        return TextStream(self)

    def chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """[ENG-003] The prompt of a conversation. Raises UsageError for a missing template or one that fails.

        Variables of the template (`enable_thinking=False`) pass through.
        """
        if self._template is None:
            raise UsageError("this model has no chat template: prompt it with plain text")
        return self._fill({"messages": list(messages), "add_generation_prompt": True, **self._names, **variables})

    @cached_property
    def _fill(self) -> Fill:
        """The template, compiled once: a published one takes longer than the tokens of a short answer."""
        assert self._template is not None
        return compile_template(self._template)


class TextStream:
    """[ENG-002] Pieces whose concatenation is `decode` of all ids, none of which ends inside a character.

    A token may hold part of a character, and what it means may depend on the one before. So a window of tokens is
    decoded each time, and text is given out when no later token can change it: all but a last U+FFFD, which may be a
    character half-way, and nothing while single bytes (`<0x0A>`) arrive, whose run is decoded as one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._new = 0  # tokens of the window that no text has been given out for
        self._given = ""  # text of the window that has been given out

    def push(self, token_id: int) -> str:
        """The text that is certain now; often empty."""
        self._window.append(token_id)
        self._new += 1
        if BYTE_TOKEN.fullmatch(self._tokenizer.token(token_id)):
            return ""
        text = self._tokenizer.decode(self._window)
        piece = text.removesuffix(REPLACEMENT)[len(self._given) :]
        self._given += piece
        if piece and self._given == text:
            # the next window starts with this piece's tokens: a first token may decode differently from a later one
            self._window, self._new = self._window[-self._new :], 0
            self._given = self._tokenizer.decode(self._window)
        return piece

    def finish(self) -> str:
        """What was held back, as `decode` has it."""
        piece = self._tokenizer.decode(self._window)[len(self._given) :]
        self._given += piece
        return piece


@contextmanager
def failing_as(kind: type[Edge0Error], what: str) -> Iterator[None]:
    """The library of tokenizers raises bare Exception, and where it panics not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({shorten(str(error), MOST_SAID)})") from None  # it may repeat the file


def open_tokenizer(folder: Path) -> Tokenizer:
    """[ENG-001] The tokenizer of a model folder. Raises CheckpointError when there is none or it is damaged.

    A file may come from training with a length at which texts were cut or to which they were padded: no prompt is.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    text = read_file(path)
    with failing_as(CheckpointError, f"{path}: not a tokenizer"):
        inner = tokenizers.Tokenizer.from_buffer(text)
    inner.no_truncation()
    inner.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if is_there(settings_path) else {}
    template_path = folder / "chat_template.jinja"
    try:
        template = read_file(template_path).decode() if is_there(template_path) else _default_template(settings)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{template_path}: not readable ({error})") from None
    return Tokenizer(inner, template, _special_names(settings))


def _default_template(settings: Mapping[str, Any]) -> str | None:
    """One template, or a list of named ones of which `default` is meant."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates use; a token is a string or an object with its content."""
    names = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            names[key] = content
    return names


def compile_template(template: str) -> Fill:
    """[ENG-003] A chat template in a sandbox: it can neither import, nor change what it is given, nor reach a file.

    Functions and block trimming are those that published templates count on: `tojson`, `raise_exception`,
    `strftime_now`, and `break` and `continue` in loops. Raises UsageError.
    """
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        compiled = environment.from_string(template)
    except Exception as error:
        raise _template_error(error) from None

    def fill(variables: Mapping[str, Any]) -> str:
        try:
            return compiled.render(**variables)
        except UsageError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise _template_error(error) from None

    return fill


def _template_error(error: Exception) -> UsageError:
    return UsageError(f"the chat template fails: {type(error).__name__}: {error}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes `<` and `&` for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise UsageError(f"the chat template refuses this conversation: {message}")
