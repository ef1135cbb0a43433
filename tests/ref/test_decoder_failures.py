"""A decoder whose disk or whose numbers fail: the error names the place, and afterwards nothing is left over."""

import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref.backend import ReferenceBackend
from edge0_ref.contract import EXECUTOR_KINDS, READ_MODES, Plan
from edge0_ref.errors import BudgetError, NonFiniteError, ReadError, UsageError
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import make_config, make_tensors, tensor, write_model
from tests.ref.sound import modes_of
from tests.ref.test_decoder import TINY, generate, open_both
from tests.ref.test_prefetch import soon


@pytest.mark.spec("STO-020", "STO-032", "DEC-041", "EXE-016")
@pytest.mark.parametrize("read_mode", READ_MODES)
@pytest.mark.parametrize("kind", EXECUTOR_KINDS)
def test_a_file_that_shrinks_in_mid_token_stops_the_decoder_until_it_is_reset(
    tmp_path: Path, kind: Any, read_mode: Any
) -> None:
    if read_mode not in modes_of(tmp_path):
        pytest.skip(f"no {read_mode} reads in {tmp_path}")
    before = threading.active_count()
    checkpoint, adapters = open_both(tmp_path, TINY)
    path = tmp_path / "model" / "model.safetensors"
    content = path.read_bytes()
    plan = Plan(top_k=2, executor=kind, prefill_executor=kind, slots=1, read_mode=read_mode, reader_threads=2)
    decoder = ReferenceBackend().decoder(checkpoint, plan, adapters)
    if kind != "whole_layer":  # which has everything in memory after its first call
        decoder.prefill([1, 2])
    os.truncate(path, 100)
    with pytest.raises(ReadError, match=rf"layer \d expert \d: reading \S+ from {path} failed"):
        decoder.all_logits(list(range(16)))  # so many that an expert is needed which is in no slot
    with pytest.raises(UsageError, match="reset the decoder, or restore"):
        decoder.step(1)
    with open(path, "r+b") as file:
        file.write(content)
    wanted = ReferenceBackend().decoder(checkpoint, Plan(top_k=2), adapters)
    assert generate(decoder, [3, 4]) == generate(wanted, [3, 4])
    wanted.close()
    decoder.close()
    decoder.close()
    assert threading.active_count() == before


@pytest.mark.spec("STO-032")
def test_a_decoder_that_cannot_be_built_leaves_no_thread(tmp_path: Path) -> None:
    checkpoint, adapters = open_both(tmp_path, TINY)
    before = threading.active_count()
    with pytest.raises(BudgetError, match="0 slots"):
        ReferenceBackend().decoder(checkpoint, Plan(top_k=2, slots=0), adapters)
    assert threading.active_count() == before


@pytest.mark.spec("RTR-002", "NUM-009")
def test_overflow_in_a_model_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    """Finite weights, but so large that activations overflow: in a layer's router, or at the very end in the head."""
    recipe = replace(TINY, coefficients="F32")
    for name, message in (
        ("language_model.model.layers.1.mlp.gate.scales", "layer 1: router logit of token 0, expert 0 is"),
        ("language_model.lm_head.scales", "logits .* hold NaN or infinity"),
    ):
        tensors = make_tensors(recipe)
        tensors[name] = tensor(np.full(tensors[name].shape, 3e38))
        checkpoint = open_checkpoint(write_model(tmp_path, make_config(recipe), tensors))
        decoder = ReferenceBackend().decoder(checkpoint, Plan(top_k=2))
        with pytest.raises(NonFiniteError, match=message):
            decoder.prefill([1, 2])
        decoder.close()


@pytest.mark.spec("PRE-006", "NUM-009")
def test_a_head_that_overflows_is_an_error_that_names_both_layers(tmp_path: Path) -> None:
    checkpoint, adapters = open_both(tmp_path, TINY)
    head = adapters.heads[0]
    huge = {name: np.full(getattr(head, name).shape, 3e38, np.float32) for name in ("linear", "fc2")}
    broken = replace(head, **huge)
    decoder = ReferenceBackend().decoder(checkpoint, Plan(top_k=2), replace(adapters, heads={0: broken}))
    with pytest.raises(NonFiniteError, match="layer 0 predicting for layer 1"):
        decoder.prefill([1, 2])
    decoder.close()


@pytest.mark.spec("DEC-058", "ENG-030")
@pytest.mark.parametrize("prompt", [4, 8])
def test_a_large_call_of_a_prompt_has_the_memory_of_slots(tmp_path: Path, prompt: int) -> None:
    """Executors of decode steps hold nothing in any of its layers, and after the last call what that predicts."""
    checkpoint, adapters = open_both(tmp_path, TINY)
    plan = Plan(top_k=2, prefill_executor="whole_layer", prefill_chunk=4)
    held, memories = list[int](), list[Any]()

    def observe(point: str, layer: int, value: object) -> None:
        if point == "layer_output":
            held.append(sum(len(executor.resident) for executor in decoder._decode.values()))
        if point == "experts_output" and decoder.position >= 2:
            memory = decoder._prefill[layer]._bank.memory.base  # type: ignore[attr-defined]
            if layer == 0:
                memories.append(weakref.ref(memory))
            assert memory is memories[-1]()  # a call's layers pass it on

    decoder = ReferenceBackend().decoder(checkpoint, plan, adapters, observe)
    layers = len(decoder.layers)
    decoder.step(1)
    decoder.step(2)
    decoder.prefill(range(3, 3 + prompt))
    assert held[2 * layers - 1] > 0
    assert held[2 * layers :] == [0] * (layers * prompt // 4)
    assert [set(executor.resident) for executor in decoder._decode.values()] == [
        set(decoder.state.predicted[layer].experts.ravel()) if layer in decoder.state.predicted else set()
        for layer in decoder._decode
    ]
    assert decoder.state.predicted
    assert decoder._spare._bank is None
    assert soon(lambda: not any(memory() is not None for memory in memories))
    decoder.close()


@pytest.mark.spec("DEC-041", "ENG-031")
def test_a_prompt_that_is_interrupted_stops_the_decoder_and_gives_its_memory_back(tmp_path: Path) -> None:
    """In the middle of a layer, or between two chunks, when every layer has advanced."""
    checkpoint, adapters = open_both(tmp_path, TINY)
    plan = Plan(top_k=2, prefill_executor="whole_layer", prefill_chunk=4)
    stops = [("logits", -1), ("moe_input", 0), ("experts_output", 1)]

    def observe(point: str, layer: int, value: object) -> None:
        if stops and (point, layer) == stops[-1]:
            stops.pop()
            raise KeyboardInterrupt

    decoder = ReferenceBackend().decoder(checkpoint, plan, adapters, observe)
    while stops:
        with pytest.raises(KeyboardInterrupt):
            decoder.all_logits(list(range(8)))
        assert not any(executor.resident for executor in decoder._prefill.values())
        assert decoder._spare._bank is None
        with pytest.raises(UsageError, match="reset the decoder, or restore"):
            decoder.step(1)
        decoder.reset()
    wanted = ReferenceBackend().decoder(checkpoint, Plan(top_k=2), adapters)
    assert generate(decoder, [3, 4]) == generate(wanted, [3, 4])
    wanted.close()
    decoder.close()
