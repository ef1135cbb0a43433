"""Chapter 7: prerouter heads, and the schedule by which their predictions become routings."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.checkpoints import VOCAB, AdaptersRecipe, CheckpointRecipe, adapters_for, checkpoints
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import examples
from conformance.residency_model import SlotModel
from conformance.sessions import Script, Session, Watch, plans, play, scripts
from edge0_ref.contract import ExecutorKind, Plan

schedule = pytest.mark.claim("decoder", "prerouter")
DEEP = (("linear", "full"), ("full", "linear", "linear"), ("linear", "linear", "full"))


@pytest.mark.claim("prerouter")
@pytest.mark.spec("PRE-001", "PRE-004", "NUM-011")
@given(
    tokens=cases.TOKENS,
    experts=cases.EXPERT_COUNTS,
    hidden=st.sampled_from((1, 8, 33)),
    width=st.sampled_from((1, 16)),
    seed=cases.SEEDS,
    scale=st.sampled_from((0.1, 1.0, 4.0)),
)
def test_a_head_is_a_line_and_a_gelu_beside_it(
    driven: Driven, judge: Judge, tokens: int, experts: int, hidden: int, width: int, seed: int, scale: float
) -> None:
    features = cases.DenseRecipe(tokens, hidden + 2 * experts, seed=seed).build()
    head = cases.head_of(experts, hidden + 2 * experts, width, seed, scale)
    what = f"{experts} experts, {hidden} hidden, {width} wide, seed {seed}, scale {scale}"
    judge.bound(driven.predict(head, features), *oracles.head_logits(head, features, judge.profile), what)


@pytest.mark.claim("prerouter")
@pytest.mark.spec("PRE-004")
@given(z=st.floats(-6, 6, width=32))
def test_the_gelu_is_the_one_with_erf(driven: Driven, judge: Judge, z: float) -> None:
    one = np.ones((1, 1), np.float32)
    head = cases.PrerouterHead(one, one, np.zeros((1, 1), np.float32))
    x = np.full((1, 1), z, np.float32)
    judge.bound(driven.predict(head, x), *oracles.head_logits(head, x, judge.profile), f"gelu({z})")


@contextmanager
def session_of(driven: Driven, judge: Judge, data: st.DataObject) -> Iterator[Session]:
    """A drawn model with heads, along a drawn script."""
    model = data.draw(checkpoints(DEEP, counts=(3, 5, 8)))
    recipe = data.draw(adapters_for(model))
    chosen = data.draw(scripts(VOCAB, most=5))
    plan = data.draw(plans(model.top_k))
    with model.opened() as (folder, checkpoint):
        yield Session(driven, judge, folder, checkpoint, plan, chosen, recipe.build(model))
        driven.close()


@schedule
@pytest.mark.spec("PRE-002", "PRE-003", "PRE-005", "PRE-007", "PRE-020")
@examples(0.3)
@given(data=st.data())
def test_every_position_predicts_from_what_was_executed_there_and_before(
    driven: Driven, judge: Judge, data: st.DataObject
) -> None:
    with session_of(driven, judge, data) as session:
        session.judge_numbers(f"{session.plan}, {session.script.parts}")


@schedule
@pytest.mark.spec("PRE-006", "PRE-008", "PRE-021", "PRE-022", "PRE-023", "PRE-027")
@examples(0.3)
@given(data=st.data())
def test_a_step_is_routed_by_the_position_before_and_a_prompt_by_its_routers(
    driven: Driven, judge: Judge, data: st.DataObject
) -> None:
    with session_of(driven, judge, data) as session:
        for layer, executed in session.executed.items():
            predicted = layer - 1 in session.adapters.heads
            routed = [t for t in range(len(executed)) if not (predicted and t in session.script.stepped)]
            what = f"layer {layer}, heads {sorted(session.adapters.heads)}, {session.script.parts}"
            router_logits = session.watch.rows(driven, "router_logits", layer)
            judge.state(len(router_logits), len(routed), f"positions where the router ran, {what}", "PRE-027")
            k = session.plan.top_k
            judge.choice(executed[routed], oracles.largest(router_logits, k), f"prompt routing, {what}", "PRE-008")
            if predicted:
                steps = sorted(session.script.stepped)
                predictions = session.watch.rows(driven, "prediction_logits", layer)[[t - 1 for t in steps]]
                wanted = oracles.largest(predictions, k) if steps else np.empty((0, k), np.int64)
                judge.choice(executed[steps], wanted, f"step routing, {what}", "PRE-006")


MODEL = CheckpointRecipe(("linear", "full", "linear", "linear"), experts=8, top_k=2, seed=5)
EVERY_LAYER = AdaptersRecipe((0, 1, 2), 0.0, 6)
TWO_LAYERS = AdaptersRecipe((0, 1), 0.0, 6)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@schedule
@pytest.mark.spec("PRE-025", "EXE-014", "EXE-013")
def test_what_is_staged_for_a_consumer_is_what_it_executes(driven: Driven, judge: Judge) -> None:
    plan = Plan(top_k=2, executor="staged", prefill_executor="whole_layer", slots=4, context=64)
    with MODEL.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, plan, EVERY_LAYER.build(MODEL))
        decoder.prefill(PROMPT)
        for number, token in enumerate(PROMPT):
            before = (decoder.counters.hits + decoder.counters.read_ahead, decoder.counters.on_demand)
            decoder.step(token)
            staged = decoder.counters.hits + decoder.counters.read_ahead - before[0]
            demanded = decoder.counters.on_demand - before[1]
            # three layers consume predictions of two experts each; only the first may have to read on demand
            judge.holds(staged >= 6, f"experts met in a slot at step {number}", staged, "at least 6")
            judge.state(staged + demanded, 8, f"experts executed at step {number}")
        judge.state(decoder.counters.drops, 0, "drops")
        driven.close()


@schedule
@pytest.mark.spec("PRE-024")
def test_predictions_are_handed_over_before_the_next_token(driven: Driven, judge: Judge) -> None:
    """The prompt's own reads go through another executor: what staged reads is what was predicted."""
    plan = Plan(top_k=2, executor="staged", prefill_executor="exact", slots=4, context=64)
    with MODEL.opened() as (_, checkpoint):
        decoder = driven.decoder(checkpoint, plan, EVERY_LAYER.build(MODEL))
        decoder.prefill(PROMPT[:1])
        layers, consumers = 4, 3
        judge.state(
            decoder.counters.reads, 2 * (layers + consumers), "reads of one prompt token, and ahead of the next"
        )
        driven.close()


