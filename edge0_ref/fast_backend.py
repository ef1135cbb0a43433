"""The `numba` backend: the reference's own decoder, with the arithmetic of the fast kernels in place of its own."""

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

import numba
import numpy as np
from numba.np.ufunc.parallel import get_thread_count

from edge0_ref import fast_dense, fast_experts, fast_kernels, fast_linear, kernels
from edge0_ref.adapters import Adapters
from edge0_ref.arithmetic import Arithmetic, Product
from edge0_ref.backend import OwningExecutor, ReferenceBackend
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import (
    Array,
    Executor,
    ExecutorKind,
    ExpertLayout,
    ExpertStore,
    Lora,
    Observe,
    Plan,
    PrerouterHead,
    QuantizedMatrix,
    RouterSpec,
    Routing,
    SoftmaxTopK,
)
from edge0_ref.decoder import ReferenceDecoder
from edge0_ref.executors.bank import Bank, Uses
from edge0_ref.fast_operands import (
    Layer,
    Stacked,
    activations,
    aligned,
    as_words,
    can_be_stacked,
    form_of,
    places_of,
)
from edge0_ref.router import route

SHARING = threading.local()  # threads: how many the next kernel that this thread calls will use, once it is known
SMALL_WORK = 2**19  # multiplications; sharing out fewer takes longer than doing them
JOBS = 32  # experts of one kernel call: a decoded token's all, a part of a prompt's
KERNELS = (
    fast_linear.linear_quantized,
    fast_dense.linear_dense,
    fast_dense.predict,
    fast_experts.run_experts,
    fast_kernels.softmax_top_k,
    fast_kernels.swiglu,
    fast_kernels.silu,
    fast_kernels.causal_conv,
    fast_kernels.delta_rule,
    fast_kernels.causal_attention,
)


