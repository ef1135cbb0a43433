"""Chapter 3: both router families; ids by hand where they can be seen, weights from the float64 oracle."""

# ruff: noqa: E501 (a case is a row of a table)

import math

import mlx.core as mx
import numpy as np
from oracles import sigmoid_routing, softmax_routing
from values import Json, case, error, tensor


def cases() -> list[Json]:
    return [*softmax_by_hand(), *softmax_drawn(), *sigmoid_by_hand(), *sigmoid_drawn(), *of_mlx(), *refused()]


def softmax(
    name: str,
    ids: str,
    flags: str,
    comment: str,
    logits: list[list[float]],
    k: int,
    wanted: list[list[int]] | None,
    source: str = "hand",
) -> Json:
    routings = [softmax_routing(row, k) for row in logits]
    experts = [e for e, _, _ in routings]
    if wanted is not None and experts != wanted:
        raise ValueError(f"{name}: {experts}")
    return case(
        f"router/softmax-{name}",
        ids,
        "route",
        flags,
        comment,
        source,
        {"logits": tensor(logits, "float32"), "spec": {"family": "softmax", "top_k": k}},
        expected={"experts": tensor(experts, "int64"), "weights": tensor([w for _, w, _ in routings], "float64")},
        bound={"weights": tensor([b for _, _, b in routings], "float64")},
    )


def softmax_by_hand() -> list[Json]:
    rows = [
        ("order", "RTR-003", "unsorted smallest", "Largest first.", [[1.0, 4.0, 2.0, 3.0]], 3, [[1, 3, 2]]),
        ("tie", "RTR-003", "ties-to-higher-id", "Equal logits: the lower id first.", [[1.0, 3.0, 3.0, 2.0]], 2, [[1, 2]]),
        ("boundary-tie", "RTR-003", "ties-to-higher-id", "The tie decides who is in.", [[0.0, 5.0, 1.0, 1.0]], 2, [[1, 2]]),
        ("all-equal", "RTR-003 RTR-011", "ties-to-higher-id", "Weights are 1/3.", [[0.5] * 6], 3, [[0, 1, 2]]),
        ("negative", "RTR-003", "absolute-value starts-at-zero", "All logits below 0.", [[-3.0, -1.0, -2.0]], 2, [[1, 2]]),
        ("zeros", "RTR-003", "sign-of-zero", "-0 equals 0: the lower id first.", [[-0.0, 0.0, -1.0]], 2, [[0, 1]]),
        ("k-1", "RTR-011", "division-by-sum", "One expert: weight 1.", [[0.0, 7.0, 3.0]], 1, [[1]]),
        ("k-all", "RTR-001 RTR-011", "partition-out-of-range", "k = experts.", [[0.0, 2.0, 1.0]], 3, [[1, 2, 0]]),
        ("one-expert", "RTR-001", "squeeze", "One expert, two tokens.", [[-8.0], [8.0]], 1, [[0], [0]]),
        ("tokens", "RTR-001", "flattened-tokens", "Each token chooses for itself.", [[1.0, 2.0], [2.0, 1.0]], 1, [[1], [0]]),
        ("dominant", "RTR-010", "choice-on-probabilities", "Beside 200 the others' probabilities vanish in float32.",
         [[0.0, 1.0, 200.0, 3.0, 2.0]], 3, [[2, 3, 4]]),
        ("overflow", "RTR-011", "no-max-subtraction", "exp(1000) is infinite; the weights are not.",
         [[1000.0, 999.0, 0.0]], 2, [[0, 1]]),
        ("renormalised", "RTR-011", "renormalise-skipped", "Weights of the chosen two sum to 1.",
         [[1.0, 1.0, 1.0, 1.0]], 2, [[0, 1]]),
        ("tiny-gap", "RTR-003", "bfloat16-choice", "Neighbors in float32.",
         [[1.0, float(np.nextafter(np.float32(1), np.float32(2))), 0.0]], 1, [[1]]),
        ("subnormal", "RTR-003", "flush-subnormals", "The smallest number above 0.", [[0.0, 2.0**-126, 0.0]], 1, [[1]]),
    ]  # fmt: skip
    return [softmax(*row) for row in rows]


