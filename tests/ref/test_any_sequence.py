"""Any sequence of calls under any plan, while reads fail: the bits of the plainest decoder, or a refusal."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.adapters import Adapters
from edge0_ref.backend import ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import EXECUTOR_KINDS, Array, ExpertLayout, ExpertStore, Plan
from edge0_ref.errors import CheckpointError, ReadError, UsageError
from tests.ref.builders import Recipe
from tests.ref.test_decoder import open_both

RECIPE = Recipe(layers=3, attention=3, hidden=32, inner=32, heads=1, head_dim=32, value_heads=1, vocab=16, experts=6)
CONTEXT = 24
pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass
class Disk:
    """Of its next reads, the first `well` are well and of the following `bad` half the bytes are wrong.

    Every second one of these fails, the others say nothing.
    """

    well: int = 0
    bad: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_read(self) -> Literal["well", "damages", "fails"]:
        with self.lock:
            if self.well or not self.bad:
                self.well = max(0, self.well - 1)
                return "well"
            self.bad -= 1
            return "damages" if self.bad % 2 else "fails"


@dataclass(frozen=True)
class OnDisk:
    """A layer's store on such a disk, which knows its experts' bytes."""

    inner: ExpertStore
    disk: Disk

    @property
    def num_experts(self) -> int:
        return self.inner.num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self.inner.layout

    def read_into(self, expert: int, slot: Array) -> None:
        self.read_unchecked(expert, slot)
        self.check(expert, slot)

    def read_unchecked(self, expert: int, slot: Array) -> None:
        self.inner.read_into(expert, slot)
        how = self.disk.next_read()
        if how != "well":
            slot[: slot.nbytes // 2] ^= 0xFF
        if how == "fails":
            raise ReadError("the disk failed")

    def check(self, expert: int, slot: Array) -> None:
        content = np.empty_like(slot)
        self.inner.read_into(expert, content)
        if slot.tobytes() != content.tobytes():
            raise CheckpointError("bad checksum")


PLANS = st.builds(
    Plan,
    top_k=st.just(2),
    executor=st.sampled_from(EXECUTOR_KINDS),
    prefill_executor=st.sampled_from(EXECUTOR_KINDS),
    slots=st.integers(1, 5),
    read_mode=st.sampled_from(("mmap", "pread")),
    reader_threads=st.integers(0, 6),
    prefill_chunk=st.integers(1, 5),
    context=st.just(CONTEXT),
    on_demand_slots=st.none() | st.integers(1, 6),
    prefill_from=st.integers(1, 4),
)
TOKEN = st.integers(-1, RECIPE.vocab) | st.integers(0, RECIPE.vocab - 1)  # few are outside the vocabulary
PROMPT = st.lists(TOKEN, max_size=7)
OPERATION = st.one_of(
    st.tuples(st.just("step"), TOKEN),
    st.tuples(st.sampled_from(["prefill", "all_logits"]), PROMPT),
    st.tuples(st.sampled_from(["keep", "restore", "reset"]), st.integers(0, 9)),
    st.tuples(st.just("disk"), st.tuples(st.integers(0, 5), st.integers(0, 3))),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Adapters]:
    return open_both(tmp_path_factory.mktemp("sequences"), RECIPE)


class Pair:
    """A decoder on a disk that fails, and beside it the plainest one, which makes the calls that went well."""

    def __init__(self, checkpoint: Checkpoint, adapters: Adapters, plan: Plan) -> None:
        self.disk, self.needed, self.half_done = Disk(), 0, False
        backend, failing = ReferenceBackend(), replace(checkpoint, wrap_store=lambda _, store: OnDisk(store, self.disk))
        self.decoder = backend.decoder(failing, plan, adapters, self.observe)
        self.plain = backend.decoder(checkpoint, Plan(2, "exact", "exact", reader_threads=0, context=CONTEXT), adapters)
        self.kept: list[tuple[Any, Any]] = []

    def observe(self, point: str, layer: int, value: Any) -> None:
        self.needed += len(value.distinct()) if point == "routing" else 0

    def run(self, name: str, argument: Any) -> None:
        match name:
            case "disk":
                self.disk.well, self.disk.bad = argument
            case "keep":
                if not self.half_done:
                    self.kept.append((self.decoder.snapshot(), self.plain.snapshot()))
            case "reset":
                self.decoder.reset()
                self.plain.reset()
                self.half_done = False
            case "restore":
                if self.kept:
                    kept, plain = self.kept[argument % len(self.kept)]
                    self.decoder.restore(self.decoder.state_of(self.decoder.arrays_of(kept)))
                    self.plain.restore(plain)
                    self.half_done = False
            case _:
                self.call(name, argument)

    def call(self, name: str, argument: Any) -> None:
        counters, tokens = self.decoder.counters, [argument] if name == "step" else argument
        possible = tokens and all(0 <= token < RECIPE.vocab for token in tokens)
        if self.half_done or not possible or self.plain.position + len(tokens) > CONTEXT:
            with pytest.raises(UsageError):
                getattr(self.decoder, name)(argument)
            return
        met, needed = counters.hits + counters.read_ahead + counters.on_demand, self.needed
        try:
            logits = getattr(self.decoder, name)(argument)
        except (CheckpointError, ReadError):
            self.half_done = True
            return
        assert logits.tobytes() == getattr(self.plain, name)(argument).tobytes()
        assert self.decoder.position == self.plain.position
        assert counters.hits + counters.read_ahead + counters.on_demand - met == self.needed - needed
        layout = next(iter(self.decoder._files.stores.values())).layout
        assert (counters.bytes_read, counters.drops) == (counters.reads * layout.nbytes, 0)


@pytest.fixture
def hands_over_every_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of tests are small: reads that a call waits for would all be the caller's own."""
    monkeypatch.setattr("edge0_ref.prefetch.HAND_OVER_BYTES", 0)


@pytest.mark.spec("DEC-040", "DEC-041", "DEC-044", "DEC-045", "DEC-046", "EXE-015", "EXE-016", "STO-031", "STO-033")
@pytest.mark.usefixtures("hands_over_every_read")
@given(plan=PLANS, operations=st.lists(OPERATION, min_size=1, max_size=12))
def test_any_sequence_of_calls_gives_the_plainest_bits_or_a_refusal(
    both: tuple[Checkpoint, Adapters], plan: Plan, operations: list[tuple[str, Any]]
) -> None:
    threads = threading.active_count()
    pair = Pair(*both, plan)
    try:
        for name, argument in operations:
            pair.run(name, argument)
        pair.disk.bad = 0
        pair.run("reset", 0)
        pair.run("all_logits", np.arange(8).tolist())
        pair.run("step", 1)
    finally:
        pair.decoder.close()
        pair.plain.close()
    assert threading.active_count() == threads
