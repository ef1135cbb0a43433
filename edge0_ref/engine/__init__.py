"""The drive: what turns logits into text, within a memory budget, on any backend."""

from edge0_ref.engine.plan import MemoryPlan, Request, make_plan
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Asked, Generation, Piece, Result, Session

__all__ = [
    "Asked",
    "Generation",
    "MemoryPlan",
    "Piece",
    "Request",
    "Result",
    "SamplingSettings",
    "Session",
    "make_plan",
]
