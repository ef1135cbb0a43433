"""A failure is kept as a vector that fails again alone, and that a right backend passes."""

import json
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.__main__ import main
from conformance.operations import read_operations
from conformance.usable import unusable
from conformance.vector_files import FOLDER, VectorError, check, files_in, read_file
from edge0_ref.backend import ReferenceBackend
from tests.conformance import backends

PLANTED = [
    ("route", backends.HigherIdOfEquals, "RTR-003"),
    ("route", backends.ChoosesOnBfloat16, "RTR-003"),
    ("dequantize", backends.UpperNibbleFirst, "DEQ-003"),
    ("linear", backends.LosesUpdateScale, "LOR-001"),
    ("quantize", backends.RoundsCodesDown, "DEQ-020"),
    ("predict", backends.OffByAThousandth, "PRE-001"),
    ("executor", backends.Third, "EXE-003"),
    ("executor", backends.Half, "EXE-003"),
    ("residency", backends.Hiding, "EXE-018"),
]


def narrow(backend: type[ReferenceBackend]) -> ReferenceBackend:
    """A backend whose executors are judged on one kind only, which is enough to find what is planted."""
    made = backend()
    made.claims = frozenset(
        backend.claims - {"decoder", "bits", "executor:exact", "executor:hot", "executor:whole_layer"}
    )
    return made


@pytest.mark.spec("BCK-032")
@pytest.mark.parametrize(("operation", "broken", "requirement"), PLANTED)
def test_a_planted_mistake_is_kept_as_a_vector_that_only_it_fails(
    operation: str,
    broken: type[ReferenceBackend],
    requirement: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = conformance.run(narrow(broken), [requirement], failures=tmp_path, option="--backend broken")
    assert report.status(requirement) == "FAIL"
    shrunk = [(test, message) for test, message in report.recorder.failures if "test_vectors" not in test]
    kept = [line.split()[5] for _, message in shrunk for line in message.splitlines() if line.startswith("  replay")]
    cases = [(path, case) for path in kept for case in read_file(Path(path)) if case.operation == operation]
    assert requirement in {id_ for _, case in cases for id_ in case.requirements}
    for path, _ in cases:
        name = f"{broken.__module__}:{broken.__name__}"
        assert main(["--replay", path, "--backend", name]) == 1
        assert "got" in capsys.readouterr().out
        assert main(["--replay", path, "--backend", "reference"]) == 0


@pytest.mark.spec("BCK-032")
def test_what_no_vector_can_hold_names_requirement_and_seed(tmp_path: Path) -> None:
    """A decoder is a folder of files: its failures come back by the seed."""

    class Shifted(ReferenceBackend):
        claims = frozenset({"decoder"})

        def to_numpy(self, array):  # type: ignore[no-untyped-def]
            return array + 1

    report = conformance.run(Shifted(), ["DEC-031"], seed=5, failures=tmp_path, option="--backend shifted")
    messages = [message for _, message in report.recorder.failures]
    assert messages
    assert all("again   python -m conformance --backend shifted --seed 5 --only DEC-" in m for m in messages)
    assert not list(tmp_path.iterdir())


@pytest.mark.spec("BCK-032")
def test_a_seed_draws_the_same_examples_and_another_one_others(tmp_path: Path) -> None:
    def failures(seed: int) -> list[tuple[str, str]]:
        return conformance.run(backends.Spoilt(), ["DEQ-005"], seed=seed, profile="no-shrink").recorder.failures

    assert failures(1) == failures(1)
    assert failures(1) != failures(2)


def vector_file(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(path)


@pytest.mark.spec("BCK-033")
def test_unusable_vector_files_are_named_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.loads((FOLDER / "router.json").read_text("utf-8"))
    case = good["cases"][0]
    unusable = {
        vector_file(tmp_path, "cut.json", json.dumps(good)[:300]): "not JSON",
        vector_file(tmp_path, "newer.json", good | {"version": 2}): "version 2 of the vectors, this suite knows 1",
        vector_file(tmp_path, "word.json", good | {"cases": [case | {"operation": "guess"}]}): f"case {case['id']}",
        vector_file(tmp_path, "list.json", []): "object",
        str(tmp_path / "absent.json"): "No such file",
    }
    used = vector_file(tmp_path, "good.json", good)
    assert main(["--backend", "reference", "--replay", *unusable, used]) == 2
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert len(lines) == len(unusable)
    for line, (path, what) in zip(lines, unusable.items(), strict=True):
        assert line.startswith(path)
        assert what in line
    assert "0 FAIL" in told.out
    assert " 0 passed" not in told.out


def changed(operation: str, **parts: Any) -> dict[str, Any]:
    """A case of the specification with other parts; a part of None is left out."""
    found = [json.loads(path.read_text("utf-8")) for path in files_in()]
    case = next(
        case for file in found for case in file["cases"] if case["operation"] == operation and "error" not in case
    )
    for part, values in parts.items():
        merged = case[part] | values if isinstance(case.get(part), dict) else values
        case[part] = {k: v for k, v in merged.items() if v is not None} if isinstance(merged, dict) else merged
    return dict(case)


FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        changed("route", inputs={"logits": {"shape": [2, 3], "float32": ["00000000"] * 5}}),
        "inputs, logits: 5 elements, wanted 6",
    ),
    (changed("route", expected={"experts": {"shape": [4], "int64": [1]}}), "expected, experts: 1 elements, wanted 4"),
    (changed("route", inputs={"logits": None}), "inputs: route lacks logits"),
    (changed("route", inputs={"spec": {"family": "softmax"}}), "top_k"),
    (changed("route", inputs={"logits": {"ref": "nothing"}}), "inputs, logits: ref 'nothing'"),
    (changed("route", inputs={"spec": {"family": "softmax", "top_k": "two"}}), "inputs: "),
    (changed("route", expected={"y": {"shape": [1], "int64": [1]}}), "expected: y, which route does not give"),
    (changed("dequantize", inputs={"matrix": {"bits": 4}}), "inputs: 'packed' is lacking"),
    (changed("residency", inputs={"kind": "luke"}), "inputs, kind: 'luke', wanted one of exact"),
    (changed("residency", inputs={"events": [{"hint": [99]}]}), "expert 99 of"),
    (changed("route", requirements=["XYZ-001"]), "requirements: XYZ-001, which spec/ does not state"),
    (changed("linear", bound={"z": {"shape": [1], "float64": ["0" * 16]}}), "bound: z"),
]


