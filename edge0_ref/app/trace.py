"""`edge0 trace`: one decode's timeline, as a file for ui.perfetto.dev or chrome://tracing and as a picture.

Anyone sees whether reads hide behind compute: what a reader does under a blue stretch of the decoder costs nothing.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from edge0_ref.app.api import Notify
from edge0_ref.app.machine import provenance
from edge0_ref.app.output_files import check_output, target_of, write_text
from edge0_ref.app.picture import COMPUTE, EXPERTS, INK, READ, WAIT, Picture
from edge0_ref.app.progress import count_bar
from edge0_ref.app.report import print_table
from edge0_ref.app.scenario import POOL_TOKENS, Case, Running, open_case
from edge0_ref.app.timeline import DECODER, ITSELF, Recorder, Span, covered
from edge0_ref.errors import UsageError


def run_trace(case: Case, out: str | None, picture: str | None, notify: Notify) -> dict[str, Any]:
    """[ENG-076] Decode, write what was asked for, and say what it shows. Raises UsageError for no place to write."""
    if out is None and picture is None:
        raise UsageError("wanted --out FILE.json, or --picture FILE.svg, or both")
    paths = [Path(path) for path in (out, picture) if path is not None]
    for path in paths:
        check_output(path)
    if len({target_of(path) for path in paths}) < len(paths):
        raise UsageError(f"{out}: the file of --out and of --picture; wanted two")
    recorder = Recorder()
    context = case.prompt_tokens + 1 + POOL_TOKENS + case.tokens
    with open_case(case, context, notify, recorder.observe, recorder.wrap) as running:
        record(running, recorder)
        facts = facts_of(running)
    spans = recorder.finish()  # the readers have stopped
    told = {**facts, **summary(spans), **provenance()}
    if out is not None:
        write_text(Path(out), json.dumps(chrome_trace(spans, recorder.start, told)))
    if picture is not None:
        draw(spans, told).write(Path(picture))
    show(told)
    for path in paths:
        notify(f"{path}: written")
    return told


def record(running: Running, recorder: Recorder) -> None:
    """A prompt, a token or a few that are not recorded, then those that are."""
    case, decoder = running.case, running.decoder
    recorder.waited = lambda: decoder.counters.wait_seconds
    with count_bar(f"{case.scenario}, K = {running.top_k}", case.prompt_tokens + case.tokens) as advance:
        token = running.best(decoder.prefill(running.prompt()))
        advance(case.prompt_tokens)
        before = 1 + (running.simulate(case.rule, cached=case.how.cached) if case.rule.simulated else 0)
        for _ in range(before):
            token = step(running, token)
        for _ in range(case.tokens):
            token = recorder.step(partial(step, running, token))
            advance(1)


def step(running: Running, token: int) -> int:
    return running.best(running.decoder.step(token))


def facts_of(running: Running) -> dict[str, Any]:
    case, plan = running.case, running.plan.plan
    return {
        "model": str(running.model.checkpoint.folder),
        "scenario": case.scenario,
        "k": running.top_k,
        "routing": case.rule.name,
        "routing_is_simulated": case.rule.simulated,
        "backend": case.backend,
        "read_mode": plan.read_mode,
        "reader_threads": plan.reader_threads,
        "slots": plan.slots,
        "on_demand_slots": plan.on_demand_slots,
        "tokens": case.tokens,
    }


def summary(spans: Sequence[Span]) -> dict[str, Any]:
    """A step and its wait are medians, as in `bench_case.figures`; all else is of all tokens together.

    hidden_share: of the time in which something was being read, the part in which the decoder did not wait.
    """
    tokens = [span for span in spans if span.kind == "token"]
    reads = [span for span in spans if span.kind == "read"]
    waits = dict.fromkeys((span.token for span in tokens), 0)
    for span in spans:
        if span.kind == "wait":
            waits[span.token] += span.end - span.start
    waited, reading = sum(waits.values()), covered(reads, until=tokens[-1].end)
    return {
        "step_ms": median(span.end - span.start for span in tokens) / 1e6,
        "wait_ms_per_token": median(waits.values()) / 1e6,
        "reading_ms": reading / 1e6,
        "reads": len(reads),
        "bytes_read": sum(span.nbytes or 0 for span in reads),
        "hidden_share": max(0.0, 1 - waited / reading) if reading else None,
    }


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The decoder first, then who reads, by name."""
    names = {span.lane for span in spans} - {DECODER, ITSELF}
    return [DECODER, *sorted(names), *([ITSELF] if any(span.lane == ITSELF for span in spans) else [])]


