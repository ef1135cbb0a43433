"""Chapter 11: the protocol itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import cases
from conformance.compare import Judge
from conformance.driven import Driven
from conformance.paths import every_executor
from conformance.profiles import PROFILES, activations_of
from conformance.recording_store import RecordingStore
from edge0_ref.contract import EXECUTOR_KINDS, Array, ExecutorKind, ExpertLayout, Routing, SoftmaxTopK

CLAIMS = {"dequant", "quantize", "linear", "lora", "router", "prerouter", "decoder", "bits", "mixer:kda", "mixer:mla"}
CLAIMS |= {f"executor:{kind}" for kind in EXECUTOR_KINDS} | {"program", "train"}
MEMBERS = {"dequant": "dequantize", "quantize": "quantize", "linear": "linear", "lora": "linear", "router": "route"}
MEMBERS |= {"prerouter": "predict", "decoder": "decoder", "train": "trainer"}
MEMBERS |= {f"executor:{kind}": "executor" for kind in EXECUTOR_KINDS}


@pytest.mark.spec("BCK-001")
def test_claims_are_known_and_each_has_its_method(driven: Driven, judge: Judge) -> None:
    backend = driven.backend
    judge.state(set(backend.claims) - CLAIMS, set(), "claims that the spec does not list")
    judge.holds(isinstance(backend.name, str) and backend.name != "", "name", backend.name, "a word")
    wanted = {"from_numpy", "to_numpy"} | {MEMBERS[claim] for claim in backend.claims if claim in MEMBERS}
    missing = {name for name in wanted if not callable(getattr(backend, name, None))}
    judge.state(missing, set(), "methods missing")


@pytest.mark.spec("BCK-012")
def test_activations_are_kept_in_a_dtype_of_the_spec(driven: Driven, judge: Judge) -> None:
    told = activations_of(driven.backend)
    judge.holds(told in PROFILES, "activations", told, f"one of {', '.join(PROFILES)}")
    judge.holds(
        told == "float32" or "bits" not in driven.backend.claims, "activations beside the claim bits", told, "float32"
    )


@pytest.mark.spec("BCK-007")
@given(rows=st.integers(1, 3), cols=st.integers(1, 40), character=cases.DENSE_CHARACTERS, seed=cases.SEEDS)
def test_values_survive_the_way_in_and_out(
    driven: Driven, judge: Judge, rows: int, cols: int, character: str, seed: int
) -> None:
    array = cases.DenseRecipe(rows, cols, "float32", character, seed).build()
    back = driven.backend.to_numpy(driven.backend.from_numpy(array))
    judge.bits(np.asarray(back), array, f"{rows} x {cols}, {character}, seed {seed}")


@pytest.mark.claim("linear", "dequant", "router")
@pytest.mark.spec("BCK-009")
@given(recipe=cases.matrices(), tokens=cases.TOKENS)
def test_arguments_stay_as_they_were(driven: Driven, judge: Judge, recipe: cases.MatrixRecipe, tokens: int) -> None:
    matrix, x = recipe.build(), cases.DenseRecipe(tokens, recipe.cols, seed=recipe.seed).build()
    driven.dequantize(matrix)  # each of these compares its arguments before and after
    driven.linear(x, matrix)
    routing = driven.route(x, SoftmaxTopK(1))
    judge.state(routing.tokens, tokens, f"tokens routed, {recipe}")


class NarrowStore:
    """A store that has what the contract names and nothing else."""

    __slots__ = ("_inner",)

    def __init__(self, inner: RecordingStore) -> None:
        self._inner = inner

    @property
    def num_experts(self) -> int:
        return self._inner.num_experts

    @property
    def layout(self) -> ExpertLayout:
        return self._inner.layout

    def read_into(self, expert: int, slot: Array) -> None:
        if slot.dtype != np.uint8 or slot.shape != (self.layout.nbytes,):
            raise TypeError(f"a slot of {slot.dtype} {slot.shape}, wanted uint8 [{self.layout.nbytes}]")
        if not 0 <= expert < self.num_experts:
            raise IndexError(f"expert {expert} of {self.num_experts}")
        self._inner.read_into(expert, slot)


@every_executor
@pytest.mark.spec("BCK-005")
def test_a_store_needs_no_more_than_the_contract_names(driven: Driven, judge: Judge, kind: ExecutorKind) -> None:
    inner = RecordingStore(cases.ExpertsRecipe(3, seed=1))
    executor = driven.executor(kind, NarrowStore(inner), 2)
    routing = Routing(np.array([[2, 0]], np.int64), np.full((1, 2), 0.5, np.float32))
    executor.prepare([1])
    executor(cases.DenseRecipe(1, 32).build(), routing)
    driven.close()
    judge.holds({0, 2} <= set(inner.reads), "experts read", inner.reads, "0 and 2")
