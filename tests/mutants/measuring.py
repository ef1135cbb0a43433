"""Mutants of chapter 10: what `edge0 bench` and `edge0 trace` measure and say.

A case runs in a process that no mutant reaches: these break who starts it, or what tests call themselves.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref.app import bench, bench_case, bench_paper, machine, page_cache, scenario, trace
from edge0_ref.app.bench_routing import SimulatedRouting
from edge0_ref.app.picture import Picture
from edge0_ref.app.timeline import Recorder
from edge0_ref.contract import Routing
from tests.mutants.replacing import replace_everywhere


def figures_of_no_machine(patch: pytest.MonkeyPatch) -> None:
    original = machine.provenance
    replace_everywhere(patch, original, lambda: {**original(), "machine": None})


def means_for_medians(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench_case, "median", lambda values: float(np.mean([*values])))


def on_demand_with_heads(patch: pytest.MonkeyPatch) -> None:
    original = scenario.adapters_for
    patch.setattr(scenario, "adapters_for", lambda case, model: original(replace(case, scenario="oracle"), model))


def simulated_weights_too(patch: pytest.MonkeyPatch) -> None:
    original = SimulatedRouting.__call__

    def simulated(source: Any, layer: int, position: int, routing: Routing) -> Routing:
        made = original(source, layer, position, routing)
        return made if made is routing else Routing(made.experts, np.full_like(routing.weights, 0.5))

    patch.setattr(SimulatedRouting, "__call__", simulated)


def experts_drawn_while_steps_are_timed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedRouting, "draw", lambda source, tokens, k: None)


def simulated_where_routed_only(patch: pytest.MonkeyPatch) -> None:
    original = scenario.Running.simulate

    def simulate(running: Any, rule: Any, *, cached: bool) -> int:
        tokens = original(running, rule, cached=cached)
        decoder, source = running.decoder, running.decoder.routing_source
        decoder.routing_source = lambda layer, position, routing: (
            source(layer, position, routing) if position == decoder.position else routing
        )
        return tokens

    patch.setattr(scenario.Running, "simulate", simulate)


def a_missing_cgroup_unsaid(patch: pytest.MonkeyPatch) -> None:
    original = bench.run_case
    replace_everywhere(patch, original, lambda case, notify: original(case, lambda text: None))


def warm_is_cold(patch: pytest.MonkeyPatch) -> None:
    original = bench.run_case
    replace_everywhere(patch, original, lambda case, notify: original(replace(case, cold=True), notify))


def blocks_begin_with_what_raw_reads_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench_case, "forget_pages", lambda paths: False)


def mapped_pages_counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench_case, "mapped_bytes", lambda paths: 0)


def pages_thrown_away_unwritten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(page_cache, "OUT_OF_DATE", 2)


def mapped_pages_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(page_cache, "mappings_of", lambda paths: iter(()))


def raw_reads_of_one_block(patch: pytest.MonkeyPatch) -> None:
    original = scenario.Running.expert_file
    patch.setattr(scenario.Running, "expert_file", lambda running: (original(running)[0], 8 * 4096))


def reads_from_before_the_run(patch: pytest.MonkeyPatch) -> None:
    def finish(recorder: Any) -> Any:
        return sorted([*recorder.spans, *recorder._reads], key=lambda span: (span.start, -span.end))

    patch.setattr(Recorder, "finish", finish)


def a_trace_of_means(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trace, "median", lambda values: float(np.mean([*values])))


def a_picture_without_an_end(patch: pytest.MonkeyPatch) -> None:
    original = Picture.write

    def write(picture: Any, path: Path) -> None:
        original(picture, path)
        path.write_text(path.read_text("utf-8").replace("</svg>", ""), "utf-8")

    patch.setattr(Picture, "write", write)


def differences_unsaid(patch: pytest.MonkeyPatch) -> None:
    original = bench_paper.differences
    patch.setattr(bench_paper, "differences", lambda *about: {"machine": original(*about)["machine"]})


def a_decoders_own_figures_unasked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bench_case, "Measuring", type(None))


MUTANTS = {
    differences_unsaid: "ENG-078",
    a_decoders_own_figures_unasked: "ENG-079",
    figures_of_no_machine: "ENG-070",
    means_for_medians: "ENG-070",
    on_demand_with_heads: "ENG-071",
    simulated_weights_too: "ENG-072",
    simulated_where_routed_only: "ENG-072",
    experts_drawn_while_steps_are_timed: "ENG-072",
    a_missing_cgroup_unsaid: "ENG-073",
    warm_is_cold: "ENG-074",
    blocks_begin_with_what_raw_reads_left: "ENG-074",
    mapped_pages_counted_twice: "ENG-073",
    pages_thrown_away_unwritten: "ENG-074",
    mapped_pages_stay: "ENG-074",
    raw_reads_of_one_block: "ENG-075",
    reads_from_before_the_run: "ENG-076",
    a_trace_of_means: "ENG-076",
    a_picture_without_an_end: "ENG-077",
}
