"""A session: one decoder, one text at a time, piece by piece, with an account of what it cost."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from edge0_ref.config import ModelConfig
from edge0_ref.contract import Array, Counters, Decoder
from edge0_ref.engine.chances import Chances, chances
from edge0_ref.engine.memory import peak_bytes
from edge0_ref.engine.prefixes import Prefixes
from edge0_ref.engine.prompts import Prompt, check_limits, prompt_ids
from edge0_ref.engine.sampling import DrawStream, SamplingSettings, sample
from edge0_ref.engine.stops import StopStrings
from edge0_ref.errors import UsageError
from edge0_ref.tokens import TextStream, Tokenizer

FinishReason = Literal["stop", "length"]
CLOSED = "the model is closed, or has begun a text that needs more room: this one cannot go on"
SCORED_AT_ONCE = 32  # tokens of a prompt whose logits, each as long as the vocabulary, are held together


@dataclass(frozen=True)
class Piece:
    """[ENG-040] Text that is certain now, and the token that made it so; a last piece may come without a token.

    chances: how likely the model held that token, if it was asked.
    """

    text: str
    token_id: int | None
    chances: Chances | None = None


@dataclass(frozen=True)
class Asked:
    """What to tell beside the text: chances of each token with the `top` likeliest; of the prompt's tokens too.

    The first token of a prompt has none before it, and so no chances.
    """

    top: int = 0
    of_prompt: bool = False


@dataclass(frozen=True)
class Result:
    """[ENG-041] A text and what it cost, so far or in the end.

    token_ids: without the id that ended the text; cached_tokens: of the prompt, not computed because a kept prefix had
    them; prefill_tokens_per_second: of the others; tokens_per_second: decode steps over the time spent in them;
    time_to_first_token: seconds from the start of the prompt; bytes_read .. evaluations: `contract.Counters`, of this
    text; hit_rate: share of the needed experts that were in a slot already; peak_bytes: of the whole process.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    seed: int | None
    prefill_tokens_per_second: float
    tokens_per_second: float
    time_to_first_token: float
    hit_rate: float
    bytes_read: int
    reads: int
    hits: int
    read_ahead: int
    on_demand: int
    drops: int
    wait_seconds: float
    evaluations: int
    peak_bytes: int


