"""Every error edge0 raises on purpose: one tree, each leaf also the builtin a caller would expect.

A message says which thing, what it got and what it wanted, in one line that a person can act on.
"""


class Edge0Error(Exception):
    """The root: `except Edge0Error` catches everything edge0 raises on purpose."""


class UsageError(Edge0Error, ValueError):
    """A request that cannot be carried out as asked (empty prompt, unknown backend, `--max-tokens 0`)."""


class CheckpointError(Edge0Error, ValueError):
    """Model files that are missing, damaged, or contradict their own config."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of an architecture edge0 does not run; the message names it."""


class AdapterError(Edge0Error, ValueError):
    """Adapter files that are damaged or do not belong to this model."""


class ShapeError(Edge0Error, ValueError):
    """An array whose shape or dtype breaks the contract."""


class NonFiniteError(Edge0Error, ArithmeticError):
    """A NaN or an infinity where the maths promises a number; the message names the layer."""


class BudgetError(Edge0Error, MemoryError):
    """A memory budget below what the model needs; the message gives the minimum that works."""


class ReadError(Edge0Error, OSError):
    """The disk failed, or a file shrank, while an expert or a tensor was being read."""


class BackendError(Edge0Error, RuntimeError):
    """A backend that cannot be found, imported, or lacks what it claims."""
