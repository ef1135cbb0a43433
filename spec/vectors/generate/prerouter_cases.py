"""Chapter 7: features by hand, heads against the float64 oracle."""

# ruff: noqa: E501 (a case is a row of a table)

from typing import Any

import numpy as np
from oracles import absolute, add, gelu_row, linear
from values import Json, case, error, tensor


def cases() -> list[Json]:
    return [*features(), *heads(), *refused()]


def features() -> list[Json]:
    none = [-1, -1]
    rows = [
        ("layout", "PRE-002 PRE-003", "previous-swapped order-of-parts", "[hidden | now | before].",
         [[0.5, -1.0]], [[2, 0]], [1, 3], 4, [[0.5, -1, 1, 0, 1, 0, 0, 1, 0, 1]]),
        ("first-token", "PRE-005", "garbage-before-first", "No token before position 0: zeros.",
         [[1.0]], [[1, 2]], none, 3, [[1, 0, 1, 1, 0, 0, 0]]),
        ("shift", "PRE-005", "off-by-one-token", "Row t carries the experts of row t - 1.",
         [[1.0], [2.0], [3.0]], [[0, 1], [1, 2], [2, 0]], none, 3,
         [[1, 1, 1, 0, 0, 0, 0], [2, 0, 1, 1, 1, 1, 0], [3, 1, 0, 1, 0, 1, 1]]),
        ("chunk", "PRE-005", "chunk-forgets-before", "The first row of a later call sees the last token of the earlier one.",
         [[3.0]], [[2, 0]], [1, 2], 3, [[3, 1, 0, 1, 0, 1, 1]]),
        ("order-of-ids", "PRE-003", "ranked-instead-of-hot", "The order of a token's experts leaves no trace.",
         [[0.0], [0.0]], [[0, 2], [2, 0]], [2, 0], 3, [[0, 1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 1]]),
        ("expert-zero", "PRE-003", "zero-means-none", "Expert 0 is an expert.", [[0.0]], [[0, 1]], [0, 1], 2, [[0, 1, 1, 1, 1]]),
        ("repeated", "PRE-003", "counts-instead-of-hot", "An expert named twice is 1, not 2.",
         [[0.0]], [[1, 1]], [0, 0], 2, [[0, 0, 1, 1, 0]]),
        ("none-is-not-last", "PRE-003 PRE-005", "negative-index", "-1 sets nothing; it is not the last expert.",
         [[0.0]], [[0, 1]], none, 3, [[0, 1, 1, 0, 0, 0, 0]]),
    ]  # fmt: skip
    return [
        case(f"prerouter/features-{name}", ids, "features", flags, comment, "hand",
             {"hidden": tensor(hidden, "float32"), "executed": tensor(executed, "int64"),
              "before": tensor(before, "int64"), "num_experts": experts},
             expected={"features": tensor(wanted, "float32")})
        for name, ids, flags, comment, hidden, executed, before, experts, wanted in rows
    ]  # fmt: skip


def head_json(head: dict[str, np.ndarray]) -> Json:
    return {name: tensor(weight, "float32") for name, weight in head.items()}


def judged(
    name: str, ids: str, flags: str, comment: str, source: str, head: dict[str, np.ndarray], rows: np.ndarray
) -> Json:
    logits, bounds = [], []
    parts: dict[str, Any] = {part: weight.tolist() for part, weight in head.items()}
    for row in rows.tolist():
        direct = linear(parts["linear"], absolute(parts["linear"]), row)
        opened = gelu_row(*linear(parts["fc1"], absolute(parts["fc1"]), row))
        value, bound = add(*direct, *linear(parts["fc2"], absolute(parts["fc2"]), *opened))
        logits.append(value)
        bounds.append(bound)
    return case(
        f"prerouter/{name}",
        ids,
        "predict",
        flags,
        comment,
        source,
        {"head": head_json(head), "features": tensor(rows, "float32")},
        expected={"logits": tensor(logits, "float64")},
        bound={"logits": tensor(bounds, "float64")},
    )


def heads() -> list[Json]:
    unit = np.float32([[1.0]])
    only_linear = {"fc1": 0 * unit, "fc2": 0 * unit, "linear": np.float32([[2.0]])}
    only_learned = {"fc1": unit, "fc2": unit, "linear": 0 * unit}
    listed = [
        judged("linear-part", "PRE-001", "linear-dropped", "fc1 and fc2 are zero: the linear part alone.", "hand",
               only_linear, np.float32([[3.0], [-1.0]])),
        judged("gelu-exact", "PRE-004", "gelu-tanh gelu-sigmoid silu relu", "gelu(z) at 13 points; the tanh form is off by 5e-4.",
               "float64 oracle", only_learned, np.linspace(-6, 6, 13, dtype=np.float32)[:, None]),
        judged("gelu-between", "PRE-001 PRE-004", "gelu-after-fc2 gelu-on-linear", "gelu stands between fc1 and fc2 only.",
               "float64 oracle", {"fc1": -2 * unit, "fc2": -3 * unit, "linear": unit}, np.float32([[1.0], [-1.5]])),
    ]  # fmt: skip
    for seed, width, hidden, experts in ((51, 4, 8, 8), (52, 8, 16, 16)):
        rng = np.random.default_rng(seed)
        size = hidden + 2 * experts
        head = {
            "fc1": rng.normal(0, 0.5, (width, size)).astype(np.float32),
            "fc2": rng.normal(0, 0.5, (experts, width)).astype(np.float32),
            "linear": rng.normal(0, 0.5, (experts, size)).astype(np.float32),
        }
        rows = np.concatenate([rng.normal(size=(2, hidden)), rng.integers(0, 2, (2, 2 * experts))], axis=1)
        listed.append(
            judged(
                f"head-of-{experts}",
                "PRE-001",
                "fc1-fc2-swapped residual-dropped",
                "A whole head.",
                f"float64 oracle, seed {seed}",
                head,
                rows.astype(np.float32),
            )
        )
    return listed


def refused() -> list[Json]:
    good = {"fc1": np.ones((2, 5)), "fc2": np.ones((3, 2)), "linear": np.ones((3, 5))}
    rows = [
        ("fc2-shape", {**good, "fc2": np.ones((3, 4))}, 5, ["fc2"]),
        ("linear-shape", {**good, "linear": np.ones((3, 6))}, 5, ["linear"]),
        ("feature-count", good, 6, ["6", "5"]),
    ]
    return [
        case(f"prerouter/refuses-{name}", "PRE-001", "predict", "unchecked-shapes", "Shapes that are no head.", "hand",
             {"head": head_json(head), "features": tensor(np.ones((1, features)), "float32")},
             error=error("ShapeError", *mentions))
        for name, head, features, mentions in rows
    ]  # fmt: skip
