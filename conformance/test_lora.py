"""Chapter 8: the update beside the int4 base."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.checkpoints import VOCAB, AdaptersRecipe, checkpoints
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import examples
from conformance.sessions import Session, plans, scripts
from edge0_ref.contract import Lora

lora = pytest.mark.claim("lora", "linear")


@st.composite
def updates(draw: Any) -> tuple[cases.MatrixRecipe, cases.DenseRecipe, int, float, int]:
    weight = draw(cases.matrices())
    rank, scale = draw(st.sampled_from((1, 2, 16))), draw(st.sampled_from((2.0, 0.5, -1.0, 1e-3)))
    return weight, draw(cases.activations(cases.TOKENS, weight.cols)), rank, scale, draw(cases.SEEDS)


@lora
@pytest.mark.spec("LOR-001")
@given(update=updates())
def test_an_update_is_added_beside_an_unmerged_base(driven: Driven, judge: Judge, update: Any) -> None:
    weight, x = update[0].build(), update[1].build()
    beside = cases.lora_of(weight.rows, weight.cols, *update[2:])
    wanted = oracles.linear(x, weight, beside, judge.profile)
    judge.bound(driven.linear(x, weight, beside), *wanted, f"{update}")


@lora
@pytest.mark.claim("bits")
@pytest.mark.spec("LOR-007")
@given(update=updates())
def test_where_bits_are_promised_an_update_of_zeros_changes_none(driven: Driven, judge: Judge, update: Any) -> None:
    weight, x = update[0].build(), update[1].build()
    some = cases.lora_of(weight.rows, weight.cols, *update[2:])
    nothing = Lora(some.down, np.zeros_like(some.up), some.scale)
    judge.state(bool((driven.linear(x, weight, nothing) == driven.linear(x, weight)).all()), True, f"equal, {update}")


@pytest.mark.claim("decoder", "lora")
@pytest.mark.spec("LOR-001")
@examples(0.15)
@given(data=st.data())
def test_a_decoder_applies_updates_to_the_layers_they_name(driven: Driven, judge: Judge, data: st.DataObject) -> None:
    model = data.draw(checkpoints((("linear",), ("full",))))
    recipe = AdaptersRecipe((), 0.5, data.draw(cases.SEEDS))
    script, plan = data.draw(scripts(VOCAB, most=4)), data.draw(plans(model.top_k))
    with model.opened() as (folder, checkpoint):
        session = Session(driven, judge, folder, checkpoint, plan, script, recipe.build(model))
        session.judge_numbers(f"{model}, {recipe}")
        driven.close()
