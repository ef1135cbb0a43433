"""Hot: more slots than a token needs, given to the experts that are used most."""

from edge0_mlx.executors.staged import StagedExecutor
from edge0_ref.residency import Policy


class HotExecutor(StagedExecutor):
    """[EXE-030] Staged, but the slot given away is the one used least often, then longest ago."""

    policy: Policy = "least_frequent"
