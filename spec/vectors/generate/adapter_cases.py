"""Chapters 7 and 8: adapter files for the embedded model, whose shapes they use; all by hand.

The embedded model: hidden 192, 8 layers, 32 experts, 4 of them a token; layer 3 attends, k_proj is [128, 192].
"""

# ruff: noqa: E501 (a case is a row of a table)

from typing import Any

from values import Json, case, error, filled

K_PROJ = "language_model.model.layers.3.self_attn.k_proj"
FEATURES, EXPERTS, WIDTH = 192 + 2 * 32, 32, 2


def head(owner: int, dtype: str = "float16", prefix: str = "", **change: Json) -> Json:
    """A head's three tensors by the published names; change: part -> another tensor, or None to leave it out."""
    zero = "0000" if dtype != "float32" else "00000000"
    shapes = {"fc1": (WIDTH, FEATURES), "fc2": (EXPERTS, WIDTH), "linear_init": (EXPERTS, FEATURES)}
    parts: dict[str, Any] = {part: filled(zero, dtype, *shape) for part, shape in shapes.items()} | change
    return {f"layers.{owner}.{prefix}{part}.weight": value for part, value in parts.items() if value is not None}


def lora(module: str = K_PROJ, rank: int = 2, rows: int = 128, cols: int = 192) -> Json:
    return {
        f"{module}.lora_A": filled("3c00", "float16", rank, cols),
        f"{module}.lora_B": filled("0000", "float16", rows, rank),
    }


def nested(text: str) -> Json:
    """Metadata as published: JSON in a string under a key of this very name."""
    return {"__metadata__": text}


def cases() -> list[Json]:
    return [*accepted(), *refused_heads(), *refused_loras(), *refused_files()]


def opened(name: str, ids: str, flags: str, comment: str, files: list[tuple[Json, Json]], **result: Any) -> Json:
    inputs = {"files": [{"metadata": metadata, "tensors": tensors} for metadata, tensors in files]}
    return case(f"adapters/{name}", ids, "adapters", flags, comment, "hand", inputs, **result)


def accepted() -> list[Json]:
    def told(owners: list[int], top_k: int | None, notes: int, scales: Json) -> Json:
        return {"owners": owners, "top_k": top_k, "notes": notes, "scales": scales}

    published = nested('{"K": 2, "r": 2, "alpha": 4, "owners": [1, 2], "source": "somewhere"}')
    same = nested('{"K": 4, "owners": [0]}')
    rows = [
        ("published", "PRE-010 PRE-011 LOR-002", "metadata-ignored scale-without-rank", "Nested metadata; K = 2 is said aloud.",
         [(published, head(1) | head(2) | lora())], told([1, 2], 2, 1, {K_PROJ: 2.0})),
        ("plain-metadata", "PRE-010", "nested-only", "The same settings as the file's own strings.",
         [({"K": "2", "alpha": "1", "owners": "[5]"}, head(5) | lora())], told([5], 2, 1, {K_PROJ: 0.5})),
        ("same-k", "PRE-011", "notes-always", "K equals the config's 4: nothing to say.", [(same, head(0))], told([0], 4, 0, {})),
        ("no-k", "PRE-010", "k-guessed", "Without K the config decides.", [({}, head(6))], told([6], None, 0, {})),
        ("two-files", "PRE-010 PRE-017", "first-file-only", "Heads and LoRA in files of their own.",
         [(nested('{"K": 4, "owners": [3]}'), head(3)), (nested('{"K": 4, "r": 2, "alpha": 3}'), lora())],
         told([3], 4, 0, {K_PROJ: 1.5})),
        ("long-names", "PRE-010", "short-names-only", "layers.N.mlp.prerouter.*", [({}, head(2, prefix="mlp.prerouter."))],
         told([2], None, 0, {})),
        ("bfloat16", "PRE-015", "float16-only", "Other float dtypes are widened.",
         [({}, head(2, "bfloat16") | head(4, "float32"))], told([2, 4], None, 0, {})),
        ("without-prefix", "LOR-006", "exact-names-only", "The outermost prefix may be missing.",
         [({"alpha": "2"}, lora(K_PROJ.removeprefix("language_model.")))], told([], None, 0, {K_PROJ: 1.0})),
        ("last-owner", "PRE-012", "last-consumer-refused", "Layer 6 predicts for layer 7, the last.", [({}, head(6))],
         told([6], None, 0, {})),
    ]  # fmt: skip
    return [
        opened(name, ids, flags, comment, files, expected=wanted) for name, ids, flags, comment, files, wanted in rows
    ]


