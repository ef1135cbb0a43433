"""Awkward shapes on purpose, over all chapters: each of them has returned wrong values in somebody's kernels.

Counts that no tile divides, one row and 32,771, views that are not whole arrays, gathers in order and out of it.
"""

from collections.abc import Callable

import numpy as np
import pytest

from conformance import cases, oracles
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import every_executor
from conformance.recording_store import RecordingStore
from edge0_ref.contract import ExecutorKind, QuantizedMatrix, Routing, SigmoidGroup, SoftmaxTopK
from edge0_ref.errors import ShapeError

every_count = pytest.mark.parametrize("experts", cases.AWKWARD_COUNTS)
MANY = 32_771  # a prime beyond 2**15


@pytest.mark.claim("router")
@every_count
@pytest.mark.spec("RTR-003", "RTR-010", "RTR-011")
@pytest.mark.parametrize("character", ["ties", "all equal", "dominant", "neighbours"])
def test_softmax_chooses_among_any_number_of_experts(
    driven: Driven, judge: Judge, experts: int, character: str
) -> None:
    logits = cases.LogitsRecipe(3, experts, character, experts).build()
    for k in sorted({1, min(8, experts), experts}):
        routing = driven.route(logits, SoftmaxTopK(k))
        judge.choice(routing.experts, oracles.largest(logits, k), f"{k} of {experts}, {character}", "RTR-003")
        wanted = oracles.softmax_weights(logits, routing.experts)
        judge.bound(routing.weights, *wanted, f"weights of {k} of {experts}, {character}", "RTR-011")


@pytest.mark.claim("router")
@every_count
@pytest.mark.spec("RTR-023", "RTR-024", "RTR-003")
def test_sigmoid_chooses_among_any_number_of_experts(driven: Driven, judge: Judge, experts: int) -> None:
    for groups in sorted({n for n in (1, 4, 8, experts) if experts % n == 0}):
        for kept in sorted({1, groups}):
            size = kept * (experts // groups)
            for k in sorted({1, size}):
                recipe = cases.GroupRecipe(2, groups, experts // groups, kept, k, "negative", 2.5, experts)
                logits, spec = recipe.build()
                routing = driven.route(logits, spec)
                judge.choice(
                    routing.experts, oracles.sigmoid_group_choice(logits, spec).experts, f"{recipe}", "RTR-023"
                )
                weights = oracles.sigmoid_group_weights(logits, routing.experts, spec.scale)
                judge.bound(routing.weights, *weights, f"weights of {recipe}", "RTR-024")


@pytest.mark.claim("router")
@pytest.mark.spec("RTR-001", "RTR-003")
@pytest.mark.parametrize("tokens", [1, 2049, MANY])
def test_any_number_of_tokens_is_routed(driven: Driven, judge: Judge, tokens: int) -> None:
    logits = np.tile(cases.LogitsRecipe(1, 8, "ties", tokens).build(), (tokens, 1))
    logits[-1] = np.arange(8)
    wanted = np.concatenate([np.repeat(oracles.largest(logits[:1], 2), tokens - 1, axis=0), [[7, 6]]])
    judge.choice(
        driven.route(logits, SoftmaxTopK(2)).experts, wanted, f"{tokens} tokens, the last one unlike the others"
    )
    judge.choice(
        driven.route(logits, SigmoidGroup(2, 1, 1, 1.0)).experts, wanted, f"{tokens} tokens, the sigmoid family"
    )


@pytest.mark.claim("prerouter")
@every_count
@pytest.mark.spec("PRE-001")
def test_a_head_predicts_for_any_number_of_experts(driven: Driven, judge: Judge, experts: int) -> None:
    features = cases.DenseRecipe(2, 7 + 2 * experts, seed=experts).build()
    head = cases.head_of(experts, 7 + 2 * experts, 5, experts)
    judge.bound(
        driven.predict(head, features), *oracles.head_logits(head, features, judge.profile), f"{experts} experts"
    )


@pytest.mark.spec("DEQ-002", "DEQ-006", "DEQ-010")
@pytest.mark.claim("dequant", "linear")
@pytest.mark.parametrize("rows", [1, 7, 9, 63, 65, 100, MANY])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_need_not_fill_a_tile(driven: Driven, judge: Judge, rows: int, bits: int) -> None:
    recipe = cases.MatrixRecipe(rows, 64, bits, 32, "bfloat16", "mixed", rows)
    matrix, x = recipe.build(), cases.DenseRecipe(2, 64, seed=rows).build()
    judge.either(driven.dequantize(matrix), oracles.dequantized(matrix), f"{recipe}", "DEQ-002")
    judge.bound(
        driven.linear(x, matrix), *oracles.linear(x, matrix, None, judge.profile), f"W x of {recipe}", "DEQ-010"
    )


@pytest.mark.claim("linear")
@pytest.mark.spec("DEQ-010", "NUM-005")
@pytest.mark.parametrize("tokens", [1, 2, 33, 2049])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 7), (65, 33), (9, 1000)])
def test_plain_weights_have_any_shape(driven: Driven, judge: Judge, tokens: int, rows: int, cols: int) -> None:
    weight, x = (cases.DenseRecipe(n, cols, "float32", "plain", n).build() for n in (rows, tokens))
    wanted = oracles.linear(x, weight, None, judge.profile)
    judge.bound(driven.linear(x, weight), *wanted, f"[{rows}, {cols}] on {tokens} tokens")


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows from the middle": lambda array: array[1:6],
    "every second row": lambda array: array[::2],
    "rows backwards": lambda array: array[::-1],
    "columns first in memory": np.asfortranarray,
    "one row": lambda array: array[4:5],
}


