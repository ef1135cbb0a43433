"""Chapter 9: the decoder. Layers and logits against float64, and laws of cutting, resetting, restoring."""

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoints import VOCAB, CheckpointRecipe, checkpoints
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import examples
from conformance.sessions import Script, Session, Watch, plans, play, scripts
from edge0_ref.adapters import Adapters
from edge0_ref.contract import ExecutorKind, Plan
from edge0_ref.errors import ReadError, UsageError

pytestmark = pytest.mark.claim("decoder")
MODEL = CheckpointRecipe(("linear", "full"), experts=5, top_k=2, seed=1)
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def judge_model(driven: Driven, judge: Judge, data: st.DataObject, mixes: tuple[tuple[str, ...], ...]) -> None:
    model = data.draw(checkpoints(mixes))
    script, plan = data.draw(scripts(VOCAB)), data.draw(plans(model.top_k))
    with model.opened() as (folder, checkpoint):
        session = Session(driven, judge, folder, checkpoint, plan, script, Adapters())
        session.judge_numbers(f"{model}, {plan}, {script.parts}")
        driven.close()


@pytest.mark.spec("DEC-010", "DEC-011", "DEC-001")
@examples(0.3)
@given(data=st.data())
def test_attention_layers_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, (("full",), ("full", "full")))


@pytest.mark.spec("DEC-020", "DEC-021", "DEC-022", "DEC-023")
@examples(0.3)
@given(data=st.data())
def test_gated_delta_layers_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, (("linear",), ("linear", "linear")))


@pytest.mark.spec("DEC-002", "DEC-030", "DEC-031", "DEC-042", "STO-004", "STO-011")
@examples(0.3)
@given(data=st.data())
def test_whole_models_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, (("linear", "full"), ("full", "linear", "linear")))


def pieces(parts: list[int]) -> tuple[tuple[str, int], ...]:
    """A prompt of the first number of tokens, then single steps for the rest of TOKENS."""
    return ("prefill", parts[0]), ("step", len(TOKENS) - parts[0])


@pytest.mark.spec("DEC-043")
@examples(0.15)
@given(model=checkpoints((("linear", "full"),)), prompt=st.integers(1, 7))
def test_steps_continue_a_prompt_as_one_prefill_would(
    driven: Driven, judge: Judge, model: CheckpointRecipe, prompt: int
) -> None:
    plan = Plan(model.top_k, slots=2 * model.top_k, context=64)
    with model.opened() as (folder, checkpoint):
        whole = Session(driven, judge, folder, checkpoint, plan, Script(TOKENS, (("prefill", 8),)), Adapters())
        cut = Session(driven, judge, folder, checkpoint, plan, Script(TOKENS, pieces([prompt])), Adapters())
        same = all(np.array_equal(cut.executed[layer], whole.executed[layer]) for layer in whole.executed)
        if same:  # a tie that rounding decides may route two runs apart; both are then judged by themselves
            # the plain run is as far from float64 as it may be from the whole one
            plain = whole.logits + (whole.plain().logits - whole.truth().logits)
            judge.deep(cut.logits, whole.logits.astype(np.float64), plain, f"{model}, prompt {prompt}")
        cut.judge_numbers(f"{model}, prompt {prompt}")
        driven.close()


@pytest.mark.claim("bits")
@pytest.mark.spec("DEC-040", "STO-021", "DEC-048")
@examples(0.4)
@given(data=st.data(), script=scripts(VOCAB, steps=False), watched=st.booleans())
def test_where_bits_are_promised_no_plan_changes_one(
    driven: Driven, judge: Judge, data: st.DataObject, script: Script, watched: bool
) -> None:
    plan = data.draw(plans(MODEL.top_k))
    whole = Script(script.tokens, (("prefill", len(script.tokens)),))
    with MODEL.opened() as (_, checkpoint):
        wanted = play(driven.decoder(checkpoint, Plan(MODEL.top_k, "exact", "exact", context=64)), whole)
        observe = Watch() if watched else None
        got = play(driven.decoder(checkpoint, plan, observe=observe), script)
        judge.bits(got, wanted, f"{plan}, {script.parts}")
        driven.close()


@pytest.mark.spec("DEC-049")
@examples(0.15)
@given(prompt=st.integers(1, len(TOKENS)), chunk=st.integers(1, 4), least=st.integers(1, 5))
def test_a_call_of_a_prompt_goes_where_its_size_sends_it(
    driven: Driven, judge: Judge, prompt: int, chunk: int, least: int
) -> None:
    """The exact executor keeps nothing, staged what it read."""
    plan = Plan(
        MODEL.top_k, "staged", "exact", slots=2 * MODEL.top_k, prefill_chunk=chunk, context=64, prefill_from=least
    )
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        driven.decoder(checkpoint, plan, observe=watch).prefill(TOKENS[:prompt])
        small = [min(chunk, prompt - first) < least for first in range(0, prompt, chunk)]
        seen = [len(resident) > 0 for resident in watch.values["resident", 0]]
        judge.state(seen, small, f"calls that left experts in slots, {plan}, prompt of {prompt}")
        driven.close()