@pytest.mark.spec("BCK-033")
@pytest.mark.parametrize(("case", "what"), FAULTS)
def test_a_vector_that_nobody_can_run_is_refused_and_blamed_on_no_backend(
    case: dict[str, Any], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = vector_file(tmp_path, "odd.json", {"chapter": "odd", "version": 1, "cases": [case]})
    assert main(["--backend", "reference", "--replay", path]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1
    assert told.err.startswith(f"{path}: case {case['id']}, ")
    assert what in told.err
    assert "0 FAIL" in told.out


@pytest.mark.spec("BCK-033")
def test_an_error_that_edge0_does_not_have_and_a_reference_to_itself_are_refused() -> None:
    case = changed("route")
    for name in ("expected", "bound", "either"):
        case.pop(name, None)
    for kind in ("OopsError", "TypeError"):
        content = {"chapter": "odd", "version": 1, "cases": [case | {"error": {"kind": kind, "mentions": []}}]}
        with pytest.raises(VectorError, match=f"a file: case {case['id']}, error, kind: {kind}, which is no error"):
            check(content, "a file")
    looped = changed("route", inputs={"logits": {"ref": "a"}})
    content = {"chapter": "odd", "version": 1, "shared": {"a": {"ref": "b"}, "b": {"ref": "a"}}, "cases": [looped]}
    with pytest.raises(VectorError, match="which leads to itself"):
        check(content, "a file")


@pytest.mark.spec("BCK-033")
def test_every_vector_of_the_specification_can_be_run_and_every_operation_is_known() -> None:
    assert [unusable(path, read_file(path)) for path in files_in() if unusable(path, read_file(path))] == []
    schema = json.loads((FOLDER / "schema.json").read_text("utf-8"))
    assert set(schema["$defs"]["case"]["properties"]["operation"]["enum"]) == set(read_operations())


@pytest.mark.spec("BCK-033")
def test_no_vector_of_the_specification_comes_from_a_failure() -> None:
    assert not [case.id for path in files_in() for case in read_file(path) if case.source.startswith("conformance")]
    with pytest.raises(VectorError, match="version 7"):
        check({"version": 7}, "a file")