class FastArithmetic(Arithmetic):
    """[BCK-001] Float32, over `threads` threads. Bits depend on neither their number nor how a prompt is cut.

    One thread at a time may use it: scratch memory is kept from call to call.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._work = np.empty(0, np.float32)
        self._layouts: dict[ExpertLayout, tuple[Array, Array]] = {}

    def _room(self, numbers: int) -> Array:
        if self._work.size < numbers:
            self._work = aligned(numbers)
        return self._work

    def _share(self, multiplications: int) -> int:
        """Let the next kernel use all threads, or this one alone where that is faster: how many those are."""
        wanted = 1 if multiplications < SMALL_WORK else self.threads
        if wanted != getattr(SHARING, "threads", None):  # asking Numba takes a microsecond
            numba.set_num_threads(wanted)
            SHARING.threads = wanted
        return wanted

    def stored(self, weight: QuantizedMatrix | Array) -> QuantizedMatrix | Array:
        """As it is: kernels read numbers of every kind."""
        return weight

    def product(self, layers: Sequence[Layer]) -> Product:
        if not can_be_stacked(layers):
            if len(layers) == 1:
                return super().product(layers)
            products = [self.product([layer]) for layer in layers]
            return lambda x: [y for product in products for y in product(x)]
        stacked = Stacked(layers)

        def multiply(x: Array) -> list[Array]:
            y = self._multiply(x, stacked)
            return [y[:, place] for place in stacked.places]

        return multiply

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        if not isinstance(weight, QuantizedMatrix):
            return self._dense(x, weight, lora)
        return self._multiply(x, Stacked([(weight, lora)]))

    def _multiply(self, x: Array, stacked: Stacked) -> Array:
        x = activations(x, stacked.cols, stacked.rows)
        work = self._room(fast_linear.linear_room(x.shape[0], x.shape[1], stacked.group_size, stacked.rank))
        y = np.empty((x.shape[0], stacked.rows), np.float32)
        threads = self._share(x.size * stacked.rows)
        fast_linear.linear_quantized(x, *stacked.operands(x.shape[0]), work, threads, y)
        return y

    def _dense(self, x: Array, weight: Array, lora: Lora | None = None) -> Array:
        x = activations(x, weight.shape[1], weight.shape[0])
        words, kind = as_words(weight)
        y = np.empty((x.shape[0], weight.shape[0]), np.float32)
        self._share(x.size * weight.shape[0])
        fast_dense.linear_dense(x, words, kind, y)
        if lora is None:
            return y
        update: Array = np.float32(lora.scale) * self._dense(self._dense(x, lora.down), lora.up)
        return y + update

    def route(self, logits: Array, spec: RouterSpec) -> Routing:
        """[RTR-001] Compiled for the family of most models. What has no order is refused where the reference does."""
        if not isinstance(spec, SoftmaxTopK) or spec.top_k > logits.shape[1]:
            return route(logits, spec)
        experts = np.empty((logits.shape[0], spec.top_k), np.int64)
        weights = np.empty(experts.shape, np.float32)
        known = activations(logits, *logits.shape[::-1])
        return Routing(experts, weights) if fast_kernels.softmax_top_k(known, experts, weights) else route(logits, spec)

    def predict(self, head: PrerouterHead, features: Array) -> Array:
        tokens, (width, cols), experts = features.shape[0], head.fc1.shape, head.linear.shape[0]
        features = activations(features, cols, width)
        (linear, first), (fc1, second), (fc2, third) = map(as_words, (head.linear, head.fc1, head.fc2))
        hidden, learned, y = (np.empty((tokens, size), np.float32) for size in (width, experts, experts))
        self._share(features.size * (width + experts))
        fast_dense.predict(features, linear, fc1, fc2, np.array([first, second, third]), hidden, learned, y)
        return y

    def swiglu(self, gate: Array, up: Array) -> Array:
        y = np.empty(gate.shape, np.float32)
        gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
        fast_kernels.swiglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def silu(self, x: Array) -> Array:
        y = np.empty(x.shape, np.float32)
        fast_kernels.silu(np.ascontiguousarray(x).reshape(-1), y.reshape(-1))
        return y

    def causal_conv(self, x: Array, taps: Array, state: Array) -> Array:
        y = np.empty_like(x)
        fast_kernels.causal_conv(np.ascontiguousarray(x), taps, state, y)
        return y

    def delta_rule(self, q: Array, k: Array, v: Array, beta: Array, decay: Array, state: Array) -> Array:
        y = np.empty_like(v)
        self._share(v.shape[0] * state.size)
        fast_kernels.delta_rule(q, k, v, beta, decay, state, y)
        return y

    def causal_attention(
        self, q: Array, keys: Array, values: Array, first: int, scale: float, value_size: int
    ) -> Array:
        y = np.empty((*q.shape[:2], value_size), np.float32)
        threads, heads = self._share((first + q.shape[0]) * q.size), q.shape[1] // keys.shape[1]
        while heads % 2 == 0 and y.size // (y.shape[2] * heads) < threads:
            heads //= 2  # a token's few tasks are shared out too
        q = np.ascontiguousarray(q)
        fast_kernels.causal_attention(q, keys, values, first, np.float32(scale), heads, threads, y)
        return y

    def run_experts(self, outputs: Array, x: Array, group: Iterable[tuple[Uses, int]], bank: Bank) -> None:
        """[EXE-003] Experts where they lie, many at once: the next are read meanwhile."""
        waiting = iter(group)
        while jobs := list(islice(waiting, JOBS)):
            self._run_jobs(outputs, x, jobs, bank)

    def _run_jobs(self, outputs: Array, x: Array, jobs: list[tuple[Uses, int]], bank: Bank) -> None:
        tokens = [token for (chosen, _), _ in jobs for token in chosen]
        ranks = [rank for (_, chosen), _ in jobs for rank in chosen]
        slots = np.array([slot for _, slot in jobs])
        starts = np.array([0, *accumulate(len(chosen) for (chosen, _), _ in jobs)])
        layout, memory = bank.layout, bank.memory
        if layout not in self._layouts:
            self._layouts[layout] = places_of(layout), form_of(layout)
        places, form = self._layouts[layout]
        work = self._room(fast_experts.experts_room(len(tokens), layout.hidden, layout.inner, layout.group_size))
        y = np.empty((len(tokens), layout.hidden), np.float32)
        threads = self._share(3 * y.size * layout.inner)
        flat = memory.reshape(-1)
        words = flat.view(np.uint16)
        x = activations(x, layout.hidden, layout.inner)
        chosen = np.array(tokens), flat, words, slots, starts, places, form
        fast_experts.run_experts(x, *chosen, work, layout.inner, threads, y)
        outputs[tokens, ranks] = y


class NumbaBackend(ReferenceBackend):
    """[BCK-001] Everything the reference claims but its bits."""

    name = "numba"
    claims = ReferenceBackend.claims - {"bits"}
    reads_as_stored = True
    to_be_read = False

    def __init__(self) -> None:
        self._arithmetic = FastArithmetic(get_thread_count())  # type: ignore[no-untyped-call]

    def notice(self) -> str | None:
        """[BCK-011] The first run on a machine compiles the kernels."""
        if kernels.compiled_before(KERNELS):
            return None
        return "compiling kernels, once on this machine: half a minute or so"

    def linear(self, x: Array, weight: QuantizedMatrix | Array, lora: Lora | None = None) -> Array:
        return self._arithmetic.linear(x, weight, lora)

    def route(self, logits: Array, spec: RouterSpec) -> Routing:
        return self._arithmetic.route(logits, spec)

    def predict(self, head: PrerouterHead, features: Array) -> Array:
        return self._arithmetic.predict(head, features)

    def executor(self, kind: ExecutorKind, store: ExpertStore, slots: int) -> Executor[Array]:
        return OwningExecutor(kind, store, slots, FastArithmetic(self._arithmetic.threads).run_experts)

    def decoder(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        adapters: Adapters | None = None,
        observe: Observe | None = None,
    ) -> ReferenceDecoder:
        arithmetic = FastArithmetic(self._arithmetic.threads)
        return ReferenceDecoder(checkpoint, plan, adapters, observe, arithmetic)


def create() -> NumbaBackend:
    """Entry point of the group `edge0.backends`."""
    return NumbaBackend()
