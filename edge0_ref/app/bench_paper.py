"""`edge0 bench --paper`: the paper's tables (arXiv 2609.18063), and the same measured here, row by row.

No row compares like with like unless it says so: each names what differs between the paper's run and this one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edge0_ref.app.api import Notify
from edge0_ref.app.bench import figures_of, rounded, tell_cases
from edge0_ref.app.doctor import checkpoint_load
from edge0_ref.app.locate import locate
from edge0_ref.app.output_files import check_output
from edge0_ref.app.presets import QWEN, make_config, model_of
from edge0_ref.app.read_mode import machine_bytes
from edge0_ref.app.report import open_console
from edge0_ref.app.scenario import Case
from edge0_ref.app.shell import printable
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import ModelConfig
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import BudgetError, UsageError
from edge0_ref.inventory import open_checkpoint

M4_PRO, M2 = "Mac mini M4 Pro, 24 GB", "M2, 16 GB"
GIB = 2**30
WHATS = {
    "decode_tok_s": "decode, tok/s",
    "peak_bytes": "peak memory",
    "speedup_over_on_demand": "times on-demand",
    "wait_ms_per_token": "blocked on loading, ms a step",
}


@dataclass(frozen=True)
class Published:
    """A figure of the paper, all of them of Qwen3.6-35B-A3B in int4. figure: what a line of `edge0 bench` calls it."""

    scenario: str
    k: int
    figure: str
    value: float
    machine: str
    backend: str = "mlx"


PAPER = (
    Published("prefetch", 4, "decode_tok_s", 20.4, M4_PRO),
    Published("prefetch", 4, "peak_bytes", 2.9 * GIB, M4_PRO),
    Published("resident", 4, "decode_tok_s", 3.9, M4_PRO),
    Published("resident", 4, "peak_bytes", 18.2 * GIB, M4_PRO),
    *(
        Published(scenario, k, figure, value, M2)
        for k, on_demand, prefetch in ((2, 4.8, 8.6), (4, 3.5, 6.4), (8, 1.8, 3.3))
        for scenario, figure, value in (
            ("on-demand", "decode_tok_s", on_demand),
            ("prefetch", "decode_tok_s", prefetch),
            ("prefetch", "speedup_over_on_demand", prefetch / on_demand),
        )
    ),
    Published("on-demand", 4, "wait_ms_per_token", 244.0, M2),
    Published("prefetch", 4, "wait_ms_per_token", 102.0, M2),
)


@dataclass(frozen=True)
class Row:
    """A published figure and what was measured here, if it was. differs: in which respect -> how it is here."""

    published: Published
    here: float | None
    differs: Mapping[str, str]


def run_paper(base: Case, picture: Path | None, notify: Notify, *, table: bool) -> list[Row]:
    """[ENG-078] Run every case of the paper's tables on this model and machine; lines of JSON, the last of the rows."""
    located = locate(base.model)
    checkpoint = open_checkpoint(located.folder)
    if not (base.adapters or located.adapters or checkpoint.heads):
        raise UsageError("--paper measures prefetch, and this model has no prerouter heads; --adapters DIR names some")
    check_output(picture)
    cases, left_out = paper_cases(base, checkpoint)
    told: list[dict[str, Any]] = []
    for case in cases:
        try:
            told.append(figures_of(case, told, notify))
        except BudgetError as error:  # the others may fit
            left_out[case.scenario, case.k] = str(error)
    if not told:
        raise BudgetError("; ".join(left_out.values()))
    tell_cases(told, picture, notify, table=table)
    rows = compare(told, left_out, model_difference(checkpoint.config))
    if table:
        print_rows(rows, told[0])
    print(json.dumps(rounded({"paper": [asdict(row) for row in rows]})))
    return rows


def paper_cases(base: Case, checkpoint: Checkpoint) -> tuple[list[Case], dict[tuple[str, int | None], str]]:
    """One K after the other, on-demand first; and (scenario, K) -> why it is not run."""
    cases: list[Case] = []
    left_out: dict[tuple[str, int | None], str] = {}
    load, memory = checkpoint_load(checkpoint, None), machine_bytes()
    needed = load.all_experts + load.resident
    fewest = min(moe.num_experts for moe in checkpoint.config.moe_layers.values())
    for k, scenario in sorted({(published.k, published.scenario) for published in PAPER}):
        if k > fewest:
            left_out[scenario, k] = f"a layer has {fewest} experts"
        elif scenario == "resident" and needed > memory * 3 // 4:
            left_out[scenario, k] = f"weights of {size_text(needed)}, this machine has {size_text(memory)}"
        else:
            cap = None if scenario == "resident" else base.cap
            cases.append(replace(base, scenario=scenario, k=k, cap=cap))
    return cases, left_out


def model_difference(config: ModelConfig) -> str | None:
    """What is computed here if it is not the paper's model, by its shapes."""

    def shapes(config: ModelConfig) -> tuple[int, ...]:
        moe = next(iter(config.moe_layers.values()))
        return len(config.layers), config.hidden_size, moe.num_experts, moe.inner_size

    here = shapes(config)
    if here == shapes(model_of(make_config(QWEN), "the paper's model")):
        return None
    return "{} layers of {}, {} experts of {} a layer".format(*here)


def compare(
    told: Sequence[Mapping[str, Any]], left_out: Mapping[tuple[str, int | None], str], model: str | None
) -> list[Row]:
    """Each row of the paper with the case that was run for it. model: how the model differs, if it does."""
    lines = {(line["scenario"], line["k"]): line for line in told}
    rows = []
    for published in PAPER:
        key = published.scenario, published.k
        if key in left_out:
            rows.append(Row(published, None, {"not run": left_out[key]}))
        else:
            line = lines[key]
            rows.append(Row(published, line[published.figure], differences(published, line, model)))
    return rows


def differences(published: Published, line: Mapping[str, Any], model: str | None) -> dict[str, str]:
    """[ENG-078] In which respects a measured figure is another thing than the published one, and how it is here."""
    found = {"machine": line["machine"]}
    if model is not None:
        found["model"] = model
    if line["backend"] != published.backend:
        found["backend"] = line["backend"]
    if line["routing_is_simulated"]:
        found["routing"] = f"{line['routing']}, simulated"
    if published.figure == "peak_bytes":
        found["memory"] = f"{line['peak_is']}; the paper counts what MLX allocates, without page cache"
    if line["cap_bytes"] is not None:
        found["cap"] = size_text(line["cap_bytes"]) + ("" if line["cap_is_enforced"] else ", not enforced")
    return found


def print_rows(rows: Sequence[Row], line: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=printable(f"the paper's tables, and here: {line['model']}"), title_justify="left")
    for title in ("the paper's machine", "scenario", "figure", "paper", "here", "differs in"):
        table.add_column(title, justify="right" if title in ("paper", "here") else "left")
    for row in rows:
        published = row.published
        scenario = f"{published.scenario}, K = {published.k}"
        figures = [figure_text(published.figure, value) for value in (published.value, row.here)]
        table.add_row(published.machine, scenario, WHATS[published.figure], *figures, ", ".join(row.differs))
    console = open_console(160)
    console.print(table)
    here = {(what, how) for row in rows for what, how in row.differs.items()}
    console.print("\n".join(f"{what}: {how}" for what, how in sorted(here)), highlight=False)


def figure_text(figure: str, value: float | None) -> str:
    if value is None:
        return "-"
    return size_text(round(value)) if figure == "peak_bytes" else f"{value:.3g}"
