"""One case of `edge0 bench`, in a process of its own: its settings are the argument, its figures a line on stdout.

    memory is read; the model is opened; a prompt; then, in turn, raw reads of the disk and a block of decode steps;
    at last steps that read nothing

so that every figure has what it is to be compared with from the same minute. The step after a raw read is not
counted: its reads ended while the disk was being measured.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edge0_ref.app.api import Notify
from edge0_ref.app.bench_routing import parse_routing
from edge0_ref.app.doctor import checkpoint_load
from edge0_ref.app.page_cache import cached_bytes, forget_pages, mapped_bytes
from edge0_ref.app.probes import MEMORY_BYTES, BlockReads, memory_rate
from edge0_ref.app.progress import Advance, count_bar
from edge0_ref.app.scenario import POOL_TOKENS, Case, Running, open_case
from edge0_ref.app.shell import tell
from edge0_ref.contract import Counters, Measuring
from edge0_ref.engine.memory import peak_bytes
from edge0_ref.engine.session import counters_between
from edge0_ref.errors import Edge0Error

BLOCKS = 4  # of counted steps, with raw reads before, between and after
RAW_SECONDS = 0.25
ALONE_STEPS = 8  # that read nothing


@dataclass(frozen=True)
class Step:
    """A decoded token: how long it took and what was read for it."""

    seconds: float
    spent: Counters

    @property
    def compute_seconds(self) -> float:
        return self.seconds - self.spent.wait_seconds


@dataclass
class Measured:
    """What was seen. memory, raw: bytes a second; alone: steps that read nothing, if there were any.

    measures: the decoder's own figures after the counted steps, if it has some.
    """

    memory: float
    prefill: Step | None = None
    steps: list[Step] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    alone: list[Step] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)


def block_sizes(tokens: int) -> list[int]:
    """Counted steps of each block, at least four in each if there are so many.

    >>> block_sizes(3), block_sizes(9), block_sizes(34)
    ([3], [5, 4], [9, 9, 8, 8])
    """
    blocks = max(1, min(BLOCKS, tokens // 4))
    return [tokens // blocks + (number < tokens % blocks) for number in range(blocks)]


def context_for(case: Case) -> int:
    """Room for the prompt, counted and uncounted steps, and those that read nothing."""
    uncounted = BLOCKS + 2 * (1 + POOL_TOKENS)
    return case.prompt_tokens + case.tokens + uncounted + ALONE_STEPS


def measure(case: Case, notify: Notify) -> dict[str, Any]:
    """Run a case; its figures."""
    share = MEMORY_BYTES if case.cap is None else min(MEMORY_BYTES, case.cap // 8)
    measured = Measured(memory_rate(share // 8 * 8))
    with open_case(case, context_for(case), notify) as running:
        forget_pages(running.files())
        notify(running.text)
        passes = 1 if case.cold else 2
        for number in range(passes):
            what = f"{case.scenario}, K = {running.top_k}" + (", warming up" if number < passes - 1 else "")
            with count_bar(what, case.prompt_tokens + case.tokens) as advance:
                run_once(running, measured := Measured(measured.memory), advance)
        measure_alone(running, measured)
        peak, what = process_peak(running.files())
        return figures(running, measured) | {"peak_bytes": peak, "peak_is": what}


def run_once(running: Running, measured: Measured, advance: Advance) -> None:
    """A prompt and all blocks of steps."""
    case, decoder = running.case, running.decoder
    running.stop_simulating()
    decoder.reset()
    before, start = replace(decoder.counters), time.perf_counter()
    token = running.best(decoder.prefill(running.prompt()))
    measured.prefill = Step(time.perf_counter() - start, counters_between(before, decoder.counters))
    advance(case.prompt_tokens)
    uncounted = 1
    if case.rule.simulated:
        uncounted += running.simulate(case.rule, cached=case.how.cached)
    for size in block_sizes(case.tokens):
        measured.raw.append(raw_rate(running, len(measured.raw)))
        if case.cold:
            forget_pages(running.files())  # also those that the raw reads left
        _, token = decode(running, token, uncounted)
        steps, token = decode(running, token, size, advance)
        measured.steps += steps
        uncounted = 1
    measured.raw.append(raw_rate(running, len(measured.raw)))
    if isinstance(decoder, Measuring):
        measured.measures = dict(decoder.measures())


def decode(running: Running, token: int, count: int, advance: Advance = lambda count: None) -> tuple[list[Step], int]:
    """What each of `count` steps cost, and the token after the last; greedy."""
    decoder, steps = running.decoder, []
    for _ in range(count):
        before, start = replace(decoder.counters), time.perf_counter()
        token = running.best(decoder.step(token))
        steps.append(Step(time.perf_counter() - start, counters_between(before, decoder.counters)))
        advance(1)
    return steps, token


def raw_rate(running: Running, number: int) -> float:
    """[ENG-075] Bytes a second of reads as the engine does them: mode, size and threads, from the same file."""
    plan, cold = running.plan.plan, running.case.cold
    if cold:
        forget_pages(running.files())
    path, block = running.expert_file()
    return BlockReads(path, block, seed=number, cold=cold).rate(plan.read_mode, plan.reader_threads, RAW_SECONDS)


def measure_alone(running: Running, measured: Measured) -> None:
    """[ENG-075] What is left of a step where all its experts are in slots: compute that no read disturbs."""
    if running.plan.plan.executor not in ("staged", "hot") or not running.can_simulate:
        return
    uncounted = 1 + running.simulate(parse_routing("uniform"), cached=True)
    steps, _ = decode(running, 0, uncounted + ALONE_STEPS)
    measured.alone = [step for step in steps[uncounted:] if not step.spent.reads]


def process_peak(files: Sequence[Path]) -> tuple[int, str]:
    """[ENG-073] Where no memory cgroup counts."""
    try:
        cached = max(0, cached_bytes(files) - mapped_bytes(files))  # what is mapped is of the process as well
        return peak_bytes() + cached, "peak of the process, and page cache of the model's files"
    except (OSError, AttributeError):
        return peak_bytes(), "peak of the process; page cache is not told here"


def figures(running: Running, measured: Measured) -> dict[str, Any]:
    """[ENG-070] Times are medians over counted steps, counts are means; bytes a second in units of 1e9."""
    case, plan, steps = running.case, running.plan.plan, measured.steps
    assert measured.prefill is not None
    spent = [step.spent for step in steps]
    seconds, wait = median(step.seconds for step in steps), median(s.wait_seconds for s in spent)
    compute = median(step.compute_seconds for step in steps)
    bytes_read, hits = fmean(s.bytes_read for s in spent), sum(s.hits for s in spent)
    needed = hits + sum(s.read_ahead + s.on_demand for s in spent)
    alone = median(step.seconds for step in measured.alone) if measured.alone else None
    raw = median(measured.raw)
    touched = checkpoint_load(running.model.checkpoint, running.top_k).touched + running.model.adapters.nbytes
    disk_seconds, compute_seconds = bytes_read / raw if raw else 0.0, min(alone or compute, compute)
    return {
        "scenario": case.scenario,
        "k": running.top_k,
        "routing": case.rule.name,
        "routing_is_simulated": case.rule.simulated,
        "cold": case.cold,
        "backend": case.backend,
        "model": str(running.model.checkpoint.folder),
        "packed": running.model.checkpoint.packed is not None,
        "read_mode": plan.read_mode,
        "reader_threads": plan.reader_threads,
        "slots": plan.slots,
        "on_demand_slots": plan.on_demand_slots,
        "prompt_tokens": case.prompt_tokens,
        "tokens": len(steps),
        "decode_tok_s": 1 / seconds,
        "prefill_tok_s": case.prompt_tokens / measured.prefill.seconds,
        "ttft_s": measured.prefill.seconds,
        "prefill_bytes": measured.prefill.spent.bytes_read,
        "bytes_per_token": bytes_read,
        "reads_per_token": fmean(s.reads for s in spent),
        "hit_rate": hits / needed if needed else 0.0,
        "step_ms": seconds * 1e3,
        "wait_ms_per_token": wait * 1e3,
        "compute_ms_per_token": compute * 1e3,
        "compute_alone_ms_per_token": None if alone is None else alone * 1e3,
        "evaluations_per_token": fmean(s.evaluations for s in spent),
        "measures": measured.measures,
        "drops": running.decoder.counters.drops,
        "disk_gb_s": sum(s.bytes_read for s in spent) / sum(step.seconds for step in steps) / 1e9,
        "raw_disk_gb_s": raw / 1e9,
        "raw_disk_gb_s_each": [rate / 1e9 for rate in measured.raw],
        "kernel_gb_s": touched / compute_seconds / 1e9,
        "memory_gb_s": measured.memory / 1e9,
        "bytes_touched_per_token": touched,
        "limit_disk_tok_s": 1 / disk_seconds if disk_seconds else None,
        "limit_compute_tok_s": 1 / compute_seconds,
        "limit_memory_tok_s": measured.memory / touched,
        "limit_tok_s": 1 / max(disk_seconds, compute_seconds),
        "planned_bytes": running.plan.total,
        "cap_bytes": case.cap,
        "steps": [[s.seconds * 1e3, s.spent.wait_seconds * 1e3, s.spent.bytes_read] for s in steps],
    }


def main() -> int:
    """Print one line: the figures, or {"error": ...}."""
    try:
        told = measure(Case(**json.loads(sys.argv[1])), tell)
    except Edge0Error as error:
        told = {"error": str(error)}
    except KeyboardInterrupt:
        return 130
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
