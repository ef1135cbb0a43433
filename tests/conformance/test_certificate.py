"""What a run leaves on paper: the certificate, its page, and the backend's own list of known failures."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.certificate import certificate
from conformance.known_failures import KnownFailuresError, read_known_failures
from conformance.page import MARKS, page
from conformance.report import STATUSES, Recorder, Report
from conformance.requirements import read_requirements
from conformance.runner import run
from tests.conformance.backends import Two

HERE = "tests.conformance.backends"
TIES = f"{HERE}:HigherIdOfEquals"


def report_of(outcomes: dict[str, list[str]], **named: object) -> Report:
    recorder = Recorder()
    for id_, several in outcomes.items():
        for outcome in several:
            recorder.outcome((id_,), outcome)
    return Report("b", ("router",), "ci", None, read_requirements(), recorder, frozenset(), **named)  # type: ignore[arg-type]


@pytest.mark.spec("BCK-002", "BCK-003", "BCK-030")
def test_only_what_passed_every_check_is_passed() -> None:
    outcomes = {
        "RTR-001": ["passed", "passed"],
        "RTR-002": ["passed", "FAIL"],
        "RTR-003": ["unclaimed", "unclaimed"],
        "RTR-010": ["passed", "unclaimed"],
        "RTR-011": ["FAIL", "passed"],
    }
    facts = certificate(report_of(outcomes, known={"RTR-011": "half precision"}))
    rows = {row["id"]: row for row in facts["requirements"]}
    status = {id_: rows[id_]["status"] for id_ in [*outcomes, "RTR-020"]}
    wanted = ["passed", "FAIL", "unclaimed", "passed", "known", "not run"]
    assert list(status.values()) == wanted
    assert rows["RTR-010"]["checks"] == {"passed": 1, "unclaimed": 1}
    assert sum(facts["counts"].values()) == len(rows) == len(read_requirements())


SAID_OF_SLOTS = [f"EXE-0{number}" for number in (11, 12, 13, 20, 21, 22, 23, 24, 25, 26, 27, 30)]


@pytest.mark.spec("BCK-002")
@pytest.mark.parametrize("kind", ["exact", "whole_layer"])
def test_an_executor_without_slots_has_passed_nothing_that_is_said_of_slots(kind: str) -> None:
    backend = Two()
    backend.claims = frozenset({f"executor:{kind}"})
    report = run(backend, SAID_OF_SLOTS)
    assert {report.status(id_) for id_ in SAID_OF_SLOTS} == {"unclaimed"}


@pytest.mark.spec("BCK-030")
def test_what_failed_before_a_run_was_interrupted_has_failed() -> None:
    verdicts = {
        (outcome, interrupted): report_of({"RTR-001": [outcome]}, interrupted=interrupted).verdict
        for outcome in ("passed", "FAIL")
        for interrupted in (False, True)
    }
    assert list(verdicts.values()) == ["passed", "interrupted", "FAIL", "FAIL"]


@pytest.mark.spec("BCK-030")
def test_a_certificate_says_what_was_held_to_what_and_where(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    code = main(["--backend", f"{HERE}:Two", "--only", "RTR-020", "--seed", "3", "--report", str(written)])
    facts = json.loads(written.read_text("utf-8"))
    assert code == 0
    assert (facts["verdict"], facts["seed"], facts["profile"], facts["only"]) == ("passed", 3, "ci", ["RTR-020"])
    assert facts["claims"] == ["dequant", "router"]
    assert facts["command"] == f"python -m conformance --backend {HERE}:Two --seed 3 --only RTR-020"
    assert {"python", "edge0", "numpy", "hypothesis"} <= set(facts["versions"])
    assert facts["specification"]["edition"] == "1"
    assert len(facts["specification"]["sha256"]) == 64
    assert facts["machine"]["processors"] >= 1
    assert "commit" in facts


class Reader(HTMLParser):
    """Reads a page as a program that reads aloud does: elements that are open, what is fetched, words, headings."""

    EMPTY = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.rows_without_heading = 0
        self.row: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [name for name in ("src", "href", "data", "action", "srcset") if name in given]
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe", "object", "base") else []
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.row = [] if tag == "tr" else [*self.row, (tag, given)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "tr" and not any(name == "th" and cell.get("scope") for name, cell in self.row):
            self.rows_without_heading += 1

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.mark.spec("BCK-030")
def test_the_page_asks_for_nothing_and_reads_aloud(tmp_path: Path) -> None:
    written = tmp_path / "out.html"
    arguments = ["--backend", TIES, "--only", "RTR-003,LOR-001", "--failures", str(tmp_path / "kept")]
    assert main([*arguments, "--html", str(written)]) == 1
    text = written.read_text("utf-8")
    read = Reader(text)
    assert (read.open, read.fetched, read.rows_without_heading) == ([], [], 0)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'lang="en"' in text
    for word in ("RTR-003", "FAIL", "unclaimed", "dequant, router"):
        assert word in read.words or any(word in part.split() or word == part for part in read.words)


@pytest.mark.spec("BCK-030")
def test_a_page_escapes_what_backends_say() -> None:
    report = report_of({"RTR-001": ["FAIL"]}, known={"RTR-001": "<script>alert(1)</script>"})
    report.recorder.failures.append(("test[<b>]", "got <img src=x>"))
    read = Reader(page(certificate(report)))
    assert (read.open, read.fetched) == ([], [])
    assert any("<img src=x>" in word for word in read.words)
    assert set(MARKS) == {*STATUSES, "interrupted"}


@pytest.mark.spec("BCK-031")
def test_a_known_failure_is_told_as_known_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = tmp_path / "known.txt"
    listed = ("RTR-003", "RTR-001", "RTR-010", "RTR-021")
    known.write_text("# ties\n\n" + "".join(f"{id_}  the higher id of equals\n" for id_ in listed), "utf-8")
    arguments = ["--backend", TIES, "--failures", str(tmp_path / "kept"), "--known-failures", str(known)]
    assert main([*arguments, "--only", "RTR-003"]) == 0
    assert "RTR-003  choice  known" in capsys.readouterr().out


@pytest.mark.spec("BCK-031")
def test_an_entry_that_describes_no_failure_is_itself_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "known.txt"
    known.write_text("RTR-020 groups\nLOR-001 no updates\nXYZ-001 gone\nDEQ-002 left out of the run\n", "utf-8")
    arguments = ["--backend", f"{HERE}:Two", "--known-failures", str(known)]
    assert main([*arguments, "--only", "RTR-020,LOR-001"]) == 1
    told = capsys.readouterr().out
    assert "RTR-020 is a known failure, but it passed" in told
    assert "LOR-001 is a known failure, but it is unclaimed" in told
    assert "DEQ-002 is" not in told
    assert "XYZ-001 is a known failure, but spec/ has no such requirement" in told
    everything = report_of({}, known={"XYZ-001": "gone"})
    assert everything.stale == ["XYZ-001 is a known failure, but spec/ has no such requirement"]
    assert everything.exit_code == 1


@pytest.mark.spec("BCK-031")
@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("RTR-003\n", ":1: got 'RTR-003'"),
        ("# x\nnonsense here\n", ":2: got"),
        ("RTR-003 a\nRTR-003 b\n", ":2: RTR-003 is"),
    ],
)
def test_a_list_that_cannot_be_read_says_in_which_line(tmp_path: Path, content: str, what: str) -> None:
    path = tmp_path / "known.txt"
    path.write_text(content, "utf-8")
    with pytest.raises(KnownFailuresError, match=f"known.txt{what}"):
        read_known_failures(path)