def refused_heads() -> list[Json]:
    wide = filled("0000", "float16", WIDTH, FEATURES + 1)
    rows = [
        ("no-consumer", "PRE-012", "wasted-head", "Layer 7 is the last: nobody consumes.", ({}, head(7)), ["7", "8"]),
        ("no-owner", "PRE-012", "wasted-head", "The model has no layer 9.", ({}, head(9)), ["9"]),
        ("part-missing", "PRE-012", "part-missing", "A head without fc2.", ({}, head(2, fc2=None)), ["2", "fc2"]),
        ("features", "PRE-012", "wrong-model", "A head of another model's hidden size.", ({}, head(2, fc1=wide)), ["2", "fc1"]),
        ("owner-absent", "PRE-014", "missing-owner", "Promised, not there.", ({"owners": "[1, 2]"}, head(1)), ["2"]),
        ("owner-extra", "PRE-014", "unpromised-owner", "There, not promised.",
         ({"owners": "[1]"}, head(1) | head(2)), ["2"]),
        ("owners-text", "PRE-014", "unchecked-metadata", "Owners that are no list.", ({"owners": "all"}, head(1)), ["all"]),
        ("k-zero", "PRE-011", "unchecked-k", "K = 0.", ({"K": "0"}, head(1)), ["K", "0"]),
        ("k-above", "PRE-011", "unchecked-k", "K = 33 of 32 experts.", ({"K": "33"}, head(1)), ["33", "32"]),
        ("k-fraction", "PRE-011", "unchecked-k", "K = 2.5.", ({"K": "2.5"}, head(1)), ["2.5"]),
        ("nan", "PRE-016 NUM-009", "nan-accepted", "A NaN in fc2.",
         ({}, head(2, fc2=filled("7e00", "float16", EXPERTS, WIDTH))), ["layers.2.fc2.weight"]),
        ("infinity", "PRE-016 NUM-009", "infinity-accepted", "An infinity in fc1.",
         ({}, head(2, fc1=filled("7c00", "float16", WIDTH, FEATURES))), ["layers.2.fc1.weight"]),
    ]  # fmt: skip
    return [
        opened(f"refuses-{name}", ids, flags, comment, [file], error=error("AdapterError", *mentions))
        for name, ids, flags, comment, file, mentions in rows
    ]


def refused_loras() -> list[Json]:
    alpha = {"alpha": "4"}
    experts = "language_model.model.layers.0.mlp.switch_mlp.gate_proj"
    half = {f"{K_PROJ}.lora_A": filled("0000", "float16", 2, 192)}
    rows = [
        ("lora-half", "LOR-003", "half-a-lora", "lora_A without lora_B.", (alpha, half), [K_PROJ, "lora_B"]),
        ("lora-shape", "LOR-003", "unchecked-shapes", "Rows of another layer.", (alpha, lora(rows=64)), [K_PROJ, "lora_B", "64"]),
        ("lora-rank", "LOR-003", "rank-ignored", "Rank 2, r = 16.", ({**alpha, "r": "16"}, lora()), [K_PROJ, "16", "2"]),
        ("lora-no-alpha", "LOR-005", "scale-guessed", "The scale is unknown.", ({"r": "2"}, lora()), [K_PROJ, "alpha"]),
        ("lora-on-experts", "LOR-004", "lora-on-experts", "Routed experts stay int4.", (alpha, lora(experts)), [experts]),
        ("lora-unknown", "LOR-004", "unknown-target", "No such layer.", (alpha, lora("model.layers.99.k_proj")), ["layers.99"]),
        ("lora-attention-of-0", "LOR-004", "unknown-target", "Layer 0 does not attend.",
         (alpha, lora("model.layers.0.self_attn.k_proj")), ["layers.0.self_attn"]),
    ]  # fmt: skip
    return [
        opened(f"refuses-{name}", ids, flags, comment, [file], error=error("AdapterError", *mentions))
        for name, ids, flags, comment, file, mentions in rows
    ]


def refused_files() -> list[Json]:
    stray = {"model.layers.0.extra": filled("0000", "float16", 1, 1)}
    whole = {"layers.2.fc1.weight": {"shape": [1, 1], "int64": [0]}}
    rows = [
        ("unknown-key", "PRE-015", "unknown-key-ignored", "Neither head nor LoRA.", [({}, head(1) | stray)], ["extra"]),
        ("dtype", "PRE-015", "integer-weights", "int64 weights.", [({}, whole)], ["layers.2.fc1.weight", "I64"]),
        ("twice", "PRE-015", "last-one-wins", "The same head in two files.", [({}, head(1)), ({}, head(1))], ["layers.1."]),
        ("two-ks", "PRE-017", "last-one-wins", "Files that disagree on K.",
         [({"K": "2"}, head(1)), ({"K": "4"}, head(2))], ["K", "2", "4"]),
        ("two-alphas", "PRE-017", "last-one-wins", "Files that disagree on alpha.",
         [({"alpha": "2"}, lora()), ({"alpha": "4"}, head(2))], ["alpha", "2", "4"]),
        ("metadata-text", "PRE-010", "unchecked-metadata", "Metadata that is no JSON.", [(nested("K=2"), head(1))], ["JSON"]),
        ("metadata-list", "PRE-010", "unchecked-metadata", "Metadata that is no object.", [(nested("[2]"), head(1))], ["object"]),
    ]  # fmt: skip
    return [
        opened(f"refuses-{name}", ids, flags, comment, files, error=error("AdapterError", *mentions))
        for name, ids, flags, comment, files, mentions in rows
    ]
