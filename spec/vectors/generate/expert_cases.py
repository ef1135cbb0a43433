"""Chapter 4: whole executor calls over small experts, against the float64 oracle."""

# ruff: noqa: E501 (a case is a row of a table)

import math

import numpy as np
from dequant_cases import random_matrix
from oracles import UNIT, linear, swiglu_row
from values import Json, Matrix, case, tensor

NAMES = ("gate", "up", "down")


def draw_experts(seed: int, count: int, bits: int, dtype: str) -> list[dict[str, Matrix]]:
    return [
        {name: random_matrix(seed + 10 * e + j, bits, 32, dtype, rows=32, cols=32) for j, name in enumerate(NAMES)}
        for e in range(count)
    ]


INT4, INT8 = draw_experts(500, 4, 4, "float32"), draw_experts(600, 2, 8, "bfloat16")
SHARED = {
    name: [{part: matrix.json() for part, matrix in expert.items()} for expert in experts]
    for name, experts in (("int4", INT4), ("int8", INT8))
}


def expert_output(expert: dict[str, Matrix], x: list[float]) -> tuple[list[float], list[float]]:
    weights = {name: (matrix.unfused(), matrix.magnitude()) for name, matrix in expert.items()}
    gate, up = linear(*weights["gate"], x), linear(*weights["up"], x)
    return linear(*weights["down"], *swiglu_row(*gate, *up))


def output(
    experts: list[dict[str, Matrix]], x: list[float], ids: list[int], weights: list[float]
) -> tuple[list[float], list[float]]:
    results = [expert_output(experts[e], x) for e in ids]
    value = [math.fsum(w * y[i] for w, (y, _) in zip(weights, results, strict=True)) for i in range(len(x))]
    bound = [
        sum(abs(w) * (b[i] + (2 * len(ids) + 8) * UNIT * abs(y[i])) for w, (y, b) in zip(weights, results, strict=True))
        for i in range(len(x))
    ]
    return value, bound


def cases() -> list[Json]:
    return [*calls(), *sequences()]


def sequences() -> list[Json]:
    """Lives of executors whose slots change hands: what a call computes after hints, evictions and new turns."""
    hints: dict[str, list[Json]] = {
        "sticky": [{"hint": [1, 2]}, call_of([1, 2]), {"hint": [2, 3]}, call_of([3, 2]), call_of([2, 1])],
        "given-away": [call_of([0]), call_of([1]), call_of([2]), call_of([0]), call_of([3]), call_of([1])],
        "wrong-hint": [{"hint": [0, 1]}, call_of([2, 3]), {"hint": [3]}, call_of([0, 1])],
        "new-turn": [{"hint": [3, 1]}, {"release": True}, call_of([0, 2]), call_of([3, 1])],
        "shared": [call_of([0, 1], [1, 2]), {"hint": [2]}, call_of([2, 0], [0, 2]), call_of([1, 3])],
        "hint-then-another": [{"hint": [0]}, {"hint": [1]}, call_of([0]), {"hint": [2]}, call_of([1]), call_of([2])],
    }
    listed = []
    for number, (name, events) in enumerate(hints.items()):
        kind, slots = ("staged", "hot")[number % 2], (2, 1, 3)[number % 3]
        seed, values, bounds, told = 760 + number, [], [], []
        rng = np.random.default_rng(seed)
        for event in events:
            if "rows" not in event:
                told.append(event)
                continue
            rows = event["rows"]
            x = rng.normal(size=(len(rows), 32)).astype(np.float32)
            weights = [[0.75, 0.25][: len(row)] for row in rows]
            results = [output(INT4, *row) for row in zip(x.tolist(), rows, weights, strict=True)]
            values += [y for y, _ in results]
            bounds += [b for _, b in results]
            routing = {"experts": tensor(rows, "int64"), "weights": tensor(weights, "float32")}
            told.append({"x": tensor(x, "float32"), "routing": routing})
        inputs: Json = {"kind": kind, "slots": slots, "experts": {"ref": "int4"}, "events": told}
        listed.append(
            case(
                f"experts/sequence-{name}", "EXE-010 EXE-014 EXE-020", "sequence", "stale-slot one-step-late",
                f"What a slot holds is what its expert computes, {slots} slots.", f"float64 oracle, seed {seed}", inputs,
                expected={"y": tensor(values, "float64")}, bound={"y": tensor(bounds, "float64")},
            )
        )  # fmt: skip
    return listed


def call_of(*rows: list[int]) -> Json:
    return {"rows": list(rows)}


def calls() -> list[Json]:
    rows = [
        ("one", "int4", [[2]], [[1.0]], 2, "EXE-003", "gate-up-swapped nibble-order", "One token, one expert."),
        ("two", "int4", [[1, 3]], [[0.75, 0.25]], 4, "EXE-004", "weights-swapped rank-ignored", "A weighted sum."),
        ("unsorted", "int4", [[3, 0]], [[0.875, 0.125]], 4, "EXE-004 EXE-002", "sorted-without-weights", "Ids fall."),
        ("tokens", "int4", [[0, 1], [1, 2], [0, 3]], [[0.5, 0.5], [0.75, 0.25], [0.625, 0.375]], 8, "EXE-002 EXE-004",
         "token-order rank-ignored", "Experts shared by tokens, at different ranks."),
        ("all", "int4", [[2, 0, 3, 1]], [[0.5, 0.25, 0.125, 0.125]], 8, "EXE-004 EXE-014", "truncated-k", "k = experts."),
        ("few-slots", "int4", [[2, 0, 3, 1]], [[0.5, 0.25, 0.125, 0.125]], 1, "EXE-014",
         "drop-instead-of-read overwritten-in-use", "Four experts through one slot."),
        ("twice", "int4", [[1, 1]], [[0.5, 0.25]], 2, "EXE-005", "experts-as-set", "An expert named twice counts twice."),
        ("zero-weight", "int4", [[1, 2]], [[0.0, 1.0]], 2, "EXE-005", "weights-renormalised", "Weights are used as given."),
        ("sum-above-one", "int4", [[0, 2]], [[2.0, 0.5]], 2, "EXE-004", "weights-renormalised", "They need not sum to 1."),
        ("int8", "int8", [[0, 1], [1, 0]], [[0.75, 0.25], [0.5, 0.5]], 4, "EXE-003 EXE-004",
         "byte-order bfloat16-as-float16", "8-bit experts with bfloat16 coefficients."),
    ]  # fmt: skip
    listed = []
    for number, (name, kind, ids, weights, slots, requirements, flags, comment) in enumerate(rows):
        seed = 700 + number
        x = np.random.default_rng(seed).normal(size=(len(ids), 32)).astype(np.float32)
        experts = INT4 if kind == "int4" else INT8
        results = [output(experts, *row) for row in zip(x.tolist(), ids, weights, strict=True)]
        routing = {"experts": tensor(ids, "int64"), "weights": tensor(weights, "float32")}
        listed.append(
            case(
                f"experts/{name}",
                requirements,
                "executor",
                flags,
                comment,
                f"float64 oracle, seed {seed}",
                {"experts": {"ref": kind}, "x": tensor(x, "float32"), "routing": routing, "slots": slots},
                expected={"y": tensor([y for y, _ in results], "float64")},
                bound={"y": tensor([b for _, b in results], "float64")},
            )
        )
    return listed
