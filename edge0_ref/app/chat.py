"""`edge0 chat`: a conversation in a terminal, on one decoder, each turn computing only what is new."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from edge0_ref.app.api import Model
from edge0_ref.app.live import open_screen, status_line
from edge0_ref.app.shell import tell
from edge0_ref.engine.prefixes import turn_of
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.errors import Edge0Error, UsageError
from edge0_ref.tokens import END_OF_THOUGHT, Message, Tokenizer

HELP = """\
Write, and press Enter; a line that ends in a backslash goes on in the next one.
Ctrl-C stops an answer, Ctrl-D leaves.
/reset      begin anew
/undo       take back the last question and its answer
/save FILE  write the conversation as JSON messages
/help       this"""


class StoppedError(Exception):
    """The user wants no more of this answer."""


class Brake:
    """Ctrl-C while an answer is written. It takes effect between two steps of a layer, never within one.

    An exception from a signal handler could come between noting that a slot holds an expert and reading it.
    """

    def __init__(self) -> None:
        self._pulled = False

    def observe(self, point: str, layer: int, value: Any) -> None:
        """An `Observe` of the decoder."""
        if self._pulled:
            raise StoppedError

    def _pull(self, number: int, frame: FrameType | None) -> None:
        self._pulled = True

    @contextmanager
    def ready(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._pull)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._pulled = False


class Chat:
    """[ENG-083] A conversation. plain: no template, each message goes on from the text so far."""

    def __init__(
        self, model: Model, brake: Brake, settings: SamplingSettings, max_tokens: int, system: str | None, plain: bool
    ) -> None:
        if not plain and not model.tokenizer.has_chat_template:
            raise UsageError("this model has no chat template; with --plain it goes on from what you write")
        self._model, self._brake, self._settings, self._max_tokens = model, brake, settings, max_tokens
        self._plain = plain
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def answer(self, question: str) -> None:
        """Ask, and write the answer as it comes. An error, or a stop before the first piece, leaves all as it was."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        ids, turn = prompt_of(self._model.tokenizer, asked, self._plain)
        with self._brake.ready():
            generation = self._model.generate(ids, self._max_tokens, self._settings, turn=turn)
            screen = open_screen(lambda: generation.result)
            try:
                for piece in generation:
                    screen.write(piece.text)
            except StoppedError:
                pass
            finally:
                screen.close()
                sys.stdout.write("\n")
                sys.stdout.flush()
        result = generation.result
        if result.text:
            self.messages = [*asked, {"role": "assistant", "content": without_thought(result.text)}]
        if sys.stderr.isatty():
            tell(f"{status_line(result)} · {result.cached_tokens} of {result.prompt_tokens} tokens were kept")

    def reset(self) -> None:
        self.messages = list(self._opening)

    def undo(self) -> None:
        if len(self.messages) > len(self._opening):
            self.messages = self.messages[:-2]

    def save(self, path: Path) -> None:
        """Raises UsageError."""
        try:
            path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None
        except ValueError as error:  # a name that no file can have: with NUL, or bytes that are no text
            raise UsageError(f"{path}: {error}") from None


def prompt_of(tokenizer: Tokenizer, messages: list[Message], plain: bool) -> tuple[list[int], int]:
    """The ids of a conversation, and how many of them its next prompt begins with: all but the answer's opening."""
    if plain:
        ids = tokenizer.encode("".join(message["content"] for message in messages))
        return ids, len(ids)
    ids, asked = (
        tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=opening), special=False)
        for opening in (True, False)
    )
    return ids, turn_of(ids, asked)


def without_thought(text: str) -> str:
    """An answer as later turns see it.

    >>> without_thought("<think>hm</think>Yes."), without_thought("No.")
    ('Yes.', 'No.')
    """
    _thought, end, said = text.rpartition(END_OF_THOUGHT)
    return said.lstrip("\n") if end else text


def run_chat(chat: Chat, history: Path | None) -> None:
    """Turn by turn until the end of the input. An error ends a turn, and is told; Ctrl-C while writing drops a line."""
    with line_editor(history) as prompt:
        if prompt:
            tell("/help says what there is; Ctrl-D leaves")
        while True:
            try:
                respond(chat, read_message(prompt))
            except KeyboardInterrupt:  # while a line was written, or just before or after an answer
                print()
            except EOFError:
                break
            except Edge0Error as error:
                tell(f"error: {error}")
        if prompt:
            print()


def read_message(prompt: str, read: Callable[[str], str] = input) -> str:
    """One line, and those that backslashes join to it. Raises EOFError.

    >>> lines = iter(["one \\\\", "two"])
    >>> read_message("", lambda prompt: next(lines))
    'one \\ntwo'
    """
    lines = [read(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read("." * (len(prompt) - 1) + " " if prompt else ""))
    return "\n".join(lines)


def respond(chat: Chat, text: str) -> None:
    """Do what a line says. Raises Edge0Error."""
    match text.split(maxsplit=1):
        case []:
            pass
        case ["/help"]:
            print(HELP)
        case ["/reset"]:
            chat.reset()
        case ["/undo"]:
            chat.undo()
        case ["/save", name]:
            chat.save(Path(os.path.expanduser(name.strip())))  # which leaves a user who is unknown as it is
            tell(f"written to {name.strip()}")
        case [command, *_] if command.startswith("/") and "\n" not in text:
            raise UsageError(f"{command}: no such command, or it lacks something; /help lists them")
        case _:
            chat.answer(text)


@contextmanager
def line_editor(history: Path | None) -> Iterator[str]:
    """The prompt of a terminal, where lines can be edited and come back in a later conversation; else nothing."""
    if not sys.stdin.isatty():
        yield ""
        return
    try:
        import readline
    except ImportError:  # not every Python has it
        yield "> "
        return
    readline.set_history_length(1000)
    with told_if_not_kept(history):
        if history and history.exists():
            readline.read_history_file(history)
    try:
        yield "> "
    finally:
        with told_if_not_kept(history):
            if history:
                history.parent.mkdir(parents=True, exist_ok=True)
                history.touch(mode=0o600)
                readline.write_history_file(history)


@contextmanager
def told_if_not_kept(history: Path | None) -> Iterator[None]:
    """A conversation needs no history: where it cannot be read or written, that is said and nothing more."""
    try:
        yield
    except OSError as error:
        tell(f"{history}: lines of conversations are not kept ({error.strerror})")