@schedule
@pytest.mark.spec("PRE-023", "PRE-028")
@pytest.mark.parametrize("executor", ["staged", "hot"])
@examples(0.2)
@given(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), slots=st.integers(1, 8))
def test_layers_without_predictions_keep_what_they_use_most(
    driven: Driven, judge: Judge, executor: ExecutorKind, tokens: list[int], slots: int
) -> None:
    """Layers 0 and 3 ask their routers; each is followed, expert by expert, by a model of its slots."""
    plan = Plan(2, executor, "whole_layer", slots=4, context=64, on_demand_slots=slots)
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        decoder = driven.decoder(checkpoint, plan, TWO_LAYERS.build(MODEL), watch)
        followed = {layer: SlotModel("hot", slots) for layer in (0, 3)}
        for token in tokens:
            decoder.step(token)
            for layer, model in followed.items():
                model.call(watch.values["routing", layer][-1].experts[0].tolist(), set())
                resident = watch.values["resident", layer][-1]
                named = f"resident in layer {layer}, {slots} slots, {tokens}"
                judge.state(set(resident), model.resident, named, "PRE-028")
            for layer in (1, 2):
                judge.holds(len(watch.values["resident", layer][-1]) <= 4, "residents", layer, "at most 4", "PRE-028")
        routed = [len(watch.values["router_logits", layer]) for layer in range(4)]
        judge.state(routed, [len(tokens), 1, 1, len(tokens)], "positions where the router of each layer ran", "PRE-023")
        driven.close()


@schedule
@pytest.mark.claim("bits")
@pytest.mark.spec("PRE-020", "DEC-040")
@examples(0.2)
@given(cuts=st.sets(st.integers(1, 7)), chunk=st.integers(1, 9), data=st.data())
def test_where_bits_are_promised_no_cut_of_a_prompt_changes_what_follows(
    driven: Driven, judge: Judge, cuts: set[int], chunk: int, data: st.DataObject
) -> None:
    ends = [*sorted(cuts), len(PROMPT)]
    parts = tuple(("prefill", end - start) for start, end in zip([0, *ends], ends, strict=False))
    steps = (("step", 3),)
    whole = Script((*PROMPT, 7, 8, 9), (("prefill", len(PROMPT)), *steps))
    cut = Script(whole.tokens, parts + steps)
    plan = Plan(2, "staged", "whole_layer", 4, prefill_chunk=64, context=64)
    other = data.draw(plans(2).map(lambda drawn: Plan(**(vars(drawn) | {"prefill_chunk": chunk}))))
    with MODEL.opened() as (_, checkpoint):
        adapters = EVERY_LAYER.build(MODEL)
        wanted = play(driven.decoder(checkpoint, plan, adapters), whole)
        got = play(driven.decoder(checkpoint, other, adapters), cut)
        judge.bits(got, wanted, f"prompt cut as {parts}, {other}")
        driven.close()


