"""What goes wrong in mid-call: a named error, nothing left behind, and a decoder that works again after a reset."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge0_mlx.decoder
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Plan
from edge0_ref.errors import BackendError, ReadError, UsageError
from edge0_ref.expert_store import FileExpertStore
from tests.mlx.conftest import Opened
from tests.ref.test_decoder import TINY, open_both
from tests.ref.test_interrupted import judge_interrupted_calls

PLAN = Plan(top_k=2, slots=4)


def tokens_of(backend: Any, decoder: Any) -> Array:
    logits = [decoder.prefill([1, 2, 3]), *(decoder.step(token) for token in (4, 5, 6))]
    return np.stack([backend.to_numpy(row) for row in logits])


@pytest.mark.spec("DEC-041", "DEC-046", "BCK-004")
@pytest.mark.parametrize("error", [ReadError("the disk failed"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_after_an_error_in_mid_call_a_reset_decoder_is_a_new_one(
    opened: Opened, small: Checkpoint, adapters: Adapters, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    plan = replace(PLAN, prefill_executor="whole_layer")
    wanted = tokens_of(opened.backend, opened(small, plan, adapters))
    decoder = opened(small, plan, adapters)
    decoder.prefill([7, 8])
    read_unchecked = FileExpertStore.read_unchecked

    def fails(store: FileExpertStore, expert: int, slot: Array) -> None:
        if store.layer == 2:
            raise error
        read_unchecked(store, expert, slot)

    with monkeypatch.context() as patch:
        patch.setattr(FileExpertStore, "read_unchecked", fails)
        with pytest.raises(type(error)):
            decoder.all_logits(range(20, 60))
    with pytest.raises(UsageError, match="failed half-way"):
        decoder.step(1)
    decoder.reset()
    assert not any(executor.resident for executor in decoder._prefill.values())
    np.testing.assert_array_equal(tokens_of(opened.backend, decoder), wanted)


@pytest.mark.spec("DEC-041")
def test_a_decoder_interrupted_at_any_line_goes_on_from_where_it_is_or_refuses(opened: Opened, tmp_path: Path) -> None:
    checkpoint, adapters = open_both(tmp_path, TINY)
    decoder = opened(checkpoint, PLAN, adapters)
    judge_interrupted_calls(decoder, lambda decoder: decoder.prefill([6, 7]), {edge0_mlx.decoder.__file__})


@pytest.mark.spec("DEC-041", "BCK-004")
def test_running_out_of_memory_is_named_and_survived(
    opened: Opened, small: Checkpoint, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = opened(small, PLAN, adapters)
    wanted = tokens_of(opened.backend, decoder)
    with monkeypatch.context() as patch:
        patch.setattr("mlx.core.eval", lambda *_: (_ for _ in ()).throw(RuntimeError("[malloc] out of memory")))
        with pytest.raises(BackendError, match="out of memory"):
            decoder.step(1)
    decoder.reset()
    np.testing.assert_array_equal(tokens_of(opened.backend, decoder), wanted)


@pytest.mark.spec("BCK-010", "STO-031")
def test_close_ends_the_readers_also_after_an_error(opened: Opened, small: Checkpoint, adapters: Adapters) -> None:
    before = threading.active_count()
    decoder = opened(small, PLAN, adapters)
    with pytest.raises(UsageError):
        decoder.prefill([10**6])
    decoder.prefill([1, 2])
    decoder.close()
    decoder.close()
    assert threading.active_count() == before


@pytest.mark.spec("DEC-044", "PRE-026")
def test_a_snapshot_outlives_what_comes_after_it(opened: Opened, small: Checkpoint, adapters: Adapters) -> None:
    decoder = opened(small, PLAN, adapters)
    decoder.prefill([1, 2, 3])
    kept = decoder.snapshot()
    first = [np.array(decoder.step(token)) for token in range(70)]  # the key-value cache grows in between
    decoder.restore(kept)
    again = [np.array(decoder.step(token)) for token in range(70)]
    np.testing.assert_array_equal(np.stack(first), np.stack(again))


WITHOUT_MLX = """
import sys
sys.modules["mlx"] = None
from edge0_ref.app.cli import main
main()
"""


@pytest.mark.spec("BCK-008")
def test_without_mlx_one_line_names_the_extra_and_the_exit_code_is_2(small: Checkpoint) -> None:
    command = [sys.executable, "-c", WITHOUT_MLX, "generate", str(small.folder), "--backend", "mlx"]
    ids = ["--prompt-ids", "1,2,3"]
    run = subprocess.run([*command, *ids], capture_output=True, text=True, env=os.environ | {"COLUMNS": "300"})
    assert run.returncode == 2
    assert "edge0[mlx]" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.spec("BCK-008")
def test_an_mlx_that_is_too_old_is_named_with_the_one_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge0_mlx, "version", lambda package: "0.31.2")
    with pytest.raises(BackendError, match=r"MLX 0\.31\.2 is installed.*MLX 0\.32 or newer.*edge0\[mlx\]"):
        edge0_mlx.check_mlx()


@pytest.mark.spec("BCK-008")
def test_a_dtype_that_is_no_activation_dtype_is_refused() -> None:
    from edge0_mlx.backend import MlxBackend

    with pytest.raises(BackendError, match="float32, bfloat16"):
        MlxBackend("float16")  # type: ignore[arg-type]