def softmax_drawn() -> list[Json]:
    listed = []
    for seed, experts, k, tokens in ((41, 16, 4, 2), (42, 64, 8, 1)):
        rng = np.random.default_rng(seed)
        logits = (rng.integers(-32, 32, (tokens, experts)) / 8).tolist()  # multiples of 1/8: ties are common
        listed.append(
            softmax(
                f"ties-among-{experts}",
                "RTR-003 RTR-011",
                "ties-to-higher-id unsorted",
                "Logits on a coarse grid, as bfloat16 makes them.",
                logits,
                k,
                None,
                f"float64 oracle, seed {seed}",
            )
        )
    return listed


def sigmoid(
    name: str,
    ids: str,
    flags: str,
    comment: str,
    logits: list[list[float]],
    k: int,
    groups: int,
    kept: int,
    scale: float,
    bias: list[float] | None,
    wanted: list[list[int]] | None,
    source: str = "hand",
    saturated: bool = False,
) -> Json:
    """saturated: logits above 20 have the float32 score 1, which the float64 oracle must be told."""
    # ruff: noqa: E501 (a case is a row of a table)
    seen = [[math.inf if saturated and z > 20 else z for z in row] for row in logits]
    routings = [sigmoid_routing(row, k, groups, kept, scale, bias) for row in seen]
    experts = [e for e, _, _ in routings]
    if wanted is not None and experts != wanted:
        raise ValueError(f"{name}: {experts}")
    spec: Json = {"family": "sigmoid_group", "top_k": k, "num_groups": groups, "top_groups": kept, "scale": scale}
    if bias is not None:
        spec["expert_bias"] = tensor(bias, "float32")
    return case(
        f"router/sigmoid-{name}",
        ids,
        "route",
        flags,
        comment,
        source,
        {"logits": tensor(logits, "float32"), "spec": spec},
        expected={"experts": tensor(experts, "int64"), "weights": tensor([w for _, w, _ in routings], "float64")},
        bound={"weights": tensor([b for _, _, b in routings], "float64")},
    )


