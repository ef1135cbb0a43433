"""What a backend must provide. The data of its calls is in `data.py` and is imported from here too."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from edge0_ref.data import (
    COEFFICIENT_DTYPES,
    EXECUTOR_KINDS,
    GROUP_SIZES,
    READ_MODES,
    READER_THREADS,
    Array,
    Counters,
    ExecutorKind,
    Expert,
    ExpertLayout,
    Lora,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
    ReadMode,
    RouterSpec,
    Routing,
    SigmoidGroup,
    SoftmaxTopK,
)

if TYPE_CHECKING:
    from edge0_ref.adapters import Adapters
    from edge0_ref.checkpoint import Checkpoint

__all__ = [
    "A",
    "Array",
    "Backend",
    "COEFFICIENT_DTYPES",
    "ChecksApart",
    "Counters",
    "Decoder",
    "EXECUTOR_KINDS",
    "Executor",
    "ExecutorKind",
    "Expert",
    "ExpertLayout",
    "ExpertStore",
    "GROUP_SIZES",
    "Lora",
    "Measuring",
    "Observe",
    "Plan",
    "PrerouterHead",
    "QuantizedMatrix",
    "READ_MODES",
    "READER_THREADS",
    "ReadMode",
    "RouterSpec",
    "Routing",
    "RoutingSource",
    "SigmoidGroup",
    "SoftmaxTopK",
    "WrapStore",
]

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


@runtime_checkable
class ExpertStore(Protocol):
    """One layer's experts on some medium. edge0 owns it, so that every read can be observed."""

    @property
    def num_experts(self) -> int: ...

    @property
    def layout(self) -> ExpertLayout: ...

    def read_into(self, expert: int, slot: Array) -> None:
        """Fill `slot` (uint8 [layout.nbytes]) with `expert`. Called from reader threads.

        Raises ReadError; CheckpointError for bytes that must not be used.
        """
        ...


@runtime_checkable
class ChecksApart(ExpertStore, Protocol):
    """[STO-033] A store that can read now and check later; its `read_into` does both."""

    def read_unchecked(self, expert: int, slot: Array) -> None:
        """Raises ReadError."""
        ...

    def check(self, expert: int, slot: Array) -> None:
        """Raises CheckpointError for bytes that must not be used. What was found whole once may be passed."""
        ...


@runtime_checkable
class Executor(Protocol[A]):
    """Runs one layer's routed experts."""

    @property
    def counters(self) -> Counters: ...

    @property
    def resident(self) -> frozenset[int]:
        """[EXE-018] The experts that have a slot, those still being read included; none after `close`."""
        ...

    def prepare(self, experts: Sequence[int]) -> None:
        """[EXE-010] A hint that these will be needed next: it may start reads and never changes a result."""
        ...

    def __call__(self, x: A, routing: Routing) -> A:
        """`y[t] = sum over j of weights[t, j] * expert[t, j](x[t])`; x, y: [tokens, hidden]."""
        ...

    def release_hints(self) -> None:
        """[EXE-025] A new turn: what was hinted at before pins nothing any more."""
        ...

    def close(self) -> None:
        """Release slots and wait for reads in flight."""
        ...


Observe = Callable[[str, int, Any], None]
RoutingSource = Callable[[int, int, Routing], Routing]  # (layer, position, routing) -> what is executed there instead
WrapStore = Callable[[int, ExpertStore], ExpertStore]  # (layer, its store) -> the store that reads go through


@runtime_checkable
class Decoder(Protocol[A_co]):
    """One sequence through one model. Position 0 is the first token after construction or `reset`."""

    @property
    def position(self) -> int: ...

    @property
    def counters(self) -> Counters: ...

    def prefill(self, tokens: Sequence[int]) -> A_co:
        """Append prompt tokens, routed by the routers; logits of the last one, [vocab]."""
        ...

    def all_logits(self, tokens: Sequence[int]) -> A_co:
        """`prefill`, returning the logits of every token: [tokens, vocab]."""
        ...

    def step(self, token: int) -> A_co:
        """Append one token, consuming the predictions made for its position; its logits, [vocab]."""
        ...

    def reset(self) -> None:
        """Back to position 0; predictions are forgotten, slots keep their bytes."""
        ...

    def snapshot(self) -> Any:
        """The whole state by value: later steps never change it."""
        ...

    def restore(self, state: Any) -> None:
        """Return to a snapshot of this decoder."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Measuring(Protocol):
    """What a decoder may be besides: one with figures of its own about its last steps, which `edge0 bench` tells."""

    def measures(self) -> Mapping[str, float]:
        """Name, ending in its unit -> figure: graph_build_ms_per_token, device_peak_bytes."""
        ...


@runtime_checkable
class Backend(Protocol[A]):
    """A backend claims what it does; what it does not claim is reported as unclaimed, never as passed.

    Claims: dequant quantize linear lora router prerouter executor:exact executor:staged executor:hot
    executor:whole_layer decoder mixer:kda mixer:mla train bits. The last one promises what the spec asks of the
    reference alone: bits that depend on neither executor, chunks, threads nor neighbours.
    """

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]: ...

    def from_numpy(self, array: Array) -> A: ...

    def to_numpy(self, array: A) -> Array: ...

    def dequantize(self, matrix: QuantizedMatrix) -> A:
        """float32 [rows, cols]."""
        ...

    def quantize(self, weights: Array, bits: int, group_size: int) -> QuantizedMatrix:
        """weights [rows, cols] float32, float16 or uint16; coefficients come back in that dtype."""
        ...

    def linear(self, x: A, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> A:
        """x [tokens, cols] float32 -> [tokens, rows] float32."""
        ...

    def route(self, logits: A, spec: RouterSpec) -> Routing:
        """logits [tokens, experts] -> Routing in NumPy."""
        ...

    def predict(self, head: PrerouterHead, features: A) -> A:
        """features [tokens, features] -> logits [tokens, experts]."""
        ...

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> Executor[A]: ...

    def decoder(
        self,
        checkpoint: "Checkpoint",
        plan: Plan,
        adapters: "Adapters | None" = None,
        observe: Observe | None = None,
    ) -> Decoder[A]: ...
