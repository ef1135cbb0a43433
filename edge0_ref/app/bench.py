"""`edge0 bench`: what decoding costs, case by case, beside what this machine can do in the same minute.

Each case runs in a process of its own, inside a memory cgroup where root allows it: what the kernel charges to that
group, page cache included, is the memory of the case and of nothing else.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge0_ref.app.api import Notify
from edge0_ref.app.bench_report import print_cases, write_steps
from edge0_ref.app.cgroup import MemoryGroup, memory_group
from edge0_ref.app.machine import provenance
from edge0_ref.app.output_files import check_output
from edge0_ref.app.scenario import Case
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import BudgetError, Edge0Error


def run_bench(cases: Sequence[Case], picture: Path | None, notify: Notify, *, table: bool) -> list[dict[str, Any]]:
    """[ENG-070] Run cases one after the other; a line of JSON each on stdout. Raises what a case raises."""
    check_output(picture)
    told: list[dict[str, Any]] = []
    for case in cases:
        told.append(figures_of(case, told, notify))
    tell_cases(told, picture, notify, table=table)
    return told


def figures_of(case: Case, earlier: Sequence[dict[str, Any]], notify: Notify) -> dict[str, Any]:
    """A case's line: its figures, and on what and by which command they were measured."""
    figures = with_speedup(run_case(case, notify), earlier)
    return {**figures, **provenance(), "command": shlex.join(["edge0", *sys.argv[1:]])}


def tell_cases(told: Sequence[dict[str, Any]], picture: Path | None, notify: Notify, *, table: bool) -> None:
    """For people and for programs; the picture last, so that figures stay where it cannot be written."""
    if table:
        print_cases(told)
    for line in told:
        print(json.dumps(rounded(line)))
    if picture is not None:
        write_steps(picture, told)
        notify(f"{picture}: written")


def rounded(value: Any) -> Any:
    """Six digits of every figure: more than any of them is good for."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: rounded(one) for key, one in value.items()}
        case list():
            return [rounded(one) for one in value]
    return value


def with_speedup(told: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as on-demand with the same K, if that was run before."""
    rates = [one["decode_tok_s"] for one in earlier if (one["scenario"], one["k"]) == ("on-demand", told["k"])]
    return {**told, "speedup_over_on_demand": told["decode_tok_s"] / rates[-1] if rates else None}


def run_case(case: Case, notify: Notify) -> dict[str, Any]:
    """The figures of a case; memory as its cgroup counted it, if it had one."""
    command = [sys.executable, "-m", "edge0_ref.app.bench_case", json.dumps(asdict(case))]
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(case.cap))
        except OSError as error:
            if case.cap is not None:
                notify(f"no memory cgroup ({error}): the cap is planned for, and nothing enforces it")
            return run_child(case, command, None) | {"cap_is_enforced": False}
        told = run_child(case, group.command(command), group) | {"cap_is_enforced": case.cap is not None}
        peak = group.peak_bytes
        return told if peak is None else told | {"peak_bytes": peak, "peak_is": group.what}


def run_child(case: Case, command: Sequence[str], group: MemoryGroup | None) -> dict[str, Any]:
    """[ENG-073] Raises BudgetError when the kernel ended the case at its cap, and named errors of the case itself."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    what = f"{case.scenario}, K = {case.k or 'as the model says'}"
    if group is not None and group.kills:
        cap = "no cap" if case.cap is None else f"a cap of {size_text(case.cap)}"
        raise BudgetError(f"{what}: killed by the kernel for lack of memory, with {cap}")
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        raise Edge0Error(f"{what}: the process that measures ended with {how}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in told:
        raise Edge0Error(told["error"])
    return told
