"""Chapter 3: routers."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven
from edge0_ref.contract import Routing, SigmoidGroup, SoftmaxTopK
from edge0_ref.errors import NonFiniteError, ShapeError

pytestmark = pytest.mark.claim("router")
FAMILIES = st.sampled_from(("softmax", "sigmoid"))
SAFE_GAP = 1e-6  # scores of the coarse grid are equal or further apart than any float32 sigmoid is wrong


@pytest.mark.spec("RTR-003", "RTR-010", "RTR-001")
@given(case=cases.logits())
def test_softmax_chooses_the_largest_logits_and_the_lower_id_of_equals(
    driven: Driven, judge: Judge, case: tuple[cases.LogitsRecipe, int]
) -> None:
    recipe, k = case
    logits = recipe.build()
    judge.choice(driven.route(logits, SoftmaxTopK(k)).experts, oracles.largest(logits, k), f"{recipe}, k = {k}")


@pytest.mark.spec("RTR-011")
@given(case=cases.logits())
def test_softmax_weights_are_the_softmax_over_the_chosen(
    driven: Driven, judge: Judge, case: tuple[cases.LogitsRecipe, int]
) -> None:
    recipe, k = case
    logits = recipe.build()
    routing = driven.route(logits, SoftmaxTopK(k))
    judge.bound(routing.weights, *oracles.softmax_weights(logits, routing.experts), f"weights of {recipe}, k = {k}")


@pytest.mark.spec("RTR-010")
@given(seed=cases.SEEDS, experts=st.sampled_from((8, 60, 256)))
def test_a_dominant_logit_leaves_the_order_of_the_others_as_it_is(
    driven: Driven, judge: Judge, seed: int, experts: int
) -> None:
    recipe = cases.LogitsRecipe(3, experts, "dominant", seed)
    logits = recipe.build()
    judge.choice(driven.route(logits, SoftmaxTopK(8)).experts, oracles.largest(logits, 8), f"{recipe}")


@pytest.mark.spec("RTR-001")
@given(case=cases.logits())
def test_a_token_is_routed_alike_whoever_shares_the_call(
    driven: Driven, judge: Judge, case: tuple[cases.LogitsRecipe, int]
) -> None:
    recipe, k = case
    logits = recipe.build()
    together = driven.route(logits, SoftmaxTopK(k))
    alone = [driven.route(row[None], SoftmaxTopK(k)) for row in logits]
    judge.choice(together.experts, np.concatenate([r.experts for r in alone]), f"{recipe}, one token at a time")


@pytest.mark.spec("RTR-002", "NUM-009")
@given(case=cases.logits(), bad=st.sampled_from((np.nan, np.inf, -np.inf)), family=FAMILIES)
def test_a_logit_that_is_no_number_is_refused(
    driven: Driven, judge: Judge, case: tuple[cases.LogitsRecipe, int], bad: float, family: str
) -> None:
    recipe, k = case
    logits = recipe.build()
    token, expert = recipe.seed % recipe.tokens, recipe.seed % recipe.experts
    logits[token, expert] = bad
    spec = SoftmaxTopK(k) if family == "softmax" else SigmoidGroup(k, 1, 1, 1.0)
    given_logits = driven.backend.from_numpy(logits)
    what = f"{bad} at token {token}, expert {expert} of {recipe}"
    judge.error(NonFiniteError, lambda: driven.backend.route(given_logits, spec), what, names=f"token {token}")
    judge.error(NonFiniteError, lambda: driven.backend.route(given_logits, spec), what, names=f"expert {expert}")


@pytest.mark.spec("RTR-002")
@given(experts=cases.EXPERT_COUNTS, more=st.integers(1, 3))
def test_more_experts_than_there_are_is_refused(driven: Driven, judge: Judge, experts: int, more: int) -> None:
    logits = driven.backend.from_numpy(np.zeros((1, experts), np.float32))
    spec = SoftmaxTopK(experts + more)
    judge.error(ShapeError, lambda: driven.backend.route(logits, spec), f"k = {experts + more} of {experts}")


def routed_safely(driven: Driven, recipe: cases.GroupRecipe) -> tuple[Routing, np.ndarray, np.ndarray, SigmoidGroup]:
    """Routing, logits and the right experts of a case whose choice no rounding of scores can change."""
    logits, spec = recipe.build()
    wanted = oracles.sigmoid_group_choice(logits, spec)
    assume(float(wanted.gap.min()) > SAFE_GAP)
    return driven.route(logits, spec), logits, wanted.experts, spec


@pytest.mark.spec("RTR-023", "RTR-022", "RTR-003")
@given(recipe=cases.groups())
def test_sigmoid_keeps_the_best_groups_and_chooses_among_them(
    driven: Driven, judge: Judge, recipe: cases.GroupRecipe
) -> None:
    routing, _, wanted, _ = routed_safely(driven, recipe)
    judge.choice(routing.experts, wanted, f"{recipe}")


@pytest.mark.spec("RTR-024", "RTR-022")
@given(recipe=cases.groups())
def test_sigmoid_weights_are_scores_without_bias(driven: Driven, judge: Judge, recipe: cases.GroupRecipe) -> None:
    logits, spec = recipe.build()
    routing = driven.route(logits, spec)
    wanted = oracles.sigmoid_group_weights(logits, routing.experts, spec.scale)
    judge.bound(routing.weights, *wanted, f"weights of {recipe}")


@pytest.mark.spec("RTR-024")
@given(seed=cases.SEEDS)
def test_scores_that_all_but_vanish_share_what_epsilon_leaves(driven: Driven, judge: Judge, seed: int) -> None:
    logits = -np.random.default_rng(seed).integers(43, 60, (2, 6)).astype(np.float32)
    spec = SigmoidGroup(3, 1, 1, 2.5)
    routing = driven.route(logits, spec)
    wanted = oracles.sigmoid_group_weights(logits, routing.experts, 2.5)
    judge.bound(routing.weights, *wanted, f"scores around 1e-20, seed {seed}")


@pytest.mark.spec("RTR-021")
@given(seed=cases.SEEDS, k=st.integers(1, 6))
def test_scores_that_round_to_one_tie(driven: Driven, judge: Judge, seed: int, k: int) -> None:
    logits = np.random.default_rng(seed).integers(20, 80, (2, 6)).astype(np.float32)
    routing = driven.route(logits, SigmoidGroup(k, 1, 1, 1.0))
    judge.choice(routing.experts, np.tile(np.arange(k), (2, 1)), f"saturated scores, seed {seed}, k = {k}")


@pytest.mark.spec("RTR-021", "RTR-024")
@given(seed=cases.SEEDS, k=st.integers(1, 6))
def test_a_finite_logit_of_any_size_has_a_score(driven: Driven, judge: Judge, seed: int, k: int) -> None:
    """It is 0 or 1, which is easily missed on the way: exp overflows, or loses the rest of so large a number."""
    sizes = np.array([-3e38, -1e16, -2e9, -1e5, -200, 200, 1e5, 2e9, 1e16, 3e38], np.float32)
    logits = np.random.default_rng(seed).choice(sizes, (2, 6))
    routing = driven.route(logits, SigmoidGroup(k, 1, 1, 2.5))
    judge.choice(routing.experts, np.argsort(logits < 0, axis=1, kind="stable")[:, :k], f"logits {logits.tolist()}")
    wanted = oracles.sigmoid_group_weights(logits, routing.experts, 2.5)
    judge.bound(routing.weights, *wanted, f"weights of logits {logits.tolist()}", "RTR-024")


@pytest.mark.spec("RTR-020")
@given(recipe=cases.groups(), wrong=st.sampled_from(("groups", "kept", "k")))
def test_groups_that_cannot_be_formed_are_refused(
    driven: Driven, judge: Judge, recipe: cases.GroupRecipe, wrong: str
) -> None:
    logits, spec = recipe.build()
    given_logits = driven.backend.from_numpy(logits)
    experts = logits.shape[1]

    def call() -> Routing:
        match wrong:
            case "groups":
                impossible = SigmoidGroup(1, experts + 1, 1, 1.0)
            case "kept":
                impossible = SigmoidGroup(1, spec.num_groups, spec.num_groups + 1, 1.0)
            case _:
                too_many = spec.top_groups * experts // spec.num_groups + 1
                impossible = SigmoidGroup(too_many, spec.num_groups, spec.top_groups, 1.0)
        return driven.backend.route(given_logits, impossible)

    judge.error(ShapeError, call, f"{recipe}, {wrong} impossible")
