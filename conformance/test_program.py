"""Chapter 11, backends that are programs: how they talk. What they compute is judged like everybody's."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.cases import ExpertsRecipe
from conformance.checkpoints import CheckpointRecipe
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.framing import Message
from conformance.paths import examples, kinds
from conformance.process import Process
from conformance.program import PROTOCOL
from conformance.recording_store import RecordingStore
from conformance.reply import Reply
from conformance.sessions import Watch
from edge0_ref.contract import ExecutorKind, Plan, SoftmaxTopK
from edge0_ref.errors import BackendError, ShapeError

pytestmark = pytest.mark.claim("program")


@contextmanager
def another(driven: Driven) -> Iterator[Process]:
    """A second process of the same program, greeted."""
    process = Process(driven.backend.command, driven.backend.seconds)
    try:
        process.greet(PROTOCOL)
        yield process
    finally:
        process.close()


@pytest.mark.spec("BCK-022")
def test_every_process_introduces_itself_alike(driven: Driven, judge: Judge) -> None:
    with another(driven) as process:
        told = (process.hello.get("name"), sorted(process.hello.get("claims", [])))
    wanted = (driven.backend.name, sorted(driven.backend.claims - {"program"}))
    judge.state(told, wanted, "name and claims of a second process")


@pytest.mark.spec("BCK-023")
@examples(0.1)
@given(operation=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=40))
def test_an_unknown_operation_is_refused_and_the_next_one_answered(
    driven: Driven, judge: Judge, operation: str
) -> None:
    with another(driven) as process:
        unknown = f"no_{operation}"
        message = process.exchange(Message({"operation": unknown}), unknown)
        judge.error(BackendError, Reply(process, unknown, message).checked, f"the operation {unknown}")
        greeting = process.exchange(Message({"operation": "hello", "protocol": PROTOCOL}), "hello")
    judge.state(greeting.fields.get("name"), driven.backend.name, f"name, after {unknown}")


@pytest.mark.spec("BCK-025", "BCK-020")
def test_the_end_of_stdin_ends_the_program_and_nothing_comes_unasked(driven: Driven, judge: Judge) -> None:
    with another(driven) as process:
        judge.state(process.close(), 0, "exit status after stdin was closed", blame="BCK-025")
    judge.state(process.leftover, b"", "bytes on stdout that nobody asked for", blame="BCK-020")


@pytest.mark.claim("program", "router")
@pytest.mark.spec("BCK-020", "BCK-021")
@examples(0.1)
@given(tokens=st.sampled_from((1, 300, 4096)), more=st.booleans())
def test_messages_may_be_longer_than_a_pipe_holds(driven: Driven, judge: Judge, tokens: int, more: bool) -> None:
    logits = np.tile(np.arange(60, dtype=np.float32), (tokens, 1))
    extra = {"unknown": np.zeros(3, np.float16)} if more else {}
    with another(driven) as process:
        request = Message({"operation": "route", "family": "softmax", "top_k": 60}, {"logits": logits} | extra)
        message = process.exchange(request, "route")
        experts = Reply(process, "route", message).checked().tensor("experts")
    wanted = np.tile(np.arange(59, -1, -1), (tokens, 1))
    judge.choice(experts, wanted, f"{tokens} tokens, all 60 experts, a tensor of no known name: {more}")


@pytest.mark.claim("program", "router")
@pytest.mark.spec("BCK-023")
def test_a_refusal_does_not_end_the_program(driven: Driven, judge: Judge) -> None:
    logits = np.zeros((1, 3), np.float32)
    for _ in range(2):
        judge.error(ShapeError, lambda: driven.backend.route(logits, SoftmaxTopK(4)), "4 of 3 experts")
        judge.choice(driven.route(logits, SoftmaxTopK(2)).experts, np.array([[0, 1]]), "the request after a refusal")


@kinds("staged", "hot")
@pytest.mark.claim("program")
@pytest.mark.spec("BCK-026")
def test_no_read_is_left_for_after_the_reply(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    store = RecordingStore(ExpertsRecipe(6, seed=2))
    executor = driven.executor(kind, store, 4)
    executor.prepare([2, 5])
    judge.state(sorted(store.reads), [2, 5], "reads when the reply to a hint is there")
    driven.close()


@pytest.mark.claim("program", "decoder")
@pytest.mark.spec("BCK-027")
def test_an_observer_hears_everything_before_the_reply(driven: Driven, judge: Judge) -> None:
    model, watch = CheckpointRecipe(("full",), experts=3, top_k=2, seed=1), Watch()
    with model.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, Plan(2, context=8), observe=watch)
        logits = decoder.prefill([1, 2])
        points = ("embedding", "routing", "resident", "logits")
        seen = [point for point, _ in watch.events if point in points]
        judge.state(seen, list(points), "points")
        told = watch.rows(driven, "logits", -1)[-1]
        judge.bits(told, logits, "logits observed, beside the reply")
        driven.close()
