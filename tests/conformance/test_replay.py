"""A failure is kept as a vector that fails again alone, and that a right backend passes."""

import json
from pathlib import Path

import pytest

import conformance
from conformance.__main__ import main
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


@pytest.mark.spec("BCK-033")
def test_no_vector_of_the_specification_comes_from_a_failure() -> None:
    assert not [case.id for path in files_in() for case in read_file(path) if case.source.startswith("conformance")]
    with pytest.raises(VectorError, match="version 7"):
        check({"version": 7}, "a file")
