"""The `numba` backend as a whole: what its logits depend on, and with Numba switched off."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge0_ref import fast_backend, fast_linear, fast_operands
from edge0_ref.app import embedded_model
from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import EXECUTOR_KINDS, Plan
from edge0_ref.fast_backend import NumbaBackend
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Recipe, build

compiled = pytest.mark.skipif(not hasattr(fast_linear.linear_quantized, "py_func"), reason="Numba is switched off")


@compiled
def test_scratch_memory_starts_with_a_cache_line() -> None:
    assert all(fast_operands.aligned(numbers).ctypes.data % 64 == 0 for numbers in range(1, 2000, 37))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.spec("EXE-017", "STO-021")
def test_logits_depend_on_no_executor_slot_thread_or_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(build(tmp_path, Recipe(layers=3, attention=3, vocab=48)))
    said = set()
    for small in (0, 2**60):
        monkeypatch.setattr(fast_backend, "SMALL_WORK", small)
        for number, kind in enumerate(EXECUTOR_KINDS):
            plan = Plan(
                2, kind, "whole_layer", slots=1 + number, prefill_chunk=1 + 2 * number, reader_threads=1 + number
            )
            decoder = NumbaBackend().decoder(checkpoint, plan)
            rows = [*decoder.all_logits([3, 1, 4, 1, 5, 9, 2, 6]), decoder.step(5), decoder.step(3)]
            decoder.close()
            said.add(np.stack(rows).tobytes())
    assert len(said) == 1


@pytest.mark.usefixtures("unchecked")
def test_greedy_tokens_of_the_embedded_model_are_the_references() -> None:
    checkpoint = open_checkpoint(embedded_model())
    top_k = checkpoint.config.top_k
    texts = []
    for backend in (ReferenceBackend(), NumbaBackend()):
        decoder = backend.decoder(checkpoint, Plan(top_k=top_k, slots=2 * top_k))
        tokens = [int(decoder.prefill([296, 259, 631]).argmax())]
        for _ in range(299):
            tokens.append(int(decoder.step(tokens[-1]).argmax()))
        decoder.close()
        texts.append(tokens)
    assert texts[0] == texts[1]


DECODE = """
import sys, numpy as np
from edge0_ref.contract import Plan
from edge0_ref.fast_backend import create
from edge0_ref.inventory import open_checkpoint
decoder = create().decoder(open_checkpoint(sys.argv[1]), Plan(top_k=2))
print(decoder.all_logits([3, 1, 4, 1, 5]).tobytes().hex(), decoder.step(1).tobytes().hex())
"""


@compiled
@pytest.mark.spec("BCK-001")
def test_a_model_runs_with_numba_switched_off(tmp_path: Path) -> None:
    """As near as sums in another order are: there, fused multiply-adds round twice, and loops are not vectorised."""
    folder = build(tmp_path, Recipe(hidden=32, inner=32, head_dim=32, heads=1, value_heads=1, vocab=16, experts=3))
    said = []
    for switch in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": switch}
        command = [sys.executable, "-c", DECODE, str(folder)]
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        said.append(np.concatenate([np.frombuffer(bytes.fromhex(part), np.float32) for part in shown.split()]))
    assert np.linalg.norm(said[0] - said[1]) <= 1e-5 * np.linalg.norm(said[0])
