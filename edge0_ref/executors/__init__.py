"""Four ways to run a layer's routed experts, equal to the bit: exact, staged, hot, whole layer.

They differ in what stays in memory and when it is read, never in what is computed.
"""

from edge0_ref.contract import Array, Counters, Executor, ExecutorKind, ExpertStore
from edge0_ref.executors.bank import RunExperts, SpareBank
from edge0_ref.executors.exact import ExactExecutor, run_each
from edge0_ref.executors.hot import HotExecutor
from edge0_ref.executors.staged import StagedExecutor
from edge0_ref.executors.whole_layer import WholeLayerExecutor
from edge0_ref.prefetch import Prefetcher


def make_executor(
    kind: ExecutorKind,
    store: ExpertStore,
    slots: int,
    prefetcher: Prefetcher,
    counters: Counters | None = None,
    run: RunExperts = run_each,
    spare: SpareBank | None = None,
) -> Executor[Array]:
    """An executor over `store`; `slots` matters to staged and hot. Reads are added to `counters`.

    run: how experts whose bytes are there are computed; spare: of whole layers that take turns.
    """
    counters = Counters() if counters is None else counters
    match kind:
        case "exact":
            return ExactExecutor(store, counters, run)
        case "staged":
            return StagedExecutor(store, slots, prefetcher, counters, run)
        case "hot":
            return HotExecutor(store, slots, prefetcher, counters, run)
        case "whole_layer":
            return WholeLayerExecutor(store, prefetcher, counters, run, spare)


__all__ = [
    "ExactExecutor",
    "HotExecutor",
    "RunExperts",
    "SpareBank",
    "StagedExecutor",
    "WholeLayerExecutor",
    "make_executor",
]