@pytest.mark.spec("DEC-058")
@examples(0.15)
@given(kind=st.sampled_from(["exact", "whole_layer"]), prompt=st.integers(1, len(TOKENS)), least=st.integers(1, 9))
def test_a_large_call_leaves_nothing_in_slots_and_a_small_one_all(
    driven: Driven, judge: Judge, kind: ExecutorKind, prompt: int, least: int
) -> None:
    plan = Plan(MODEL.top_k, "staged", kind, slots=MODEL.experts, context=64, prefill_from=least)
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        decoder = driven.decoder(checkpoint, plan, observe=watch)
        for token in TOKENS:
            decoder.step(token)
        decoder.prefill(TOKENS[:prompt])
        decoder.step(TOKENS[0])
        for layer in range(len(MODEL.layers)):
            executed = watch.executed(layer)
            kept = executed if prompt < least else executed[-1:]
            named = f"in slots of layer {layer} after a step behind a prompt of {prompt}, {plan}"
            judge.state(set(watch.values["resident", layer][-1]), set(kept.ravel().tolist()), named)
        driven.close()


@pytest.mark.spec("DEC-044")
@examples(0.15)
@given(prompt=st.integers(1, 4), astray=st.lists(st.integers(0, VOCAB - 1), max_size=3), plan=plans(MODEL.top_k))
def test_a_snapshot_is_a_place_to_return_to(
    driven: Driven, judge: Judge, prompt: int, astray: list[int], plan: Plan
) -> None:
    with MODEL.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, plan)
        decoder.prefill(TOKENS[:prompt])
        kept = decoder.snapshot()
        wanted = np.array([decoder.step(token) for token in TOKENS[prompt:]])
        for _ in range(2):
            for token in astray:
                decoder.step(token)
            decoder.restore(kept)
            judge.state(decoder.position, prompt, "position after restoring")
            got = np.array([decoder.step(token) for token in TOKENS[prompt:]])
            judge.bits(got, wanted, f"steps after restoring, prompt {prompt}, {astray} in between, {plan}")
        driven.close()


@pytest.mark.spec("DEC-046")
@examples(0.15)
@given(astray=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), plan=plans(MODEL.top_k))
def test_a_reset_decoder_is_a_new_one(driven: Driven, judge: Judge, astray: list[int], plan: Plan) -> None:
    script = Script(TOKENS, pieces([3]))
    with MODEL.opened() as (_, checkpoint):
        wanted = play(driven.decoder(checkpoint, plan), script)
        decoder = driven.decoder(checkpoint, plan)
        decoder.prefill(astray)
        decoder.step(astray[0])
        decoder.reset()
        judge.state(decoder.position, 0, "position after reset")
        judge.bits(play(decoder, script), wanted, f"after reset, {astray} before, {plan}")
        driven.close()


@pytest.mark.spec("DEC-045")
def test_calls_that_cannot_be_made_are_refused_and_change_nothing(driven: Driven, judge: Judge) -> None:
    with MODEL.opened() as (_, checkpoint):
        plan = Plan(MODEL.top_k, context=len(TOKENS))
        wanted = play(driven.decoder(checkpoint, plan), Script(TOKENS, pieces([4])))[-1]
        decoder = driven.decoder(checkpoint, plan)
        refused: list[tuple[str, Any, str]] = [
            ("no tokens", lambda: decoder.prefill([]), "token"),
            ("a token beyond the vocabulary", lambda: decoder.prefill([1, VOCAB]), str(VOCAB)),
            ("a negative token", lambda: decoder.step(-1), "-1"),
        ]
        decoder.prefill(TOKENS[:4])
        for what, call, names in refused:
            judge.error(UsageError, call, what, names)
        for token in TOKENS[4:]:
            last = decoder.step(token)
        judge.bits(last, wanted, "logits after refused calls")
        judge.error(UsageError, lambda: decoder.step(1), "a token more than the context holds", str(len(TOKENS)))
        judge.state(decoder.position, len(TOKENS), "position after a refused call")
        driven.close()


@pytest.mark.spec("BCK-010")
def test_a_decoder_may_be_closed_twice(driven: Driven) -> None:
    with MODEL.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, Plan(MODEL.top_k, context=64))
        decoder.prefill(TOKENS[:2])
        decoder.close()
        decoder.close()


@pytest.mark.spec("DEC-041", "STO-020")
def test_a_decoder_that_failed_half_way_waits_to_be_reset(driven: Driven, judge: Judge) -> None:
    plan = Plan(MODEL.top_k, "exact", "exact", read_mode="pread", context=64)
    with MODEL.opened() as (folder, checkpoint):
        decoder = driven.decoder(checkpoint, plan)
        wanted = decoder.prefill(TOKENS[:2])
        kept = decoder.snapshot()
        file = folder / "model.safetensors"
        content = file.read_bytes()
        os.truncate(file, 2048)
        judge.error(ReadError, lambda: decoder.step(1), "a step over a file that shrank", file.name, "STO-020")
        judge.error(UsageError, lambda: decoder.step(1), "the step after it", "", "DEC-041")
        with file.open("r+b") as restored:
            restored.write(content)
        judge.error(UsageError, lambda: decoder.prefill([1]), "a prompt, the file being whole again", "", "DEC-041")
        decoder.restore(kept)
        judge.state(decoder.position, 2, "position after restoring")
        decoder.reset()
        judge.bits(decoder.prefill(TOKENS[:2]), wanted, "logits after a reset")
        driven.close()
