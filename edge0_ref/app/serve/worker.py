"""[ENG-092] The one thread that opens the model and generates, and the queue in front of it: first come, first served.

A decoder belongs to the thread that made it, so everything that touches it happens here. Requests wait in a queue of
bounded length; each is told what happens through an asyncio queue of its own.
"""

import asyncio
import contextlib
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from edge0_ref.app.api import Model
from edge0_ref.app.serve.api_error import ApiError, from_failure, shutting_down
from edge0_ref.app.serve.live_feed import LiveFeed
from edge0_ref.app.serve.work import Ended, Event, Failed, PromptRead, Text, TokenMade
from edge0_ref.contract import Observe
from edge0_ref.engine.session import Generation


class GoneError(Exception):
    """Whoever asked has left."""


class Job:
    """The texts of one request, in order, and where to tell of them."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = tuple(texts)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.gone = False  # set by the event loop, read by the generation thread
        self._loop = asyncio.get_running_loop()

    def tell(self, event: Event) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """Runs jobs one after the other, on a model that it opens and closes itself.

    open_model: called in the thread, with an observer that ends a text nobody waits for any more, within one layer;
    longest_queue: jobs that may wait beside the one that runs; feed: shown every layer, told of texts and tokens.
    """

    def __init__(self, open_model: Callable[[Observe], Model], longest_queue: int, feed: LiveFeed) -> None:
        self._open_model, self._longest_queue, self._feed = open_model, longest_queue, feed
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self.running: Job | None = None
        self.totals: Counter[str] = Counter()
        self.model: Model | None = None  # for its words: configuration, tokenizer, counters
        self._thread = threading.Thread(target=self._run, name="edge0-generation", daemon=True)

    def start(self) -> Model:
        """Open the model and compute a first token, so that what cannot work fails now. Raises what that raises."""
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure
        assert self.model is not None
        return self.model

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, texts: Sequence[Text]) -> Job:
        """Raises ApiError: 429 when the queue is full, 503 when no more is taken."""
        with self._changed:
            if not self.alive:
                raise shutting_down()
            if len(self._waiting) + (self.running is not None) > self._longest_queue:
                raise ApiError(
                    429,
                    f"{len(self._waiting)} requests wait already, which is all this server lets wait",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            job = Job(texts)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the queue now, or ends within one layer."""
        job.gone = True
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)

    def refuse_waiting(self, error: ApiError) -> None:
        """Take nothing new; whatever waits ends with this error."""
        with self._changed:
            self._closing = True
            jobs = tuple(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in jobs:
            job.tell(Failed(error))

    def refuse_all(self, error: ApiError) -> None:
        """And what runs as well."""
        self.refuse_waiting(error)
        job = self.running
        if job is not None:
            job.tell(Failed(error))
            job.gone = True

    def close(self) -> None:
        """Returns when the model is closed."""
        self.refuse_all(shutting_down())
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._open_model(self._observe) as model:
                self.model = model
                self._feed.attach(lambda: model.counters)
                model.logits([0])  # no text: nothing is kept of it
                self._opened.set()
                while (job := self._next()) is not None:
                    self._run_job(model, job)
        except BaseException as error:
            self._failure = error
            if self._opened.is_set():  # `start` is over: nobody raises it
                traceback.print_exception(error, file=sys.stderr)
        finally:
            self._opened.set()

    def _next(self) -> Job | None:
        with self._changed:
            self.running = None
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return None
            self.running = self._waiting.popleft()
            return self.running

    def _run_job(self, model: Model, job: Job) -> None:
        try:
            for index, text in enumerate(job.texts):
                ended = self._run_text(model, job, index, text)
                if index + 1 == len(job.texts):
                    self.running = None  # before it is told: whoever has an answer may ask again
                job.tell(ended)
        except GoneError:
            self.totals["texts_abandoned"] += 1
        except Exception as error:
            failure = from_failure(error)
            if failure.code == "internal_error":
                traceback.print_exception(error, file=sys.stderr)
            self.totals["texts_failed"] += 1
            self.running = None
            job.tell(Failed(failure))

    def _run_text(self, model: Model, job: Job, index: int, text: Text) -> Ended:
        self._check_gone()
        self._feed.begin()
        generation = model.generate(
            text.prompt, max(text.max_tokens, 1), text.settings, text.stops, text.asked, text.turn
        )
        read = False
        for piece in generation:
            self._check_gone()
            if not read:
                read = True
                job.tell(PromptRead(index, generation.prompt_chances))
            if text.max_tokens:
                job.tell(TokenMade(index, piece.text, piece.token_id is not None, piece.chances))
                self._feed.watch(generation.result)
        if not read:
            job.tell(PromptRead(index, generation.prompt_chances))
        return self._ended(index, text, generation)

    def _ended(self, index: int, text: Text, generation: Generation) -> Ended:
        result = generation.result
        made = len(result.token_ids) if text.max_tokens else 0
        assert result.finish_reason is not None
        self.totals += Counter(
            texts_finished=1,
            prompt_tokens=result.prompt_tokens,
            cached_tokens=result.cached_tokens,
            completion_tokens=made,
        )
        reason = result.finish_reason if text.max_tokens else "length"
        return Ended(index, reason, generation.cut, result.prompt_tokens, result.cached_tokens, made)

    def _check_gone(self) -> None:
        if self.running is not None and self.running.gone:
            raise GoneError

    def _observe(self, point: str, layer: int, value: Any) -> None:
        self._check_gone()
        self._feed.observe(point, layer, value)
