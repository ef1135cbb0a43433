"""Each maths file of the reference has a twin on MLX: the same public names in the same order, read from the source."""

import ast
from pathlib import Path

import pytest

import edge0_ref

ROOT = Path(__file__).parents[1]
ORDER = edge0_ref.READING_ORDER
MATHS = ORDER[ORDER.index("kernels") : ORDER.index("engine")]

# Files of the reference that make no sense on MLX, or are not maths of a model.
WITHOUT_TWIN = {
    "executors/bank.py": "slots.py: memory of MLX, which must know the graphs that read it",
    "arithmetic.py": "which of the reference's two sets of kernels a decoder runs",
    "losses.py": "train/losses.py, where MLX finds the gradients",
    "head_training.py": "train/stages.py trains all heads at once",
    "lanes.py": "threads of the second backend over the reference's decoder; MLX has its own",
}
SECOND = "fast_"  # kernels of that second backend, which are to NumPy what MLX is
OTHER_NAME = {"ReferenceDecoder": "MlxDecoder", "ReferenceBackend": "MlxBackend"}
# Names of the reference that a twin leaves out, and those it has beside them.
LEFT_OUT = {
    "kernels.py": {
        "fold_sum": "MLX sums in its own order",
        "linear_float32": "mx.matmul",
        "linear_quantized": "mx.quantized_matmul",
        "coefficient": "mx.dequantize",
        "dequantize_rows": "mx.dequantize",
        "l2_normalize": "functions.py has it in MLX's operations",
        "logistic": "mx.sigmoid",
        "sigmoid": "mx.sigmoid",
        "gated": "functions.py has it in MLX's operations",
        "erf": "mx.erf",
        "weighted_sum": "a batched product",
        "compiled_before": "nothing is compiled before the first token",
    },
    "router.py": {"ascending_sum": "MLX sums in its own order"},
    "experts.py": {"run_expert": "run_experts: a gather runs all experts of a call"},
    "executors/exact.py": {
        "run_into": "a graph's outputs are gathered at the end: CallGraph",
        "run_each": "a graph's outputs are gathered at the end: CallGraph",
    },
    "decoder.py": {
        "ignore": "without an observer nothing is noted",
        "Layer": "layers.py: what a layer's pieces are, apart from how a call goes through them",
        "make_mixer": "layers.py",
        "make_mlp": "layers.py",
    },
}
ADDED = {
    "lora.py": {"add_update"},
    "router.py": {"choose", "exp"},
    "experts.py": {"Places", "run_experts"},
    "executors/exact.py": {"Held", "bank_slots", "CallGraph"},
    "weights.py": {"joined"},
    "backend.py": {"in_float32"},
    "mixers/attention.py": {"cos_and_sin"},
    "mixers/gated_delta.py": {"rows_of", "query_and_key_scales"},
    "mixers/mla.py": {"per_head"},
}


def maths_files() -> list[str]:
    folder = ROOT / "edge0_ref"
    paths = [path for name in MATHS for path in (folder / f"{name}.py", *sorted((folder / name).rglob("*.py")))]
    return [str(path.relative_to(folder)) for path in paths if path.exists() and not path.name.startswith(SECOND)]


def public_names(path: Path) -> list[str]:
    """Functions and classes of a file, in order. Aliases and constants are its own affair."""
    nodes = ast.parse(path.read_text("utf-8")).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]


@pytest.mark.parametrize("name", maths_files())
def test_a_twin_has_the_public_names_of_its_original_in_their_order(name: str) -> None:
    twin = ROOT / "edge0_mlx" / name
    if name in WITHOUT_TWIN:
        assert not twin.exists()
        return
    left_out, added = LEFT_OUT.get(name, {}), ADDED.get(name, set())
    original = public_names(ROOT / "edge0_ref" / name)
    wanted = [OTHER_NAME.get(public, public) for public in original if public not in left_out]
    assert [public for public in public_names(twin) if public not in added] == wanted


def test_the_exceptions_are_exceptions() -> None:
    """A name in a table that has become a twin, or is gone, is a table that lies."""
    files = set(maths_files())
    assert WITHOUT_TWIN.keys() <= files
    for name, left_out in LEFT_OUT.items():
        assert left_out.keys() <= set(public_names(ROOT / "edge0_ref" / name)), name
        assert not left_out.keys() & set(public_names(ROOT / "edge0_mlx" / name)), name
    for name, added in ADDED.items():
        assert added <= set(public_names(ROOT / "edge0_mlx" / name)), name
        assert not added & set(public_names(ROOT / "edge0_ref" / name)), name
