"""When graphs run: once a token where routing is predicted, and never behind the back of what counts them."""

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edge0_mlx import kernels
from edge0_mlx.backend import MlxBackend
from edge0_mlx.device import ActivationName
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Plan
from tests.mlx.conftest import RECIPE, Opened


class Waits:
    """asked: evaluations, whoever asked for them; implied: arrays brought to the host without having been evaluated."""

    def __init__(self) -> None:
        self.asked, self.implied = 0, list[mx.array]()
        self.evaluated = list[mx.array]()  # kept alive, so that an id means one array

    def note(self, value: Any) -> None:
        if isinstance(value, mx.array) and not any(value is known for known in self.evaluated):
            self.implied.append(value)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits, evaluate, to_host = Waits(), mx.eval, np.array

    def evaluated(*trees: Any) -> None:
        waits.asked += 1
        waits.evaluated = [leaf for _, leaf in tree_flatten(trees) if isinstance(leaf, mx.array)]
        evaluate(*trees)

    def brought(value: Any, *arguments: Any, **named: Any) -> Any:
        waits.note(value)
        return to_host(value, *arguments, **named)

    def watched(original: Any) -> Any:
        return lambda array, *arguments: (waits.note(array), original(array, *arguments))[1]

    monkeypatch.setattr(mx, "eval", evaluated)
    monkeypatch.setattr(np, "array", brought)
    for name in ("item", "tolist"):
        monkeypatch.setattr(mx.array, name, watched(getattr(mx.array, name)))
    return waits


@pytest.mark.spec("BCK-001", "PRE-021", "PRE-023")
@pytest.mark.parametrize("owners", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_token_is_evaluated_once_and_once_more_for_each_layer_nobody_predicts_for(
    opened: Opened, small: Checkpoint, adapters: Adapters, waits: Waits, owners: tuple[int, ...]
) -> None:
    some = Adapters({owner: adapters.heads[owner] for owner in owners}, adapters.loras, adapters.top_k)
    decoder = opened(small, Plan(top_k=2, slots=4), some)
    decoder.prefill([1, 2, 3])
    before, asked = decoder.counters.evaluations, waits.asked
    waits.implied.clear()
    for token in range(10):
        decoder.step(token)
    per_token = 1 + RECIPE.layers - len(owners)
    assert decoder.counters.evaluations - before == 10 * per_token
    assert waits.asked - asked == 10 * per_token
    assert not waits.implied


@pytest.mark.spec("BCK-001")
@pytest.mark.usefixtures("unchecked")
def test_functions_of_a_token_are_traced_once_whatever_the_position(
    opened: Opened, small: Checkpoint, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = list[str]()

    def noted(name: str) -> None:
        original = getattr(kernels, name)

        def kernel(*arguments: Any) -> Any:
            traces.append(name)
            return original(*arguments)

        monkeypatch.setattr(kernels, name, kernel)

    for name in ("delta_rule", "rms_norm", "causal_conv"):
        noted(name)
    decoder = opened(small, Plan(top_k=2, slots=4, context=2100), adapters)
    decoder.prefill([1, 2, 3])
    for token in range(3):
        decoder.step(token)
    traces.clear()
    for token in range(2000):
        decoder.step(token % 90)
    assert not traces


FUSED = 28  # inputs and outputs: a Metal kernel has 31 places, of which MLX takes three for shape, strides and axes


@pytest.mark.spec("BCK-001")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_mlx_fuses_of_a_token_fits_into_a_kernel_of_a_gpu(
    small: Checkpoint, adapters: Adapters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: ActivationName
) -> None:
    graphs, evaluate = list[str](), mx.eval

    def drawn(*trees: Any) -> None:
        arrays = [leaf for _, leaf in tree_flatten(trees) if isinstance(leaf, mx.array)]
        mx.export_to_dot(str(tmp_path / "graph"), *arrays)
        graphs.append((tmp_path / "graph").read_text())
        evaluate(*trees)

    decoder = MlxBackend(dtype).decoder(small, Plan(top_k=2, slots=4), adapters)
    decoder.prefill([1, 2, 3])
    monkeypatch.setattr(mx, "eval", drawn)
    decoder.step(4)
    decoder.close()
    sizes = []
    for graph in graphs:
        fused = set(re.findall(r'(\d+) \[label ="Compiled', graph))
        ends = [end for edge in re.findall(r"(\S+) -> (\S+)", graph) for end in edge]
        sizes += [ends.count(kernel) for kernel in fused]
    assert 2 <= min(sizes) <= max(sizes) <= FUSED


@pytest.mark.spec("DEC-048")
def test_observing_changes_no_bit(opened: Opened, small: Checkpoint, adapters: Adapters) -> None:
    seen = list[str]()
    plan = Plan(top_k=2, slots=4)
    decoders = opened(small, plan, adapters), opened(small, plan, adapters, lambda point, *_: seen.append(point))
    for call in [lambda d: d.prefill([1, 2, 3])] + [lambda d, t=t: d.step(t) for t in range(5)]:
        alone, watched = (np.array(call(decoder)) for decoder in decoders)
        np.testing.assert_array_equal(alone, watched)
    assert seen