class Session:
    """[ENG-042] Texts through one decoder, one at a time; each starts at position 0, after an error too.

    context: tokens the decoder has room for; to_numpy: the backend's, for its logits; tokenizer: None if prompts are
    ids and nobody wants text; prefixes: kept from text to text.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        config: ModelConfig,
        context: int,
        tokenizer: Tokenizer | None = None,
        to_numpy: Callable[[Any], Array] = lambda array: array,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.decoder, self.config, self.context = decoder, config, context
        self.tokenizer, self.to_numpy, self.prefixes = tokenizer, to_numpy, prefixes
        self.running: Generation | None = None
        self._closed = False

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        settings: SamplingSettings | None = None,
        stop: Sequence[str] = (),
        asked: Asked | None = None,
        turn: int | None = None,
    ) -> "Generation":
        """Begin a text: iterate over its pieces, read `.result` at any time. Raises UsageError before any work.

        turn: how many ids of the prompt the conversation's next prompt will begin with; None: all.
        """
        ids = prompt_ids(prompt, self.tokenizer, self.config)
        check_limits(max_tokens, stop)
        if stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this model has none")
        if len(ids) > self.context:
            raise UsageError(f"a prompt of {len(ids)} tokens, room for {self.context}")
        settings = settings or SamplingSettings()
        if settings.temperature > 0 and settings.seed is None:
            settings = replace(settings, seed=secrets.randbits(32))
        return Generation(self, ids, max_tokens, settings, StopStrings(stop), asked, turn)

    def logits(self, prompt: Prompt) -> Array:
        """Logits of every token of a prompt, float32 [tokens, vocab], from position 0."""
        ids = prompt_ids(prompt, self.tokenizer, self.config)
        self.begin(None)
        return self.to_numpy(self.decoder.all_logits(ids))

    def begin(self, text: "Generation | None") -> None:
        """The decoder, at position 0, is for `text` now. Raises UsageError if it is closed."""
        if self._closed:
            raise UsageError(CLOSED)
        if self.running:
            self.running.settle()
        self.running = text
        self.decoder.reset()

    def check_running(self, text: "Generation") -> None:
        """Raises UsageError where the decoder is for another text by now, or closed."""
        if self._closed:
            raise UsageError(CLOSED)
        if self.running is not text:
            raise UsageError("another text was begun on this session: this one cannot go on")

    def close(self) -> None:
        """[ENG-050] No text of this session goes on, or begins."""
        if self.running:
            self.running.settle()
        self.running, self._closed = None, True
        self.decoder.close()


class Generation(Iterator[Piece]):
    """One text as it comes: an iterator of pieces. An error ends it and leaves the session usable."""

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        max_tokens: int,
        settings: SamplingSettings,
        stops: StopStrings,
        asked: Asked | None = None,
        turn: int | None = None,
    ) -> None:
        self._session, self._prompt, self._max_tokens, self._turn = session, prompt, max_tokens, turn
        self._settings, self._stops, self._asked = settings, stops, asked
        self.prompt_chances: tuple[Chances, ...] = ()  # of the prompt's tokens from the second on, once it is read
        self._stream = TextStream(session.tokenizer) if session.tokenizer else None
        self._token_ids: list[int] = []
        self._text = ""
        self._finish_reason: FinishReason | None = None
        self._cached_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._steps = 0
        self._counters_before = Counters()
        self._counters_after: Counters | None = Counters()  # None while the decoder is at this text
        self._pieces = self._run()

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self._text += piece.text
        return piece

    def _run(self) -> Iterator[Piece]:
        try:
            yield from self._decode()
        finally:
            if self._session.running is self:
                self.settle()

    def settle(self) -> None:
        """[ENG-041] Whatever the decoder does from now on is not this text's."""
        if self._counters_after is None:
            self._counters_after = replace(self._session.decoder.counters)

    def _decode(self) -> Iterator[Piece]:
        """[ENG-044] Ends at an end id ("stop"), a stop string ("stop"), max_tokens or a full context ("length")."""
        draws = DrawStream(self._settings.seed or 0)
        logits = self._prefill()
        while True:
            token = sample(logits, self._settings, self._prompt, self._token_ids, draws)
            if token in self._session.config.eos_token_ids:
                self._finish_reason = "stop"
                break
            self._token_ids.append(token)
            known = chances(logits, token, self._asked.top) if self._asked else None
            text = self._stops.push(self._stream.push(token)) if self._stream else ""
            if self._stops.hit:
                self._finish_reason = "stop"
            elif len(self._token_ids) == self._max_tokens or self._position == self._session.context:
                self._finish_reason = "length"
            yield Piece(text, token, known)
            if self._finish_reason:
                break
            logits = self._step(token)
        if self._session.prefixes and self._session.running is self:
            self._session.prefixes.keep_text([*self._prompt, *self._token_ids][: self._position], logits)
        yield from self._rest()

    def _prefill(self) -> Array:
        start, session = time.perf_counter(), self._session
        session.begin(self)
        self._counters_before, self._counters_after = replace(session.decoder.counters), None
        if self._asked and self._asked.of_prompt:
            logits = self._score_prompt(self._asked.top)
        elif session.prefixes:
            logits, self._cached_tokens = session.prefixes.prefill(self._prompt, self._turn)
        else:
            logits = session.to_numpy(session.decoder.prefill(self._prompt))
        self._prefill_seconds = time.perf_counter() - start
        return logits

    def _score_prompt(self, top: int) -> Array:
        """`prefill` with the logits of every token, of which each says how likely the next one was."""
        found, following = [], self._prompt[1:]
        for first in range(0, len(self._prompt), SCORED_AT_ONCE):
            part = self._prompt[first : first + SCORED_AT_ONCE]
            rows = self._session.to_numpy(self._session.decoder.all_logits(part))
            found += [chances(row, token, top) for row, token in zip(rows, following[first:], strict=False)]
        self.prompt_chances = tuple(found)
        last: Array = rows[-1]
        return last

    def _step(self, token: int) -> Array:
        self._session.check_running(self)
        start = time.perf_counter()
        logits = self._session.to_numpy(self._session.decoder.step(token))
        self._decode_seconds += time.perf_counter() - start
        self._steps += 1
        return logits

    def _rest(self) -> Iterator[Piece]:
        """Text that was held back while more was expected."""
        text = self._stops.push(self._stream.finish()) if self._stream else ""
        if self._stops.hit:
            self._finish_reason = "stop"
        else:
            text += self._stops.finish()
        if text:
            yield Piece(text, None)

    @property
    def cut(self) -> bool:
        """A stop string ended the text."""
        return self._stops.hit

    @property
    def _position(self) -> int:
        """Tokens the decoder has seen."""
        return self._session.decoder.position

    @property
    def result(self) -> Result:
        """The text so far and what it cost so far; finish_reason is None while it goes on."""
        spent = counters_between(self._counters_before, self._counters_after or self._session.decoder.counters)
        needed = spent.hits + spent.read_ahead + spent.on_demand
        return Result(
            text=self._text,
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached_tokens,
            seed=self._settings.seed,
            prefill_tokens_per_second=rate(len(self._prompt) - self._cached_tokens, self._prefill_seconds),
            tokens_per_second=rate(self._steps, self._decode_seconds),
            time_to_first_token=self._prefill_seconds,
            hit_rate=spent.hits / needed if needed else 0.0,
            peak_bytes=peak_bytes(),
            **asdict(spent),
        )


def rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def counters_between(before: Counters, after: Counters) -> Counters:
    """What happened from one reading of the counters to a later one."""
    earlier = asdict(before)
    return Counters(**{name: value - earlier[name] for name, value in asdict(after).items()})