def sigmoid_by_hand() -> list[Json]:
    zero = [[0.0] * 8]
    rows = [
        ("plain", "RTR-021 RTR-024", "softmax-weights", "Two groups, both kept.",
         [[1.0, 0.0, -1.0, 2.0]], 2, 2, 2, 1.0, None, [[3, 0]]),
        ("scale", "RTR-024", "scale-dropped", "Weights sum to 2.5.", [[1.0, 0.0, -1.0, 2.0]], 2, 2, 2, 2.5, None, [[3, 0]]),
        ("bias-chooses", "RTR-022", "bias-ignored", "The bias turns the choice round.",
         [[2.0, 1.0, 0.0, -1.0]], 2, 1, 1, 1.0, [0.0, 0.0, 1.0, 1.0], [[2, 3]]),
        ("bias-not-in-weights", "RTR-022 RTR-024", "bias-in-weights", "Equal scores: equal weights, whatever the bias.",
         [[0.0] * 4], 2, 1, 1, 1.0, [0.0, 0.75, 0.0, 0.25], [[1, 3]]),
        ("group-dropped", "RTR-023", "groups-ignored", "The best expert is in a group that is dropped.",
         [[3.0, -6.0, 1.0, 1.0]], 2, 2, 1, 1.0, None, [[2, 3]]),
        ("two-best", "RTR-023", "group-score-by-max", "Two largest of each group: 1.26 against 1.46.",
         [[2.0, -0.5, -9.0, 1.0, 1.0, 0.5]], 2, 2, 1, 1.0, None, [[3, 4]]),
        ("third-ignored", "RTR-023", "group-score-by-sum", "Three middling experts lose to two good ones.",
         [[0.5, 0.5, 0.5, 2.0, 0.5, -9.0]], 1, 2, 1, 1.0, None, [[3]]),
        ("negative-choice", "RTR-023", "groups-masked-to-0", "All choice values are negative: 0 would win.",
         [[0.0, 0.0, -1.0, -1.0]], 2, 2, 1, 1.0, [-2.0, -2.0, -2.0, -2.0], [[0, 1]]),
        ("group-tie", "RTR-023", "ties-to-higher-group", "Equal groups: the lower ones stay.", zero, 3, 4, 2, 1.0, None,
         [[0, 1, 2]]),
        ("expert-tie", "RTR-003", "ties-to-higher-id", "Equal scores in one group.", [[1.0, 2.0, 2.0, 2.0]], 2, 1, 1, 1.0,
         None, [[1, 2]]),
        ("groups-of-one", "RTR-023", "second-of-one", "A group of one expert scores that one.",
         [[1.0, 3.0, 2.0, 0.0]], 1, 4, 2, 1.0, None, [[1]]),
        ("tiny-scores", "RTR-024", "epsilon-dropped epsilon-too-large", "Scores around e^-45: 1e-20 is a part of the sum.",
         [[-60.0, -40.0, -50.0, -45.0]], 2, 1, 1, 1.0, None, [[1, 3]]),
        ("epsilon", "RTR-024", "epsilon-dropped", "Scores near 1e-20: the weights sum to less than 1.",
         [[-46.0, -46.0, -80.0, -80.0]], 2, 1, 1, 1.0, None, [[0, 1]]),
        ("order-by-choice", "RTR-022 RTR-003", "sorted-by-weight", "Best first is by choice value, not by weight.",
         [[2.0, 1.0, -3.0, -3.0]], 2, 1, 1, 1.0, [0.0, 0.5, 0.0, 0.0], [[1, 0]]),
    ]  # fmt: skip
    listed = [sigmoid(*row) for row in rows]
    listed.append(
        sigmoid(
            "saturated",
            "RTR-021",
            "float64-scores choice-on-logits",
            "Scores of 30 and 40 are 1: a tie.",
            [[30.0, 40.0, 1.0, 0.0]],
            1,
            1,
            1,
            1.0,
            None,
            [[0]],
            saturated=True,
        )
    )
    return listed


def sigmoid_drawn() -> list[Json]:
    """Choice values on a grid of 1/64 would tie by rounding, so logits are drawn freely and ties are unlikely."""
    listed = []
    for seed, experts, k, groups, kept in ((43, 16, 4, 4, 2), (44, 128, 8, 8, 4)):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(1, experts)).astype(np.float32).tolist()
        bias = rng.normal(0, 0.2, experts).astype(np.float32).tolist()
        listed.append(
            sigmoid(
                f"of-{experts}",
                "RTR-021 RTR-022 RTR-023 RTR-024",
                "bias-in-weights groups-ignored",
                "The published shape of the family.",
                logits,
                k,
                groups,
                kept,
                2.5,
                bias,
                None,
                f"float64 oracle, seed {seed}",
            )
        )
    return listed


MLX = f"mlx {mx.__version__} cpu"


