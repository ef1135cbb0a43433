"""The Python API, and what every command is made of.

from edge0_ref.app import open_model

with open_model() as model:
    for piece in (text := model.generate("In the beginning", max_tokens=40)):
        print(piece.text, end="", flush=True)
    print(text.result.tokens_per_second, model.counters.bytes_read)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from edge0_ref.adapters import Adapters, adapters_of
from edge0_ref.app.backends import advice, find_backend, limit_memory, notice_of, reads_as_stored
from edge0_ref.app.locate import locate
from edge0_ref.app.read_mode import default_read_mode
from edge0_ref.app.reuse import open_prefixes
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import ModelConfig
from edge0_ref.contract import (
    EXECUTOR_KINDS,
    READ_MODES,
    READER_THREADS,
    Array,
    Backend,
    Counters,
    Decoder,
    ExecutorKind,
    Measuring,
    Observe,
    ReadMode,
)
from edge0_ref.engine.memory import parse_size, resident_bytes
from edge0_ref.engine.plan import MemoryPlan, Request, make_plan, plan_text
from edge0_ref.engine.prefixes import PrefixBudget, Prefixes
from edge0_ref.engine.prompts import Prompt, check_limits, prompt_ids
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Asked, Generation, Session
from edge0_ref.errors import UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.json_files import is_there
from edge0_ref.packed import SIDECAR
from edge0_ref.tokens import Tokenizer, open_tokenizer

Notify = Callable[[str], None]


def open_model(
    model: Path | str | None = None,
    *,
    backend: str = "reference",
    dtype: str | None = None,
    adapters: Path | str | None = None,
    use_adapters: bool = True,
    memory: int | str | None = None,
    executor: str = "staged",
    slots: int | None = None,
    read_mode: str | None = None,
    packed: Path | str | None = None,
    reader_threads: int = READER_THREADS,
    context: int | None = None,
    reuse: PrefixBudget | None = None,
    observe: Observe | None = None,
    cache: Path | None = None,
    notify: Notify = lambda text: None,
) -> "Model":
    """Open a model: a folder, a tier, a repository in the hub's cache, or None for the embedded one.

    Files are checked now, weights are read with the first text. adapters: a folder; None takes those inside the
    model's folder, if there are any. dtype: of activations; None is the backend's choice. memory: bytes, or "3GiB".
    context: tokens to plan for; None plans for what a text asks for. reuse: room for prefixes kept from text to text;
    None keeps none. read_mode: None is `default_read_mode`, with what `edge0 doctor` left in the folder `cache`.
    packed: a sidecar, or its folder; None takes the one beside the model if it is there, "none" takes none. notify:
    told what a user should know. Raises CheckpointError, AdapterError, UsageError.
    """
    for what, value, known in (("executor", executor, EXECUTOR_KINDS), ("read mode", read_mode, READ_MODES)):
        if value is not None and value not in known:
            raise UsageError(f"{what} {value!r}, wanted one of {', '.join(known)}")
    budget = parse_size(memory) if isinstance(memory, str) else memory
    located = locate(model)
    checkpoint = choose_packed(open_checkpoint(located.folder), packed)
    settings = ModelSettings(
        backend=backend,
        dtype=dtype,
        request=Request(
            context=1 if context is None else context,
            memory=budget,
            executor=cast(ExecutorKind, executor),
            slots=slots,
            read_mode=cast(ReadMode, read_mode or default_read_mode(checkpoint, budget, cache)),
            reader_threads=reader_threads,
            prefix_bytes=reuse.memory if reuse else 0,
        ),
        context=context,
        reuse=reuse,
        observe=observe,
        notify=notify,
    )
    opened = adapters_of(checkpoint, adapters or located.adapters) if use_adapters else Adapters()
    for note in filter(None, (located.note, *opened.notes)):
        notify(note)
    return Model(checkpoint, opened, settings)


def choose_packed(checkpoint: Checkpoint, packed: Path | str | None) -> Checkpoint:
    """[STO-044] The checkpoint with the sidecar that was asked for. Raises UsageError when it is not there."""
    if packed is None:
        return checkpoint
    if str(packed) == "none":
        return replace(checkpoint, packed=None)
    path = Path(packed) / SIDECAR if Path(packed).is_dir() else Path(packed)
    if not path.exists():
        raise UsageError(f"{path}: no such file; `edge0 pack` makes it")
    return replace(checkpoint, packed=path)


@dataclass(frozen=True)
class ModelSettings:
    """How a model is to be run; `request.context` is filled in for each plan, from `context` if that is given."""

    backend: str
    dtype: str | None
    request: Request
    context: int | None
    reuse: PrefixBudget | None
    observe: Observe | None
    notify: Notify


class Model:
    """[ENG-050] A checked model, its adapters, and a decoder once one is needed. Use it in a `with`, or `close` it."""

    def __init__(self, checkpoint: Checkpoint, adapters: Adapters, settings: ModelSettings) -> None:
        self.checkpoint, self.adapters, self.settings = checkpoint, adapters, settings
        self.plan: MemoryPlan | None = None  # of the decoder that runs now
        self.prefixes: Prefixes | None = None  # once there is a decoder, if they are to be kept
        self._session: Session | None = None
        self._logits_tokens = 0  # that its plan has room for
        self._closed = False
        self._earlier = Counters()  # of decoders closed before

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def has_tokenizer(self) -> bool:
        return is_there(self.checkpoint.folder / "tokenizer.json")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError when the folder has none."""
        return open_tokenizer(self.checkpoint.folder)

    @cached_property
    def backend(self) -> Backend[Any]:
        """Raises BackendError."""
        return find_backend(self.settings.backend, dtype=self.settings.dtype)

    @property
    def counters(self) -> Counters:
        """What streaming did since the model was opened."""
        return self._earlier if self._session is None else add(self._earlier, self._session.decoder.counters)

    @property
    def measures(self) -> Mapping[str, float]:
        """What the decoder that runs measured itself, if it does."""
        decoder = self._session.decoder if self._session else None
        return decoder.measures() if isinstance(decoder, Measuring) else {}

    def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        settings: SamplingSettings | None = None,
        stop: Sequence[str] = (),
        asked: Asked | None = None,
        turn: int | None = None,
    ) -> Generation:
        """A text, piece by piece; `.result` says what it was and what it cost. The prompt is text, or token ids.

        turn: how many ids of the prompt the conversation's next prompt will begin with; None: all.
        """
        check_limits(max_tokens, stop)
        ids = self.token_ids(prompt)
        return self._session_for(len(ids), len(ids) + max_tokens).generate(ids, max_tokens, settings, stop, asked, turn)

    def logits(self, prompt: Prompt) -> Array:
        """Logits of every token of the prompt, float32 [tokens, vocab]."""
        ids = self.token_ids(prompt)
        return self._session_for(len(ids), len(ids), logits_tokens=len(ids)).logits(ids)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Raises UsageError for an empty prompt, an unknown id, or text where there is no tokenizer."""
        needs_tokenizer = isinstance(prompt, str) and self.has_tokenizer
        return prompt_ids(prompt, self.tokenizer if needs_tokenizer else None, self.config)

    def _session_for(self, prompt_tokens: int, context: int, logits_tokens: int = 0) -> Session:
        """The running session if it has room, else a new one: planned first, then allocated."""
        if self._closed:
            raise UsageError("this model is closed")
        context = self.settings.context or min(context, self.config.max_context)
        if self._session is None or self._session.context < context or self._logits_tokens < logits_tokens:
            self._release()
            longest = self.settings.context or prompt_tokens  # a context for all texts may be filled by one prompt
            self.plan, decoder = self.start_decoder(longest, context, logits_tokens)
            self._logits_tokens = logits_tokens
            tokenizer = self.tokenizer if self.has_tokenizer else None
            if self.settings.reuse and self.prefixes is None:
                self.prefixes = open_prefixes(
                    self.checkpoint,
                    self.adapters,
                    self.backend,
                    self.plan.plan.top_k,
                    self.settings.reuse,
                    self.settings.notify,
                )
            if self.prefixes:
                self.prefixes.attach(decoder)
            self._session = Session(decoder, self.config, context, tokenizer, self.backend.to_numpy, self.prefixes)
        return self._session

    def start_decoder(
        self, prompt_tokens: int, context: int, logits_tokens: int = 0
    ) -> tuple[MemoryPlan, Decoder[Any]]:
        """A new decoder and its plan, which comes first. Whoever asks closes it. Raises BudgetError, BackendError."""
        weight = sum(info.nbytes for info in self.checkpoint.tensors.values())
        for text in filter(None, (notice_of(self.backend), advice(self.backend, weight))):
            self.settings.notify(text)
        request = replace(
            self.settings.request,
            context=context,
            prompt_tokens=prompt_tokens,
            logits_tokens=logits_tokens,
            reads_as_stored=reads_as_stored(self.backend),
        )
        plan = make_plan(self.checkpoint, self.adapters, request, resident_bytes())
        if request.memory is not None:
            self.settings.notify(plan_text(plan))
        limit_memory(self.backend, request.memory)
        return plan, self.backend.decoder(self.checkpoint, plan.plan, self.adapters, self.settings.observe)

    def _release(self) -> None:
        self._earlier = self.counters
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def close(self) -> None:
        """Stop the reader threads and let go of memory and files; closing twice does nothing.

        Prefixes that are kept in memory go to the disk, if there is room for them.
        """
        if self.prefixes:
            self.prefixes.close()
        self._release()
        self._closed = True

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def add(first: Counters, second: Counters) -> Counters:
    return Counters(**{name: value + getattr(second, name) for name, value in asdict(first).items()})
