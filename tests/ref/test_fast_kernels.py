"""The `numba` backend's kernels against the reference, and their bits against themselves."""

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge0_ref import fast_backend
from edge0_ref.arithmetic import Arithmetic
from edge0_ref.bits import narrow, widen
from edge0_ref.contract import (
    ExpertLayout,
    Lora,
    PrerouterHead,
    QuantizedMatrix,
    Routing,
    SoftmaxTopK,
)
from edge0_ref.dequant import dequantize
from edge0_ref.errors import NonFiniteError
from edge0_ref.executors.bank import Bank
from edge0_ref.fast_backend import FastArithmetic
from edge0_ref.fast_operands import MANY_ROWS, MANY_TOKENS
from tests.ref.memory_store import random_expert

U = 2.0**-24
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=max(3, settings.default.max_examples // 4))
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
FORMS = st.tuples(st.sampled_from((4, 8)), st.sampled_from((32, 64, 128)), st.sampled_from(sorted(DTYPES)))
GROUPS = st.integers(1, 3) | st.sampled_from((16, 17, 33))  # fewer than lanes; just as many, and more


@pytest.fixture(params=(1, 2), ids=("one thread", "two threads"))
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FastArithmetic:
    """With nothing too small to be shared out, and two experts at once."""
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("this machine has one thread")
    monkeypatch.setattr(fast_backend, "SMALL_WORK", 0)
    monkeypatch.setattr(fast_backend, "JOBS", 2)
    return FastArithmetic(request.param)


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def random_matrix(rng: np.random.Generator, rows: int, groups: int, form: tuple[int, int, str]) -> QuantizedMatrix:
    bits, size, dtype = form
    packed = rng.integers(0, 2**32, (rows, groups * size * bits // 32), dtype=np.uint32)
    scales, biases = (narrow(draw(rng, rows, groups), DTYPES[dtype]) for _ in range(2))
    return QuantizedMatrix(packed, scales, biases, bits, size)


def magnitude(matrix: QuantizedMatrix) -> np.ndarray:
    """|scale| * code + |bias|: what rounding errors are in proportion to."""
    scales, biases = np.abs(widen(matrix.scales)), np.abs(widen(matrix.biases))
    return dequantize(QuantizedMatrix(matrix.packed, scales, biases, matrix.bits, matrix.group_size))


def within(got: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> bool:
    assert got.dtype == np.float32
    return bool((np.abs(got.astype(np.float64) - wanted) <= bound).all())


# linear layers


@pytest.mark.spec("DEQ-010", "LOR-001")
@FEW
@given(seed=SEEDS, form=FORMS, tokens=st.integers(1, 6), rows=st.integers(1, 70), groups=GROUPS)
def test_a_linear_layer_errs_by_float32_rounding_at_most(
    arithmetic: FastArithmetic, seed: int, form: tuple[int, int, str], tokens: int, rows: int, groups: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix, cols = random_matrix(rng, rows, groups, form), groups * form[1]
    x, lora = draw(rng, tokens, cols), Lora(draw(rng, 5, cols), draw(rng, rows, 5), 0.5)
    wide, weights = x.astype(np.float64), dequantize(matrix).astype(np.float64)
    bound = (2 * cols + 8) * U * (np.abs(wide) @ magnitude(matrix).T)
    assert within(arithmetic.linear(x, matrix), wide @ weights.T, bound)
    update = wide @ lora.down.T.astype(np.float64) @ lora.up.T
    bound += (2 * cols + 32) * U * 0.5 * (np.abs(wide) @ np.abs(lora.down).T @ np.abs(lora.up).T)
    assert within(arithmetic.linear(x, matrix, lora), wide @ weights.T + 0.5 * update, bound * (1 + 1e-3))


@pytest.mark.spec("DEQ-010")
@FEW
@given(seed=SEEDS, dtype=st.sampled_from(sorted(DTYPES)), rows=st.integers(1, 70), cols=st.integers(1, 70))
def test_a_dense_layer_reads_numbers_of_every_kind(
    arithmetic: FastArithmetic, seed: int, dtype: str, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(seed)
    weight, x = narrow(draw(rng, rows, cols), DTYPES[dtype]), draw(rng, 3, cols)
    wide = widen(weight).astype(np.float64)
    assert within(arithmetic.linear(x, weight), x @ wide.T, (2 * cols + 8) * U * (np.abs(x) @ np.abs(wide).T))


def bits_of(rows: Iterator[np.ndarray]) -> bytes:
    return np.concatenate(list(rows)).tobytes()


@pytest.mark.spec("DEQ-010")
@FEW
@given(seed=SEEDS, form=FORMS, tokens=st.integers(1, 11), cut=st.integers(0, 11), groups=GROUPS)
def test_a_token_among_many_has_the_bits_it_has_alone(
    arithmetic: FastArithmetic, seed: int, form: tuple[int, int, str], tokens: int, cut: int, groups: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix, cols = random_matrix(rng, 40, groups, form), groups * form[1]
    x, lora = draw(rng, tokens, cols), Lora(draw(rng, 3, cols), draw(rng, 40, 3), 2.0)
    for weight, beside in ((matrix, None), (matrix, lora), (draw(rng, 37, cols), None)):
        together = arithmetic.linear(x, weight, beside).tobytes()
        assert together == bits_of(arithmetic.linear(part, weight, beside) for part in (x[:cut], x[cut:]) if len(part))
        assert together == bits_of(FastArithmetic(1).linear(x[t : t + 1], weight, beside) for t in range(tokens))


LAYERS = st.lists(st.tuples(st.integers(1, 70), FORMS, st.integers(0, 5)), min_size=1, max_size=4)


@pytest.mark.spec("DEQ-010", "LOR-001")
@FEW
@given(seed=SEEDS, layers=LAYERS, alike=st.booleans(), tokens=st.integers(1, 5))
def test_layers_of_one_input_have_the_bits_each_has_alone(
    arithmetic: FastArithmetic, seed: int, layers: list[tuple[int, tuple[int, int, str], int]], alike: bool, tokens: int
) -> None:
    rng, cols = np.random.default_rng(seed), 128
    given: list[tuple[QuantizedMatrix | np.ndarray, Lora | None]] = []
    for rows, form, rank in layers:
        bits, size, dtype = layers[0][1] if alike else form
        kind = DTYPES[layers[0][1][2]]
        lora = Lora(narrow(draw(rng, rank, cols), kind), narrow(draw(rng, rows, rank), kind), 1.5) if rank else None
        given.append((random_matrix(rng, rows, cols // size, (bits, size, dtype)), lora))
    if not alike:
        given.append((draw(rng, 33, cols), None))
    x = draw(rng, tokens, cols)
    together = arithmetic.product(given)(x)
    alone = [arithmetic.linear(x, weight, lora) for weight, lora in given]
    assert [y.tobytes() for y in together] == [y.tobytes() for y in alone]


@pytest.mark.spec("DEQ-010", "LOR-001")
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_rows_shared_out_for_many_tokens_have_the_bits_of_few(arithmetic: FastArithmetic, more: int) -> None:
    """Parts of fewer rows than a large task has, of just as many, and of more, each with a LoRA of its own."""
    rng, tokens = np.random.default_rng(0), MANY_TOKENS + more
    given = [
        (random_matrix(rng, rows, 2, (4, 64, "bfloat16")), Lora(draw(rng, 2, 128), draw(rng, rows, 2), 1.5))
        for rows in (MANY_ROWS - 1, MANY_ROWS, 2 * MANY_ROWS + 1)
    ]
    x, product = draw(rng, tokens, 128), arithmetic.product(given)
    few = [product(x[t : t + 5]) for t in range(0, tokens, 5)]
    assert [y.tobytes() for y in product(x)] == [bits_of(parts) for parts in zip(*few, strict=True)]


@pytest.mark.spec("LOR-001")
def test_a_lora_whose_parts_are_of_two_dtypes_is_what_its_numbers_are() -> None:
    rng = np.random.default_rng(0)
    matrix, x = random_matrix(rng, 40, 2, (4, 64, "bfloat16")), draw(rng, 2, 128)
    down, up = narrow(draw(rng, 3, 128), np.dtype(np.uint16)), narrow(draw(rng, 40, 3), np.dtype(np.float16))
    wide = FastArithmetic(1).linear(x, matrix, Lora(widen(down), widen(up), 0.5))
    assert FastArithmetic(1).linear(x, matrix, Lora(down, up, 0.5)).tobytes() == wide.tobytes()


def test_a_result_is_nobodys_scratch_memory_and_no_argument_is_written() -> None:
    rng = np.random.default_rng(0)
    arithmetic, matrix, x = FastArithmetic(1), random_matrix(rng, 40, 2, (4, 64, "bfloat16")), draw(rng, 2, 128)
    for array in (x, matrix.packed, matrix.scales, matrix.biases):
        array.flags.writeable = False
    first = arithmetic.linear(x, matrix)
    kept = first.copy()
    arithmetic.linear(-x, matrix)
    assert first.tobytes() == kept.tobytes()


# routers, heads, and functions of one number


@pytest.mark.spec("RTR-003", "RTR-011")
@FEW
@given(seed=SEEDS, tokens=st.integers(1, 4), experts=st.integers(1, 40), levels=st.integers(1, 50), data=st.data())
def test_a_softmax_router_chooses_as_the_reference_does(
    seed: int, tokens: int, experts: int, levels: int, data: st.DataObject
) -> None:
    """Few levels: many logits are equal, zeros of both signs among them."""
    rng, spec = np.random.default_rng(seed), SoftmaxTopK(data.draw(st.integers(1, experts)))
    logits = (rng.integers(-levels, levels, (tokens, experts)) * rng.choice([-1.5, 1.5])).astype(np.float32)
    got, wanted = (made.route(logits, spec) for made in (FastArithmetic(1), Arithmetic()))
    assert np.array_equal(got.experts, wanted.experts)
    assert np.allclose(got.weights, wanted.weights, rtol=2 * U, atol=0)  # float64 both, then one rounding each
    logits[-1, data.draw(st.integers(0, experts - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    for made in (FastArithmetic(1), Arithmetic()):
        with pytest.raises(NonFiniteError, match=f"token {tokens - 1}"):
            made.route(logits, spec)


@pytest.mark.spec("PRE-001")
@FEW
@given(seed=SEEDS, dtype=st.sampled_from(sorted(DTYPES)), tokens=st.integers(1, 5), width=st.integers(1, 70))
def test_a_head_says_what_the_references_says_for_each_token_alone(
    arithmetic: FastArithmetic, seed: int, dtype: str, tokens: int, width: int
) -> None:
    rng, shapes = np.random.default_rng(seed), ((width, 45), (37, width), (37, 45))
    head = PrerouterHead(*(narrow(draw(rng, *shape) * shape[1] ** -0.5, DTYPES[dtype]) for shape in shapes))
    features = draw(rng, tokens, 45)
    got, wanted = arithmetic.predict(head, features), Arithmetic().predict(head, features)
    linear, fc1, fc2 = (np.abs(widen(part).astype(np.float64)).T for part in (head.linear, head.fc1, head.fc2))
    sums, inner = np.abs(features) @ linear, np.abs(features) @ fc1  # |hidden| is at most the latter
    one, two = (2 * 45 + 8) * U, (2 * width + 8) * U  # a row's rounding; gelu makes 1.13 of it, and 8 U of its own
    assert within(got, wanted, one * sums + (two + 1.13 * one + 8 * U) * (inner @ fc2) + 4 * U * np.abs(wanted))
    assert got.tobytes() == bits_of(FastArithmetic(1).predict(head, features[t : t + 1]) for t in range(tokens))


@pytest.mark.spec("EXE-003")
def test_silu_errs_by_a_few_roundings_wherever_the_exponential_is_a_normal_number() -> None:
    """The exponential is off by 2 U, the sum, the quotient and the wanted number by U each; swiglu's product by U more.

    Where exp(-x) is beyond float32 it is infinity, and the result 0: less than x / 2^128 is left out.
    """
    arithmetic, reference = FastArithmetic(1), Arithmetic()
    x = np.concatenate([np.linspace(-87, 200, 100_001), np.geomspace(1e-30, 1, 1001)]).astype(np.float32)
    wanted = reference.silu(x)
    assert within(arithmetic.silu(x), wanted, 5 * U * np.abs(wanted))
    up = np.roll(x, 1)
    wanted = reference.swiglu(x, up)
    assert within(arithmetic.swiglu(x, up), wanted, 6 * U * np.abs(wanted))
    low = np.array([-88, -88.5, -89, -100, -1e4, -1e38, -3e38], np.float32)
    missing = np.abs(low) * 2.0**-128
    with np.errstate(over="ignore"):
        wanted, gated = reference.silu(low), reference.swiglu(low, np.ones_like(low))
    assert within(arithmetic.silu(low), wanted, missing * (low < -88.7) + 5 * U * np.abs(wanted))
    assert within(arithmetic.swiglu(low, np.ones_like(low)), gated, missing * (low < -88.7) + 6 * U * np.abs(gated))
    assert np.isnan(arithmetic.silu(np.array([np.nan], np.float32))).all()


# experts


@pytest.mark.spec("EXE-003", "EXE-002")
@FEW
@given(seed=SEEDS, bits=st.sampled_from((4, 8)), dtype=st.sampled_from(sorted(DTYPES)), tokens=st.integers(1, 9))
def test_experts_at_once_are_the_experts_one_by_one(
    arithmetic: FastArithmetic, seed: int, bits: int, dtype: Any, tokens: int
) -> None:
    rng = np.random.default_rng(seed)
    layout = ExpertLayout(hidden=64, inner=96, bits=bits, group_size=32, coefficient_dtype=dtype)
    bank = Bank(layout, np.stack([random_bytes(rng, layout) for _ in range(5)]))
    x, chosen = draw(rng, tokens, 64), np.stack([rng.permutation(5)[:3] for _ in range(tokens)])
    group = [(uses, slot) for slot, uses in Routing(chosen, np.ones(chosen.shape, np.float32)).uses().items()]
    outputs = [np.full((tokens, 3, 64), np.nan, np.float32) for _ in range(4)]
    Arithmetic().run_experts(outputs[0], x, group, bank)
    arithmetic.run_experts(outputs[1], x, group, bank)
    for one in reversed(group):
        arithmetic.run_experts(outputs[2], x, [one], bank)
    FastArithmetic(1).run_experts(outputs[3], x, iter(group), bank)
    distance = np.linalg.norm((outputs[1] - outputs[0]).ravel()) / np.linalg.norm(outputs[0].ravel())
    assert distance <= 2 * (64 + 96) * U
    assert outputs[1].tobytes() == outputs[2].tobytes() == outputs[3].tobytes()


def random_bytes(rng: np.random.Generator, layout: ExpertLayout) -> np.ndarray:
    """A slot with coefficients in the layout's own dtype."""
    slot = random_expert(rng, ExpertLayout(layout.hidden, layout.inner, layout.bits, layout.group_size, "float32"))
    codes = slot[: 3 * layout.hidden * layout.inner * layout.bits // 8]
    coefficients = narrow(slot[codes.size :].view(np.float32), layout.numpy_coefficient)
    return np.concatenate([codes, coefficients.view(np.uint8)])


# mixers


def mixer_calls(rng: np.random.Generator, tokens: int) -> list[tuple[str, Callable[[Arithmetic, slice], np.ndarray]]]:
    """Each with a state of its own that goes on from call to call; a slice says which tokens."""
    q, k, v = draw(rng, tokens, 2, 21), draw(rng, tokens, 2, 21), draw(rng, tokens, 4, 5)
    beta, decay = rng.random((tokens, 4), np.float32), rng.random((tokens, 4, 21), np.float32)
    memory, x, taps, history = draw(rng, 4, 5, 21), draw(rng, tokens, 19), draw(rng, 4, 19), draw(rng, 3, 19)
    heads, keys, values = draw(rng, tokens, 4, 21), draw(rng, tokens + 3, 2, 21), draw(rng, tokens + 3, 2, 30)
    return [
        ("delta_rule", lambda a, s: a.delta_rule(q[s] / 5, k[s] / 5, v[s], beta[s], decay[s], memory)),
        ("causal_conv", lambda a, s: a.causal_conv(x[s], taps, history)),
        ("causal_attention", lambda a, s: a.causal_attention(heads[s], keys, values, 3 + s.start, 0.3, 17)),
    ]


@pytest.mark.spec("DEC-010", "DEC-020", "DEC-021")
@FEW
@given(seed=SEEDS, cut=st.integers(1, 5))
def test_mixers_agree_with_the_reference_and_may_be_cut_anywhere(
    arithmetic: FastArithmetic, seed: int, cut: int
) -> None:
    calls = [mixer_calls(np.random.default_rng(seed), 6) for _ in range(4)]
    whole = slice(0, 6)
    for i, (name, wanted) in enumerate(calls[0]):
        reference, got = wanted(Arithmetic(), whole), calls[1][i][1](arithmetic, whole)
        assert np.linalg.norm((got - reference).ravel()) <= 64 * U * np.linalg.norm(reference.ravel()), name
        alone = calls[2][i][1](FastArithmetic(1), whole)
        parts = [calls[3][i][1](arithmetic, piece) for piece in (slice(0, cut), slice(cut, 6))]
        assert got.tobytes() == alone.tobytes() == np.concatenate(parts).tobytes(), name


@pytest.mark.spec("DEC-010")
@pytest.mark.parametrize("positions", [3000, 3001, 3002, 3003])
def test_one_tokens_heads_come_to_the_same_however_they_are_shared_out(
    arithmetic: FastArithmetic, positions: int
) -> None:
    """So many positions that two threads share four heads of one key and value."""
    rng = np.random.default_rng(positions)
    q, rows = draw(rng, 1, 4, 64), draw(rng, positions, 1, 64)
    calls = [a.causal_attention(q, rows, rows, positions - 1, 0.1, 50) for a in (arithmetic, FastArithmetic(1))]
    reference = Arithmetic().causal_attention(q, rows, rows, positions - 1, 0.1, 50)
    assert calls[0].tobytes() == calls[1].tobytes()
    assert np.linalg.norm((calls[0] - reference).ravel()) <= 64 * U * np.linalg.norm(reference.ravel())


@pytest.mark.spec("DEC-010")
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", range(6))
def test_attention_is_undefined_where_the_references_is(
    arithmetic: FastArithmetic, special: float, position: int
) -> None:
    """A score that is NaN or infinity makes its heads' outputs NaN; one of minus infinity has no weight."""
    q, keys, values = np.ones((6, 2, 16), np.float32), np.ones((6, 2, 16), np.float32), np.ones((6, 2, 16), np.float32)
    keys[position, 1, 3] = special
    got, reference = (a.causal_attention(q, keys, values, 0, 0.5, 16) for a in (arithmetic, Arithmetic()))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(reference))
    np.testing.assert_allclose(got, reference, rtol=64 * U)
