"""What `edge0 bench` tells people: a table, a column for each case, and a picture, a panel for each case."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge0_ref.app.picture import COMPUTE, LIMIT, WAIT, Picture
from edge0_ref.app.report import measure_rows, open_console
from edge0_ref.app.shell import printable
from edge0_ref.engine.memory import size_text

Told = dict[str, Any]


def print_cases(cases: Sequence[Told]) -> None:
    from rich.table import Table

    first = cases[0]
    routing = f"routing {first['routing']}" + (" (simulated)" if first["routing_is_simulated"] else "")
    pages = "cold" if first["cold"] else "warm"
    title = f"{first['model']}, backend {first['backend']}, {routing}, {pages}, {first['read_mode']} reads"
    table = Table(title=printable(title), title_justify="left")
    table.add_column("")
    for case in cases:
        table.add_column(f"{case['scenario']}, K = {case['k']}", justify="right")
    rows = [dict(rows_of(case)) for case in cases]
    for what in dict.fromkeys(what for row in rows for what in row):
        table.add_row(what, *(row.get(what, "-") for row in rows))
    open_console(40 + 27 * len(cases)).print(table)


def rows_of(case: Told) -> list[tuple[str, str]]:
    """(what, figure) of a case; cases of one backend have the same things."""
    speedup, alone = case["speedup_over_on_demand"], case["compute_alone_ms_per_token"]
    cap = "none" if case["cap_bytes"] is None else size_text(case["cap_bytes"])
    return [
        ("decode", f"{case['decode_tok_s']:.2f} tok/s"),
        ("at most, by disk and compute", f"{case['limit_tok_s']:.2f} tok/s"),
        ("reached of that", f"{case['decode_tok_s'] / case['limit_tok_s']:.0%}"),
        ("times on-demand", "-" if speedup is None else f"{speedup:.2f}"),
        ("a step", f"{case['step_ms']:.1f} ms"),
        ("  of it waiting for reads", f"{case['wait_ms_per_token']:.1f} ms"),
        ("  of it compute", f"{case['compute_ms_per_token']:.1f} ms"),
        ("compute, if nothing is read", "-" if alone is None else f"{alone:.1f} ms"),
        ("read for a token", f"{size_text(round(case['bytes_per_token']))}, {case['reads_per_token']:.1f} experts"),
        ("experts found in slots", f"{case['hit_rate']:.0%} (of {case['slots']} slots)"),
        ("disk / raw reads", f"{case['disk_gb_s']:.2f} / {case['raw_disk_gb_s']:.2f} GB/s"),
        ("kernels / memory", f"{case['kernel_gb_s']:.1f} / {case['memory_gb_s']:.1f} GB/s"),
        ("prompt", f"{case['prefill_tok_s']:.1f} tok/s"),
        ("first token after", f"{case['ttft_s']:.2f} s"),
        ("dropped", str(case["drops"])),
        ("peak memory", size_text(case["peak_bytes"])),
        ("cap", cap if case["cap_is_enforced"] or case["cap_bytes"] is None else f"{cap}, not enforced"),
        *own_rows(case),
    ]


def own_rows(case: Told) -> list[tuple[str, str]]:
    """[ENG-079] What only a backend that builds graphs has: evaluations, and whatever figures its decoder tells."""
    counted = {"evaluations_per_token": case["evaluations_per_token"]} if case["evaluations_per_token"] else {}
    return measure_rows({**counted, **case["measures"]})


def write_steps(path: Path, cases: Sequence[Told]) -> None:
    """A bar for each counted step: compute, waiting on top; a line where the disk alone would end."""
    panel, width, left = 190, 900, 60
    highest = max(step[0] for case in cases for step in case["steps"])
    picture = Picture(width, panel * len(cases) + 40)
    picture.legend(left, 20, [(COMPUTE, "compute"), (WAIT, "waiting for reads"), (LIMIT, "the disk alone, raw reads")])
    for number, case in enumerate(cases):
        bottom, height = 40 + panel * (number + 1) - 30, panel - 60
        simulated = ", simulated routing" if case["routing_is_simulated"] else ""
        told = f"{case['scenario']}, K = {case['k']}{simulated}: {case['decode_tok_s']:.2f} tokens/s"
        picture.text(left, bottom - height - 8, told)
        picture.line(left, bottom, width - 20, bottom)
        picture.text(left - 6, bottom, "0", 11, "end")
        picture.text(left - 6, bottom - height + 4, f"{highest:.0f} ms", 11, "end")
        space = (width - 20 - left) / len(case["steps"])
        for place, (milliseconds, waited, _) in enumerate(case["steps"]):
            x, whole, waiting = left + place * space, height * milliseconds / highest, height * waited / highest
            picture.rectangle(x, bottom - whole + waiting, 0.85 * space, whole - waiting, COMPUTE)
            picture.rectangle(x, bottom - whole, 0.85 * space, waiting, WAIT, f"{milliseconds:.1f} ms")
        if case["limit_disk_tok_s"]:
            y = bottom - min(height, height * 1e3 / case["limit_disk_tok_s"] / highest)
            picture.line(left, y, width - 20, y, LIMIT, 2)
    picture.write(path)