@pytest.mark.claim("dequant", "linear")
@pytest.mark.spec("DEQ-003", "DEQ-006", "DEQ-010")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_matrix_may_be_a_view_of_a_larger_one(driven: Driven, judge: Judge, view: str, bits: int) -> None:
    whole = cases.MatrixRecipe(9, 128, bits, 64, "float16", "mixed", bits).build()
    parts = [VIEWS[view](part) for part in (whole.packed, whole.scales, whole.biases)]
    matrix = QuantizedMatrix(*parts, bits, 64)
    x = VIEWS[view](cases.DenseRecipe(9, 128, seed=3).build())
    judge.either(driven.dequantize(matrix), oracles.dequantized(matrix), f"{view}, {bits} bits", "DEQ-003")
    wanted = oracles.linear(x, matrix, None, judge.profile)
    judge.bound(driven.linear(x, matrix), *wanted, f"{view} of weights and of activations", "DEQ-010")


@pytest.mark.claim("linear")
@pytest.mark.spec("DEQ-010")
def test_activations_may_be_every_second_column(driven: Driven, judge: Judge) -> None:
    matrix = cases.MatrixRecipe(5, 64, seed=8).build()
    x = cases.DenseRecipe(3, 128, seed=9).build()[:, ::2]
    judge.bound(driven.linear(x, matrix), *oracles.linear(x, matrix, None, judge.profile), "every second column")


@pytest.mark.claim("quantize")
@pytest.mark.spec("DEQ-024")
@pytest.mark.parametrize(
    ("cols", "group_size"), [(1, 32), (31, 32), (33, 32), (96, 64), (65, 64), (192, 128), (129, 128)]
)
def test_a_ragged_last_group_is_refused(driven: Driven, judge: Judge, cols: int, group_size: int) -> None:
    weights = np.ones((2, cols), np.float32)
    judge.error(ShapeError, lambda: driven.backend.quantize(weights, 4, group_size), f"{cols} columns", str(group_size))


def gather_case(tokens: int, experts: int, k: int) -> tuple[RecordingStore, np.ndarray, Routing]:
    store = RecordingStore(cases.ExpertsRecipe(experts, coefficient="bfloat16", seed=experts))
    routing = cases.RoutingRecipe(tokens, experts, k, "random", tokens).build()
    return store, cases.DenseRecipe(tokens, 32, seed=k).build(), routing


@every_executor
@pytest.mark.spec("EXE-002")
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 257, 257), (3, 132, 1), (2049, 5, 2), (4099, 8, 8)])
def test_gathers_in_order_and_out_of_it_give_the_same(
    driven: Driven, judge: Judge, kind: ExecutorKind, tokens: int, experts: int, k: int
) -> None:
    """4,099 tokens of 8 experts are 32,792 rows."""
    store, x, routing = gather_case(tokens, experts, k)
    by_expert = np.argsort(routing.experts[:, 0], kind="stable")
    within = np.argsort(routing.experts, axis=1)
    ordered = Routing(np.sort(routing.experts, axis=1), np.take_along_axis(routing.weights, within, axis=1))
    in_order = Routing(ordered.experts[by_expert], ordered.weights[by_expert])
    wanted = oracles.experts_output(x, routing, store.experts, judge.profile)
    every = np.arange(tokens)
    for name, order, routed in (("drawn", every, routing), ("sorted", by_expert, in_order)):
        executor = driven.executor(kind, store, min(experts, 8))
        what = f"{name}: {tokens} tokens, {k} of {experts} experts"
        judge.bound(executor(x[order], routed), wanted.value[order], wanted.bound[order], what)
        driven.close()