def of_mlx() -> list[Json]:
    """Both families as operations of mlx, on logits that leave no tie: what models of that library compute."""
    listed = []
    for seed, experts, k in ((91, 5, 2), (92, 60, 4), (93, 132, 4), (94, 160, 8), (95, 256, 8), (96, 257, 8)):
        logits = np.random.default_rng(seed).normal(0, 2, (2, experts)).astype(np.float32)
        weights = mx.softmax(mx.array(logits), axis=-1, precise=True)
        chosen = mx.argsort(-mx.array(logits), axis=-1)[:, :k]
        picked = mx.take_along_axis(weights, chosen, axis=-1)
        picked = picked / picked.sum(axis=-1, keepdims=True)
        spec: Json = {"family": "softmax", "top_k": k}
        listed.append(mlx_case(f"softmax-mlx-{experts}", "RTR-003 RTR-010 RTR-011", seed, logits, spec, chosen, picked))
    for seed, experts, k, groups, kept in (
        (97, 16, 2, 2, 1),
        (98, 60, 4, 4, 2),
        (99, 160, 6, 8, 3),
        (100, 192, 8, 8, 4),
        (101, 256, 8, 8, 4),
    ):
        rng = np.random.default_rng(seed)
        logits, bias = rng.normal(size=(2, experts)).astype(np.float32), rng.normal(0, 0.2, experts).astype(np.float32)
        scores = mx.sigmoid(mx.array(logits))
        choice = (scores + mx.array(bias)).reshape(2, groups, -1)
        best_two = mx.sort(choice, axis=-1)[..., -2:].sum(axis=-1)
        order = mx.argsort(mx.argsort(-best_two, axis=-1), axis=-1)
        choice = mx.where((order < kept)[..., None], choice, -mx.inf).reshape(2, experts)
        chosen = mx.argsort(-choice, axis=-1)[:, :k]
        picked = mx.take_along_axis(scores, chosen, axis=-1)
        picked = picked / (picked.sum(axis=-1, keepdims=True) + 1e-20) * 2.5
        spec = {"family": "sigmoid_group", "top_k": k, "num_groups": groups, "top_groups": kept, "scale": 2.5}
        spec["expert_bias"] = tensor(bias, "float32")
        listed.append(mlx_case(f"sigmoid-mlx-{experts}", "RTR-022 RTR-023 RTR-024", seed, logits, spec, chosen, picked))
    return listed


def mlx_case(
    name: str, ids: str, seed: int, logits: np.ndarray, spec: Json, chosen: mx.array, picked: mx.array
) -> Json:
    """The library's own float32 weights, to within what two float32 evaluations may differ by: twice the bound."""
    experts, weights = np.array(chosen).astype(np.int64), np.array(picked).astype(np.float64)
    away = np.ptp(np.take_along_axis(logits.astype(np.float64), experts, axis=1), axis=1, keepdims=True)
    bounds = 2 * (2 * experts.shape[1] + 16 + 2 * away) * 2.0**-24 * weights
    return case(
        f"router/{name}", ids, "route", "other-library", "As mlx computes it.", f"{MLX}, seed {seed}",
        {"logits": tensor(logits, "float32"), "spec": spec},
        expected={"experts": tensor(experts, "int64"), "weights": tensor(weights, "float64")},
        bound={"weights": tensor(bounds, "float64")},
    )  # fmt: skip


def refused() -> list[Json]:
    nan, infinity = math.nan, math.inf
    group = {"family": "sigmoid_group", "top_k": 1, "num_groups": 2, "top_groups": 1, "scale": 1.0}
    one = {"family": "softmax", "top_k": 1}
    rows = [
        ("nan", "RTR-002 NUM-009", [[0.0, 1.0], [0.0, nan]], one, "NonFiniteError", ["token 1", "expert 1"]),
        ("infinity", "RTR-002 NUM-009", [[0.0, infinity, 1.0]], one, "NonFiniteError", ["token 0", "expert 1"]),
        ("minus-infinity", "RTR-002", [[-infinity, 0.0]], one, "NonFiniteError", ["token 0", "expert 0"]),
        ("sigmoid-nan", "RTR-002", [[0.0, nan]], group, "NonFiniteError", ["token 0", "expert 1"]),
        ("k-too-large", "RTR-002", [[0.0, 1.0]], {**one, "top_k": 3}, "ShapeError", ["3", "2"]),
        ("k-zero", "RTR-002", [[0.0, 1.0]], {**one, "top_k": 0}, "ShapeError", ["0"]),
        ("ragged-groups", "RTR-020", [[0.0, 1.0, 2.0]], group, "ShapeError", ["3", "2"]),
        ("groups-kept", "RTR-020", [[0.0, 1.0]], {**group, "top_groups": 3}, "ShapeError", ["3", "2"]),
        ("k-of-kept", "RTR-020", [[0.0] * 4], {**group, "top_k": 3}, "ShapeError", ["3"]),
    ]
    return [
        case(f"router/refuses-{name}", ids, "route", "silent-garbage", "No meaningful choice exists.", "hand",
             {"logits": tensor(logits, "float32"), "spec": spec}, error=error(kind, *mentions))
        for name, ids, logits, spec, kind, mentions in rows
    ]  # fmt: skip