@schedule
@pytest.mark.spec("PRE-022", "DEC-046")
def test_reset_forgets_predictions(driven: Driven, judge: Judge) -> None:
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        decoder = driven.decoder(checkpoint, Plan(top_k=2, slots=4, context=64), EVERY_LAYER.build(MODEL), watch)
        wanted = decoder.step(PROMPT[0])
        decoder.prefill(PROMPT)
        before = len(watch.values["router_logits", 1])
        decoder.reset()
        judge.bits(decoder.step(PROMPT[0]), wanted, "a first step after a reset")
        judge.state(len(watch.values["router_logits", 1]) - before, 1, "routers that ran in it", "PRE-022")
        driven.close()


@schedule
@pytest.mark.spec("PRE-026", "DEC-044")
@examples(0.1)
@given(steps=st.integers(0, 3))
def test_a_snapshot_holds_predictions_and_restoring_it_stages_them(driven: Driven, judge: Judge, steps: int) -> None:
    plan = Plan(top_k=2, executor="staged", prefill_executor="exact", slots=4, context=64)
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        decoder = driven.decoder(checkpoint, plan, EVERY_LAYER.build(MODEL), watch)
        decoder.prefill(PROMPT)
        for token in PROMPT[:steps]:
            decoder.step(token)
        kept = decoder.snapshot()
        wanted = [decoder.step(token) for token in (7, 8)]
        decoder.prefill(PROMPT)
        decoder.restore(kept)
        demanded, before = decoder.counters.on_demand, len(watch.values["router_logits", 1])
        got = [decoder.step(token) for token in (7, 8)]
        judge.bits(np.array(got), np.array(wanted), f"two steps after restoring, {steps} steps in")
        judge.state(len(watch.values["router_logits", 1]), before, "routers that ran where predictions were kept")
        judge.holds(decoder.counters.on_demand - demanded <= 4, "read on demand", decoder.counters.on_demand, "layer 0")
        driven.close()


POINTS = ("mixer_output", "moe_input", "router_logits", "routing", "experts_output", "resident", "shared_output")


def points_of(consuming: bool) -> list[tuple[str, int]]:
    """What an observer of MODEL with a head in every layer but the last is told in one call."""
    told: list[tuple[str, int]] = [("embedding", -1)]
    for layer in range(4):
        told += [(point, layer) for point in POINTS if not (point == "router_logits" and consuming and layer > 0)]
        told += [("prediction_logits", layer + 1)] if layer < 3 else []
        told += [("layer_output", layer)]
    return [*told, ("logits", -1)]


@schedule
@pytest.mark.spec("BCK-006", "PRE-027")
def test_an_observer_is_told_everything_in_order(driven: Driven, judge: Judge) -> None:
    with MODEL.opened() as (_, checkpoint):
        watch = Watch()
        decoder = driven.decoder(checkpoint, Plan(top_k=2, slots=4, context=64), EVERY_LAYER.build(MODEL), watch)
        decoder.prefill(PROMPT)
        decoder.step(1)
        judge.state(
            watch.events, points_of(consuming=False) + points_of(consuming=True), "points of a prompt and a step"
        )
        for (point, layer), values in watch.values.items():
            if point not in ("routing", "resident"):
                shapes = [(str(v.dtype), v.shape[0], v.ndim) for v in map(driven.backend.to_numpy, values)]
                rows = 1 if point == "logits" else len(PROMPT)  # `prefill` returns the logits of the last token alone
                judge.state(shapes[0], ("float32", rows, 2), f"{point} of layer {layer}, the prompt")
                judge.state(shapes[1:], [("float32", 1, 2)] * (len(shapes) - 1), f"{point} of layer {layer}, the step")
        driven.close()
