"""Four ways to run a layer's routed experts: exact, staged, hot, whole layer.

They differ in what stays in memory and when it is read, never in what is computed.
"""

from edge0_mlx.device import Device
from edge0_mlx.executors.exact import ExactExecutor
from edge0_mlx.executors.hot import HotExecutor
from edge0_mlx.executors.staged import StagedExecutor
from edge0_mlx.executors.whole_layer import WholeLayerExecutor
from edge0_mlx.slots import Evaluations
from edge0_ref.contract import Counters, ExecutorKind, ExpertStore
from edge0_ref.prefetch import Prefetcher

MlxExecutor = ExactExecutor | StagedExecutor | WholeLayerExecutor


def make_executor(
    kind: ExecutorKind,
    store: ExpertStore,
    slots: int,
    prefetcher: Prefetcher,
    counters: Counters,
    device: Device,
    evaluations: Evaluations,
) -> MlxExecutor:
    """An executor over `store`; `slots` matters to staged and hot. Its results are graphs that `evaluations` runs."""
    match kind:
        case "exact":
            return ExactExecutor(store, counters, device, evaluations)
        case "staged":
            return StagedExecutor(store, slots, prefetcher, counters, device, evaluations)
        case "hot":
            return HotExecutor(store, slots, prefetcher, counters, device, evaluations)
        case "whole_layer":
            return WholeLayerExecutor(store, prefetcher, counters, device, evaluations)


__all__ = ["ExactExecutor", "HotExecutor", "MlxExecutor", "StagedExecutor", "WholeLayerExecutor", "make_executor"]
