"""What the suite throws at a backend: recipes that Hypothesis draws and shrinks, and that print as their own replay.

A recipe is a few small settings and a seed; `build` makes the arrays. Awkward values are drawn on purpose: ties,
negative and zero scales, subnormals, -0.0, one token, k equal to the number of experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from edge0_ref.contract import (
    Expert,
    ExpertLayout,
    Lora,
    PrerouterHead,
    QuantizedMatrix,
    Routing,
    SigmoidGroup,
)

SEEDS = st.integers(0, 2**32 - 1)
GROUPS = st.sampled_from((32, 64, 128))
COEFFICIENTS = st.sampled_from(("float32", "float16", "bfloat16"))
CHARACTERS = st.sampled_from(("plain", "plain", "negative", "mixed", "tiny", "zero", "cancelling", "extreme codes"))
AWKWARD_COUNTS = (1, 2, 3, 5, 60, 132, 160, 192, 256, 257)  # of experts: small, published, and just beyond
EXPERT_COUNTS = st.sampled_from((*AWKWARD_COUNTS, 8))


def narrowed(values: np.ndarray, coefficient: str) -> np.ndarray:
    """Coefficients of a dtype; bfloat16 by cutting float32 in half, which is a bfloat16 whatever the rounding."""
    if coefficient == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(coefficient)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, cols] as words: each is a number in base 2**bits, its last digit first."""
    digits = codes.astype(np.uint64).reshape(codes.shape[0], -1, 32 // bits)
    powers = np.array([2 ** (bits * digit) for digit in range(32 // bits)], np.uint64)
    return (digits * powers).sum(axis=-1).astype(np.uint32)


@dataclass(frozen=True)
class MatrixRecipe:
    """A quantised matrix. scale: about the size of its weights."""

    rows: int
    cols: int
    bits: int = 4
    group_size: int = 32
    coefficient: str = "float32"
    character: str = "plain"
    seed: int = 0
    scale: float = 1.0

    def build(self) -> QuantizedMatrix:
        random = np.random.default_rng(self.seed)
        top = 2**self.bits - 1
        codes = random.integers(0, top + 1, (self.rows, self.cols))
        shape = (self.rows, self.cols // self.group_size)
        scales = random.uniform(0.5, 1.5, shape) * self.scale / top * 2
        biases = -scales * top / 2 * random.uniform(0.8, 1.2, shape)
        match self.character:
            case "negative":
                scales, biases = -scales, -biases
            case "mixed":
                signs = random.choice([-1.0, 1.0], shape)
                scales, biases = scales * signs, biases * signs
            case "tiny":  # float32 and bfloat16 products are subnormal
                scales, biases = scales * 1e-39, biases * 1e-39
            case "zero":
                scales, biases = scales * random.integers(0, 2, shape), np.copysign(biases * 0, -1)
            case "cancelling":  # some weights are much smaller than the two numbers they are the sum of
                biases = -scales * random.integers(0, top + 1, shape)
            case "extreme codes":
                codes = random.choice([0, 1, top - 1, top], codes.shape)
        scales, biases = (narrowed(values, self.coefficient) for values in (scales, biases))
        return QuantizedMatrix(packed(codes, self.bits), scales, biases, self.bits, self.group_size)


@st.composite
def matrices(draw: Any, max_rows: int = 9) -> MatrixRecipe:
    group_size = draw(GROUPS)
    return MatrixRecipe(
        rows=draw(st.integers(1, max_rows)),
        cols=group_size * draw(st.integers(1, 3)),
        bits=draw(st.sampled_from((4, 8))),
        group_size=group_size,
        coefficient=draw(COEFFICIENTS),
        character=draw(CHARACTERS),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class DenseRecipe:
    """A float array [rows, cols]. "wide": magnitudes from 2**-30 to 2**30, where the order of a sum shows."""

    rows: int
    cols: int
    dtype: str = "float32"
    character: str = "plain"
    seed: int = 0

    def build(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        values = random.standard_normal((self.rows, self.cols))
        match self.character:
            case "zeros":
                values = np.copysign(np.zeros_like(values), values)
            case "tiny":
                values = values * 1e-38
            case "wide":
                values = values * 2.0 ** random.integers(-12, 13, values.shape)
            case "equal":
                values = np.full_like(values, values.flat[0])
            case "integers":
                values = random.integers(-8, 8, values.shape).astype(float)
        return narrowed(values, self.dtype)


DENSE_CHARACTERS = st.sampled_from(("plain", "plain", "zeros", "tiny", "wide", "equal", "integers"))


def activations(rows: st.SearchStrategy[int], cols: int) -> st.SearchStrategy[DenseRecipe]:
    return st.builds(DenseRecipe, rows, st.just(cols), st.just("float32"), DENSE_CHARACTERS, SEEDS)


TOKENS = st.sampled_from((1, 1, 2, 3, 7))


@dataclass(frozen=True)
class LogitsRecipe:
    """Router logits [tokens, experts]. "dominant": one expert's probability leaves nothing to the others in float32."""

    tokens: int
    experts: int
    character: str
    seed: int

    def build(self) -> np.ndarray:
        random = np.random.default_rng(self.seed)
        shape = (self.tokens, self.experts)
        values = random.standard_normal(shape) * 3
        match self.character:
            case "ties":
                values = random.integers(-2, 3, shape) / 2
            case "all equal":
                values = np.full(shape, random.integers(-3, 4) / 2)
            case "dominant":
                values[np.arange(self.tokens), random.integers(0, self.experts, self.tokens)] = 300
            case "zeros":
                values = np.copysign(np.zeros(shape), values)
            case "huge":
                values = values * 1e37
            case "neighbours":  # equal in bfloat16, different in float32
                values = 1 + random.integers(0, 4, shape) * 2.0**-20
        return values.astype(np.float32)


@st.composite
def logits(draw: Any) -> tuple[LogitsRecipe, int]:
    """Logits and a top_k."""
    experts = draw(EXPERT_COUNTS)
    names = ("plain", "ties", "all equal", "dominant", "zeros", "huge", "neighbours")
    recipe = LogitsRecipe(draw(TOKENS), experts, draw(st.sampled_from(names)), draw(SEEDS))
    return recipe, draw(st.sampled_from(sorted({1, min(2, experts), max(1, experts // 2), experts})))


@dataclass(frozen=True)
class GroupRecipe:
    """Logits on a coarse positive grid and a coarse bias, so that choice values are equal or clearly apart."""

    tokens: int
    num_groups: int
    per_group: int
    top_groups: int
    top_k: int
    bias: str
    scale: float
    seed: int

    def build(self) -> tuple[np.ndarray, SigmoidGroup]:
        random = np.random.default_rng(self.seed)
        experts = self.num_groups * self.per_group
        grid = random.integers(1, 25, (self.tokens, experts)) / 8
        bias: np.ndarray | None = None
        match self.bias:
            case "negative":  # every choice value is below zero: a dropped group at 0.0 would win
                bias = (-2 - random.integers(0, 3, experts) / 2).astype(np.float32)
            case "mixed":
                bias = (random.integers(-4, 5, experts) / 4).astype(np.float32)
            case "bfloat16":
                bias = narrowed(random.integers(-4, 5, experts) / 4, "bfloat16")
        spec = SigmoidGroup(self.top_k, self.num_groups, self.top_groups, self.scale, bias)
        return grid.astype(np.float32), spec


@st.composite
def groups(draw: Any) -> GroupRecipe:
    num_groups, per_group = draw(st.sampled_from(((1, 1), (1, 5), (3, 1), (2, 2), (4, 4), (8, 3), (4, 8))))
    top_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_groups * per_group))
    bias = draw(st.sampled_from(("none", "negative", "mixed", "bfloat16")))
    return GroupRecipe(
        draw(TOKENS), num_groups, per_group, top_groups, top_k, bias, draw(st.sampled_from((1.0, 2.5))), draw(SEEDS)
    )


@dataclass(frozen=True)
class ExpertsRecipe:
    """All experts of one layer, as matrices and as the bytes of their slots."""

    num_experts: int
    hidden: int = 32
    inner: int = 32
    bits: int = 4
    group_size: int = 32
    coefficient: str = "float32"
    character: str = "plain"
    seed: int = 0

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(self.hidden, self.inner, self.bits, self.group_size, self.coefficient)  # type: ignore[arg-type]

    def build(self) -> list[Expert]:
        random = np.random.default_rng(self.seed)

        def matrix(rows: int, cols: int) -> QuantizedMatrix:
            seed, scale = int(random.integers(2**32)), cols**-0.5
            form = (self.bits, self.group_size, self.coefficient, self.character)
            return MatrixRecipe(rows, cols, *form, seed=seed, scale=scale).build()

        return [
            Expert(matrix(self.inner, self.hidden), matrix(self.inner, self.hidden), matrix(self.hidden, self.inner))
            for _ in range(self.num_experts)
        ]


def slot_bytes(expert: Expert) -> np.ndarray:
    """[STO-010] codes of gate, up, down; then scales and biases of gate, of up, of down; no gaps."""
    matrices = (expert.gate, expert.up, expert.down)
    parts = [matrix.packed.tobytes() for matrix in matrices]
    parts += [part.tobytes() for matrix in matrices for part in (matrix.scales, matrix.biases)]
    return np.frombuffer(b"".join(parts), np.uint8)


@st.composite
def expert_layers(draw: Any, counts: st.SearchStrategy[int]) -> ExpertsRecipe:
    group_size = draw(GROUPS)
    widths = st.sampled_from((group_size, 2 * group_size))
    names = st.sampled_from(("plain", "negative", "mixed", "cancelling", "extreme codes"))
    return ExpertsRecipe(
        draw(counts),
        draw(widths),
        draw(widths),
        draw(st.sampled_from((4, 8))),
        group_size,
        draw(COEFFICIENTS),
        draw(names),
        draw(SEEDS),
    )


@dataclass(frozen=True)
class RoutingRecipe:
    """Rows of k distinct experts. "same": all tokens agree; "one apart": a sliding window."""

    tokens: int
    num_experts: int
    k: int
    character: str
    seed: int

    def build(self) -> Routing:
        random = np.random.default_rng(self.seed)
        rows = np.array([random.permutation(self.num_experts)[: self.k] for _ in range(self.tokens)])
        weights = random.uniform(0.05, 1.0, rows.shape)
        match self.character:
            case "same":
                rows = np.repeat(rows[:1], self.tokens, axis=0)
            case "one apart":
                rows = (np.arange(self.tokens)[:, None] + np.arange(self.k)) % self.num_experts
            case "zero weight":
                weights[:, -1] = 0.0
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-3)
        return Routing(rows.astype(np.int64), weights.astype(np.float32))


@st.composite
def routings(draw: Any, num_experts: int, tokens: st.SearchStrategy[int] = TOKENS, most: int = 8) -> RoutingRecipe:
    k = draw(st.integers(1, min(num_experts, most)))
    names = st.sampled_from(("random", "random", "same", "one apart", "zero weight"))
    return RoutingRecipe(draw(tokens), num_experts, k, draw(names), draw(SEEDS))


def lora_of(rows: int, cols: int, rank: int, scale: float, seed: int) -> Lora:
    random = np.random.default_rng(seed)
    down = random.standard_normal((rank, cols)) * cols**-0.5
    up = random.standard_normal((rows, rank)) * rank**-0.5
    return Lora(down.astype(np.float16).astype(np.float32), up.astype(np.float16).astype(np.float32), scale)


def head_of(experts: int, features: int, width: int, seed: int, scale: float = 1.0) -> PrerouterHead:
    random = np.random.default_rng(seed)

    def half(rows: int, cols: int) -> np.ndarray:
        return (random.standard_normal((rows, cols)) * scale * cols**-0.5).astype(np.float16).astype(np.float32)

    return PrerouterHead(half(width, features), half(experts, width), half(experts, features))
