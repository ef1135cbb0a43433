"""How close the fast kernels come to reading memory, and what that does for decoding.

    python -m tests.benchmarks.bench_numba

Every kernel moves more bytes than any cache holds, in turn with a plain read of memory by as many threads; a figure is
the median over rounds, a share the median of each round's own. Decoding takes turns too, reference against numba on the
embedded model. The last line is JSON. Nothing here passes or fails by the clock.
"""

import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numba
import numpy as np
from numba.np.ufunc.parallel import get_thread_count

from edge0_ref import backend, fast_backend
from edge0_ref.app import embedded_model
from edge0_ref.contract import ExpertLayout, Plan, QuantizedMatrix
from edge0_ref.executors.bank import Bank
from edge0_ref.fast_backend import FastArithmetic
from edge0_ref.inventory import open_checkpoint

ROUNDS = 9
TOTAL_BYTES = 2**28
LINEARS = {"in_proj_qkv 8192 x 2048": (8192, 2048), "out_proj 2048 x 4096": (2048, 4096), "lm_head": (248320, 2048)}
EXPERT = ExpertLayout(hidden=2048, inner=512, bits=4, group_size=64, coefficient_dtype="bfloat16")
TOP_K = 4


@numba.njit(cache=True, nogil=True)
def total(words: np.ndarray) -> np.uint64:
    found = np.uint64(0)
    for word in words:
        found += word
    return found


def plain_read(words: np.ndarray, threads: int) -> None:
    readers = [threading.Thread(target=total, args=[part]) for part in np.array_split(words, threads)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def random_matrix(rng: np.random.Generator, rows: int, cols: int) -> QuantizedMatrix:
    packed = rng.integers(0, 2**32, (rows, cols // 8), dtype=np.uint32)
    scales, biases = (rng.integers(0x3C00, 0x3D00, (rows, cols // 64)).astype(np.uint16) for _ in range(2))
    return QuantizedMatrix(packed, scales, biases)


def linear_case(arithmetic: FastArithmetic, rows: int, cols: int, tokens: int) -> tuple[int, Callable[[], None]]:
    """Bytes a round moves, and a round: matrices one after the other."""
    rng = np.random.default_rng(rows)
    nbytes = rows * cols // 2 + rows * cols // 64 * 4
    count = max(1, TOTAL_BYTES // nbytes)
    products = [arithmetic.product([(random_matrix(rng, rows, cols), None)]) for _ in range(count)]
    x = rng.normal(size=(tokens, cols)).astype(np.float32)

    def round_of_all() -> None:
        for product in products:
            product(x)

    return nbytes * len(products), round_of_all


def experts_case(arithmetic: FastArithmetic) -> tuple[int, Callable[[], None]]:
    """A token's experts where they lie, TOP_K slots after TOP_K slots."""
    rng = np.random.default_rng(0)
    slots = TOTAL_BYTES // EXPERT.nbytes // TOP_K * TOP_K
    bank = Bank(EXPERT, rng.integers(0x3C, 0x3D, (slots, EXPERT.nbytes), dtype=np.uint8, endpoint=True))
    x = rng.normal(size=(1, EXPERT.hidden)).astype(np.float32)
    outputs = np.empty((1, TOP_K, EXPERT.hidden), np.float32)

    def round_of_all() -> None:
        for first in range(0, slots, TOP_K):
            group = [(([0], [rank]), first + rank) for rank in range(TOP_K)]
            arithmetic.run_experts(outputs, x, group, bank)

    return slots * EXPERT.nbytes, round_of_all


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def kernel_figures(threads: int) -> Iterator[dict[str, object]]:
    arithmetic = FastArithmetic(threads)
    words = np.arange(TOTAL_BYTES // 8, dtype=np.uint64)
    cases = {name: linear_case(arithmetic, *shape, tokens=1) for name, shape in LINEARS.items()}
    cases[f"{TOP_K} experts 2048 -> 512 -> 2048"] = experts_case(arithmetic)
    for name, (nbytes, call) in cases.items():
        call()
        pairs = [(seconds(lambda: plain_read(words, threads)), seconds(call)) for _ in range(ROUNDS)]
        rates = [(words.nbytes / read / 1e9, nbytes / kernel / 1e9) for read, kernel in pairs]
        memory, kernel = (statistics.median(column) for column in zip(*rates, strict=True))
        share = statistics.median(fast / plain for plain, fast in rates)
        yield {
            "kernel": name,
            "gb_s": round(kernel, 2),
            "memory_gb_s": round(memory, 2),
            "share": round(share, 3),
        }


def many_tokens(threads: int) -> dict[str, object]:
    """One matrix and a prompt of 256: billions of multiplications and additions a second."""
    arithmetic, (rows, cols) = FastArithmetic(threads), LINEARS["in_proj_qkv 8192 x 2048"]
    product = arithmetic.product([(random_matrix(np.random.default_rng(1), rows, cols), None)])
    x = np.random.default_rng(2).normal(size=(256, cols)).astype(np.float32)
    rates = [2e-9 * rows * cols * 256 / seconds(lambda: product(x)) for _ in range(ROUNDS)]
    return {"kernel": "in_proj_qkv, 256 tokens", "gflop_s": round(statistics.median(rates), 1)}


def decode_figures(tokens: int = 60) -> dict[str, float]:
    """Tokens a second of the embedded model with 2K slots."""
    checkpoint = open_checkpoint(embedded_model())
    top_k = checkpoint.config.top_k
    made = [backend.create(), fast_backend.create()]
    decoders = {one.name: one.decoder(checkpoint, Plan(top_k=top_k, slots=2 * top_k)) for one in made}
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for decoder in decoders.values():
        decoder.prefill(range(5, 25))
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            rates[name].append(tokens / seconds(lambda step=decoder.step: [step(7 + i) for i in range(tokens)]))
    for decoder in decoders.values():
        decoder.close()
    return {name: round(statistics.median(figures), 1) for name, figures in rates.items()}


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command does
    threads = get_thread_count()
    kernels = []
    for figures in kernel_figures(threads):
        print("{kernel:32} {gb_s:6.2f} GB/s of {memory_gb_s:6.2f}: {share:6.1%}".format(**figures))
        kernels.append(figures)
    kernels.append(many_tokens(threads))
    print("{kernel:32} {gflop_s:6.1f} GFLOP/s".format(**kernels[-1]))
    decode = decode_figures()
    print("embedded model, tokens/s: " + ", ".join(f"{name} {rate}" for name, rate in decode.items()))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "numba": numba.__version__}
    print(json.dumps({**machine, "threads": threads, "kernels": kernels, "decode_tok_s": decode}))


if __name__ == "__main__":
    main()
