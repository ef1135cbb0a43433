"""How soon the second turn of a conversation of 2,000 tokens begins, with its first turn kept and without.

    python -m tests.benchmarks.bench_prefixes [ADAPTERS]

Both take turns on the embedded model; what is told is the time to the first token of turn two, the ratio of the
medians, what a kept state weighs, and what taking, writing and restoring one costs. The last line is JSON.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.app import open_model
from edge0_ref.app.machine import provenance
from edge0_ref.engine.prefixes import PrefixBudget

TOKENS, ANSWER, ROUNDS = 2000, 32, 5
HELD_OUT = Path(__file__).parents[1] / "data" / "heldout.txt"


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def measure(backend: str, adapters: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        room = PrefixBudget(2**28, 2**30, Path(folder))
        with (
            open_model(backend=backend, adapters=adapters, context=TOKENS + 200) as cold,
            open_model(backend=backend, adapters=adapters, context=TOKENS + 200, reuse=room) as kept,
        ):
            ids = cold.tokenizer.encode(HELD_OUT.read_text("utf-8"))
            seconds: dict[str, list[float]] = {"cold": [], "kept": []}
            for turn in range(ROUNDS):
                prompt = ids[turn * 3 : turn * 3 + TOKENS]
                first = kept.generate(prompt, ANSWER)
                list(first)
                longer = [*prompt, *first.result.token_ids, *ids[-20:]]
                for name, model in (("cold", cold), ("kept", kept)):
                    text = model.generate(longer, 1)
                    list(text)
                    seconds[name].append(text.result.time_to_first_token)
            decoder, files = kept._session.decoder, kept.prefixes._files
            state = decoder.snapshot()
            arrays = decoder.arrays_of(state)
            key = np.asarray(longer, np.int32)
            path = files.write(key, arrays)
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            return {
                "backend": backend,
                "prompt_tokens": len(longer),
                "cached_tokens": text.result.cached_tokens,
                "cold_ttft_s": medians["cold"],
                "kept_ttft_s": medians["kept"],
                "ratio": medians["cold"] / medians["kept"],
                "state_bytes": sum(array.nbytes for array in arrays.values()),
                "snapshot_ms": milliseconds(decoder.snapshot),
                "restore_ms": milliseconds(lambda: decoder.restore(state)),
                "write_ms": milliseconds(lambda: files.write(key, arrays)),
                "read_ms": milliseconds(lambda: decoder.state_of(files.read(path, key))),
            }


def main() -> None:
    adapters = next(iter(sys.argv[1:]), None)
    results = [measure(backend, adapters) for backend in ("numba", "reference")]
    for result in results:
        print(
            f"{result['backend']:10} {result['prompt_tokens']} tokens, {result['cached_tokens']} kept: first token "
            f"after {result['kept_ttft_s']:.3f} s, {result['cold_ttft_s']:.3f} s cold: {result['ratio']:.1f} times"
        )
    print(json.dumps({"results": results, **provenance()}))


if __name__ == "__main__":
    main()
