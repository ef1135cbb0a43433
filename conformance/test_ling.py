"""Chapter 9, the Ling family: its mixers, dense layers and routing against float64, in both layouts of its files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoints import VOCAB, adapters_for
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.ling_checkpoints import ling_checkpoints
from conformance.ling_oracle import LingSession
from conformance.paths import examples
from conformance.sessions import Script, plans, play, scripts
from edge0_ref.adapters import Adapters
from edge0_ref.contract import Plan

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def judge_model(
    driven: Driven, judge: Judge, data: st.DataObject, kinds: tuple[str, ...], adapted: bool = False
) -> None:
    model = data.draw(ling_checkpoints(kinds))
    script, plan = data.draw(scripts(VOCAB)), data.draw(plans(model.top_k))
    adapters = data.draw(adapters_for(model)).build(model) if adapted else Adapters()
    with model.opened() as (folder, checkpoint):
        session = LingSession(driven, judge, folder, checkpoint, plan, script, adapters)
        session.judge_numbers(f"{model}, {plan}, {script.parts}")
        driven.close()


@pytest.mark.claim("decoder", "mixer:kda")
@pytest.mark.spec("DEC-050", "DEC-051", "DEC-055", "DEC-056")
@examples(0.3)
@given(data=st.data())
def test_kimi_delta_layers_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, ("kda",))


@pytest.mark.claim("decoder", "mixer:mla")
@pytest.mark.spec("DEC-052", "DEC-053", "DEC-054", "DEC-061")
@examples(0.3)
@given(data=st.data())
def test_latent_layers_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, ("mla",))


@pytest.mark.claim("decoder", "mixer:kda", "mixer:mla", "prerouter", "lora")
@pytest.mark.spec("DEC-062", "DEC-055", "PRE-006", "PRE-007")
@examples(0.5)
@given(data=st.data())
def test_adapted_models_agree_with_float64(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    judge_model(driven, judge, data, ("both", "tail", "kda"), adapted=True)


@pytest.mark.claim("decoder", "mixer:kda", "mixer:mla", "bits")
@pytest.mark.spec("DEC-040", "DEC-043", "DEC-044")
@examples(0.3)
@given(data=st.data(), prompt=st.integers(1, 7))
def test_bits_depend_on_neither_plan_nor_cuts(driven: Driven, judge: Judge, data: st.DataObject, prompt: int) -> None:
    model = data.draw(ling_checkpoints(("both", "kda")))
    whole, cut = Script(TOKENS, (("prefill", 8),)), Script(TOKENS, (("prefill", prompt), ("step", 8 - prompt)))
    with model.opened() as (_, checkpoint):
        wanted = play(driven.decoder(checkpoint, Plan(model.top_k, "exact", "exact", context=64)), whole)
        decoder = driven.decoder(checkpoint, data.draw(plans(model.top_k)))
        judge.bits(play(decoder, cut), wanted, f"{model}, prompt of {prompt}")
        decoder.reset()
        decoder.prefill(TOKENS[:prompt])
        kept = decoder.snapshot()
        decoder.step(TOKENS[0])
        decoder.restore(kept)
        again = np.array([decoder.step(token) for token in TOKENS[prompt:]])
        judge.bits(again, wanted[prompt:], f"{model}, restored after a prompt of {prompt}")
        driven.close()
