"""Mutants of chapter 11: the protocol."""

from typing import Any

import numpy as np
import pytest

from edge0_ref import backend
from edge0_ref.backend import OwningExecutor, ReferenceBackend
from edge0_ref.contract import QuantizedMatrix, Routing
from edge0_ref.decoder import ReferenceDecoder


def a_claim_nobody_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceBackend, "claims", ReferenceBackend.claims | {"executor:psychic"})


def values_pass_through_float16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceBackend, "from_numpy", lambda self, array: array.astype(np.float16).astype(np.float32))


def an_argument_scribbled_over(patch: pytest.MonkeyPatch) -> None:
    original = backend.dequantize

    def dequantize(matrix: QuantizedMatrix) -> Any:
        weights = original(matrix)
        matrix.packed[:] = 0
        return weights

    patch.setattr(backend, "dequantize", dequantize)


def results_in_float64(patch: pytest.MonkeyPatch) -> None:
    original = backend.linear
    patch.setattr(backend, "linear", lambda *arguments: original(*arguments).astype(np.float64))


def a_second_close_that_fails(patch: pytest.MonkeyPatch) -> None:
    original = OwningExecutor.close

    def close(executor: OwningExecutor) -> None:
        original(executor)
        del executor._inner

    patch.setattr(OwningExecutor, "close", close)


def a_second_close_of_a_decoder_that_fails(patch: pytest.MonkeyPatch) -> None:
    original = ReferenceDecoder.close

    def close(decoder: ReferenceDecoder) -> None:
        original(decoder)
        del decoder._prefetcher

    patch.setattr(ReferenceDecoder, "close", close)


def a_store_asked_for_more_than_it_has(patch: pytest.MonkeyPatch) -> None:
    original = OwningExecutor.__call__

    def call(executor: OwningExecutor, x: Any, routing: Routing) -> Any:
        vars(executor._inner)["_store"].reads.copy()
        return original(executor, x, routing)

    patch.setattr(OwningExecutor, "__call__", call)


def an_error_of_another_tree(patch: pytest.MonkeyPatch) -> None:
    original = OwningExecutor.__call__

    def call(executor: OwningExecutor, x: Any, routing: Routing) -> Any:
        try:
            return original(executor, x, routing)
        except OSError as error:
            raise RuntimeError(str(error)) from None

    patch.setattr(OwningExecutor, "__call__", call)


def an_observe_point_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceDecoder, "_choose", lambda self, moe, x: moe.route(moe.router_logits(x)))


def activations_of_no_known_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReferenceBackend, "activations", "int8", raising=False)


def activations_narrower_than_they_are_said_to_be(patch: pytest.MonkeyPatch) -> None:
    original = backend.linear

    def linear(x: np.ndarray, weight: Any, *rest: Any) -> np.ndarray:
        kept = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFF80000)).view(np.float32)  # 5 bits of fraction
        return original(kept, weight, *rest)

    patch.setattr(ReferenceBackend, "activations", "bfloat16", raising=False)
    patch.setattr(ReferenceBackend, "claims", ReferenceBackend.claims - {"bits"})
    patch.setattr(backend, "linear", linear)


MUTANTS = {
    activations_of_no_known_dtype: "BCK-012",
    activations_narrower_than_they_are_said_to_be: "NUM-011",
    a_claim_nobody_knows: "BCK-001",
    values_pass_through_float16: "BCK-007",
    an_argument_scribbled_over: "BCK-009",
    results_in_float64: "NUM-008",
    a_second_close_that_fails: "BCK-010",
    a_second_close_of_a_decoder_that_fails: "BCK-010",
    a_store_asked_for_more_than_it_has: "BCK-005",
    an_error_of_another_tree: "BCK-004",
    an_observe_point_left_out: "BCK-006",
}
