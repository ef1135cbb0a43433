"""[BCK-030] A report as data: what was held to what, where and with what, and how each requirement fared."""

import hashlib
import os
import platform
import re
from dataclasses import asdict
from typing import Any

from conformance.report import STATUSES, Report
from conformance.requirements import SPEC
from edge0_ref.app.machine import commit, versions

PACKAGES = ("edge0", "numpy", "numba", "mlx", "hypothesis", "pytest")


def certificate(report: Report, command: str = "") -> dict[str, Any]:
    """Everything that a report holds, ready for JSON. command: the line that ran it."""
    rows = [row(report, id_) for id_ in report.listed()]
    return {
        "backend": report.backend,
        "claims": list(report.claims),
        "verdict": report.verdict,
        "counts": {status: sum(r["status"] == status for r in rows) for status in STATUSES},
        "command": command,
        "profile": report.profile,
        "seed": report.seed,
        "specification": specification(),
        "versions": versions(PACKAGES),
        "machine": machine(),
        "commit": commit(),
        "only": sorted(report.selected),
        "requirements": rows,
        "failures": [{"test": test, "message": message} for test, message in report.recorder.failures],
        "stale": report.stale,
        "notes": report.notes,
    }


def row(report: Report, id_: str) -> dict[str, Any]:
    """One requirement. checks: how many of its tests passed, failed, were unclaimed."""
    stated = report.requirements.get(id_)
    return {
        "id": id_,
        "class": stated.exactness if stated else None,
        "spec": stated.place if stated else None,
        "status": report.status(id_),
        "reason": report.known.get(id_) if report.status(id_) == "known" else None,
        "checks": dict(report.recorder.outcomes.get(id_, {})),
        "paths": {path or "default": asdict(figures) for path, figures in report.paths(id_).items()},
    }


def specification() -> dict[str, str]:
    """The edition that spec/README.md states, and a digest of its chapters: two runs with one digest agree on all."""
    stated = re.search(r"This is edition (\S+?)\.\s", (SPEC / "README.md").read_text("utf-8"))
    digest = hashlib.sha256()
    for chapter in sorted(SPEC.glob("[0-9][0-9]-*.md")):
        digest.update(chapter.read_bytes())
    return {"edition": stated[1] if stated else "not stated", "sha256": digest.hexdigest()}


def machine() -> dict[str, Any]:
    return {"system": platform.platform(), "architecture": platform.machine(), "processors": os.cpu_count()}
