"""edge0's conformance suite: every claim of a backend, against slow float64 oracles and the text of `spec/`.

`python -m conformance --backend NAME` from a shell, `conformance.run(backend)` from Python.
"""

from conformance.report import Report
from conformance.runner import run

__all__ = ["Report", "run"]
