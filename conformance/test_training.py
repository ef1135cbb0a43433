"""Chapter 12: what a backend trains on is what it runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoints import MIXES, VOCAB, adapters_for, checkpoints
from conformance.compare import OUTER_WALL, Judge
from conformance.driven import Driven
from conformance.paths import examples
from edge0_ref.adapters import Adapters
from edge0_ref.contract import Plan
from edge0_ref.training import Trainer


@pytest.mark.claim("train", "decoder", "prerouter")
@pytest.mark.spec("PRE-021", "PRE-007")
@examples(0.3)
@given(data=st.data(), prompt=st.integers(1, 6))
def test_whole_sequences_are_the_decoders_steps(driven: Driven, judge: Judge, data: st.DataObject, prompt: int) -> None:
    model = data.draw(checkpoints(MIXES[2:], (3, 5, 8)))
    adapters = Adapters(data.draw(adapters_for(model)).build(model).heads)
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=prompt + 1, max_size=12))
    with model.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, Plan(model.top_k, context=64), adapters)
        wanted = [decoder.all_logits(tokens[:prompt])]
        wanted += [decoder.step(token)[None] for token in tokens[prompt:]]
        trainer = driven.backend.trainer()
        judge.holds(isinstance(trainer, Trainer), "trainer()", type(trainer).__name__, "a Trainer")
        got = trainer.scored(checkpoint, adapters).logits(np.array([tokens]), prompt)[0]
        judge.whole(got, np.concatenate(wanted), OUTER_WALL, f"{model}, prompt of {prompt}: logits")
        driven.close()
