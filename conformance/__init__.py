"""edge0's conformance suite: every claim of a backend, against slow float64 oracles and the text of `spec/`.

`python -m conformance --backend NAME` from a shell, `conformance.run(backend)` from Python.
"""

from importlib.util import find_spec

NEEDED = ("pytest", "hypothesis", "jsonschema_rs")
MISSING = [module for module in NEEDED if find_spec(module) is None]
if not MISSING:
    from conformance.report import Report
    from conformance.runner import run

    __all__ = ["Report", "run"]