def chrome_trace(spans: Sequence[Span], start: int, told: dict[str, Any]) -> dict[str, Any]:
    """[ENG-076] The trace event format: complete events in microseconds from the first recorded token on."""
    lanes = {lane: number for number, lane in enumerate(lanes_of(spans), 1)}
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    names.append({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "edge0"}})
    events = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": 1,
            "tid": lanes[span.lane],
            "ts": (span.start - start) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            "args": {
                key: value
                for key in ("layer", "token", "expert", "nbytes")
                if (value := getattr(span, key)) is not None
            },
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": told}


def draw(spans: Sequence[Span], told: dict[str, Any]) -> Picture:
    """[ENG-077] A lane for the decoder and one for each reader, time to the right."""
    lanes, left, top, lane_height = lanes_of(spans), 170, 70, 44
    width, bottom = 1600, top + lane_height * len(lanes)
    picture = Picture(width, bottom + 40)
    tokens = [span for span in spans if span.kind == "token"]
    first, last = tokens[0].start, max(span.end for span in spans)
    scale = (width - left - 20) / (last - first)
    simulated = ", simulated" if told["routing_is_simulated"] else ""
    hidden = "" if told["hidden_share"] is None else f"; {told['hidden_share']:.0%} of the time of reads is hidden"
    picture.text(left, 24, f"{told['scenario']}, K = {told['k']}, routing {told['routing']}{simulated}{hidden}", 15)
    keys = [(EXPERTS, "experts"), (COMPUTE, "other compute"), (WAIT, "waiting for reads"), (READ, "reading an expert")]
    picture.legend(left, 46, keys)
    colors = {"compute": COMPUTE, "wait": WAIT, "read": READ}
    for number, lane in enumerate(lanes):
        picture.text(left - 10, top + lane_height * (number + 0.6), lane, 12, "end")
    for span in spans:
        if span.kind in colors:
            y = top + lane_height * lanes.index(span.lane) + 4
            says = f"{span.name}: {(span.end - span.start) / 1e6:.2f} ms"
            x, length = left + (span.start - first) * scale, max((span.end - span.start) * scale, 0.3)
            color = EXPERTS if span.name == "experts" else colors[span.kind]
            picture.rectangle(x, y, length, lane_height - 8, color, says)
    for span in tokens:
        x = left + (span.start - first) * scale
        picture.line(x, top - 6, x, bottom, INK)
        picture.text(x + 3, bottom + 16, f"{span.name}: {(span.end - span.start) / 1e6:.1f} ms", 11)
    return picture


def show(told: dict[str, Any]) -> None:
    simulated = " (simulated)" if told["routing_is_simulated"] else ""
    hidden = told["hidden_share"]
    rows: list[tuple[str, int | str]] = [
        ("routing", f"{told['routing']}{simulated}"),
        ("a step", f"{told['step_ms']:.1f} ms"),
        ("  of it waiting for reads", f"{told['wait_ms_per_token']:.1f} ms"),
        (f"in {told['tokens']} steps something was being read", f"{told['reading_ms']:.1f} ms"),
        ("  of that hidden behind compute", "-" if hidden is None else f"{hidden:.0%}"),
        ("read", told["bytes_read"]),
    ]
    print_table(f"{told['model']}, {told['scenario']}, K = {told['k']}", rows)
