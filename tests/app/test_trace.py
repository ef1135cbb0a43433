"""`edge0 trace`: the timeline is one that could have happened, and both files can be read by others."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest

from tests.app.command import edge0, edge0_here, refusal
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=16, top_k=2)
EXPERT_BYTES = 3 * RECIPE.inner * RECIPE.hidden // 2 + 3 * 4 * RECIPE.inner * RECIPE.hidden // RECIPE.group_size
TOKENS = 3
NANOSECOND = 1e-3  # in the file's microseconds; its figures are whole nanoseconds


@pytest.fixture(scope="module", params=["reference", "numba"])
def traced(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trace.json, trace.svg and the line that was told."""
    folder = build(tmp_path_factory.mktemp("model"), RECIPE)
    build_adapters(folder / "adapters", RECIPE, [1, 2], {})
    out, picture = folder / "trace.json", folder / "trace.svg"
    done = edge0(
        "trace", folder, "--out", out, "--picture", picture, "--tokens", TOKENS, "--prompt-tokens", 4,
        "--routing", "uniform", "--backend", request.param, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "told.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def events(traced) -> list[dict[str, object]]:
    return [event for event in trace_of(traced)["traceEvents"] if event["ph"] == "X"]


def trace_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "trace.json").read_text("utf-8"))


def end(event: dict[str, object]) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.spec("ENG-076")
def test_every_event_lies_within_the_run_and_names_its_thread(traced, events) -> None:
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace_of(traced)["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert len(set(names.values())) == len(names)
    assert {event["tid"] for event in events} <= set(names)
    assert min(event["ts"] for event in events) == 0
    assert all(event["dur"] >= 0 for event in events)
    tokens = [event for event in events if event["cat"] == "token"]
    assert len(tokens) == TOKENS
    last = max(end(token) for token in tokens)
    for event in events:
        # reads for the token after the last one may end after it
        assert event["cat"] == "read" or end(event) <= last + NANOSECOND


@pytest.mark.spec("ENG-076")
def test_what_one_thread_does_is_nested_or_apart(events) -> None:
    by_thread = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    for running in by_thread.values():
        open_until: list[float] = []
        for event in sorted(running, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + NANOSECOND:
                open_until.pop()
            assert not open_until or end(event) <= open_until[-1] + NANOSECOND
            open_until.append(end(event))


@pytest.mark.spec("ENG-076")
def test_reads_of_one_thread_never_overlap_and_the_decoder_has_none(events) -> None:
    reads = [event for event in events if event["cat"] == "read"]
    assert reads
    assert all(event["args"]["nbytes"] == EXPERT_BYTES for event in reads)
    decoder = {event["tid"] for event in events if event["cat"] == "token"}
    assert not decoder & {event["tid"] for event in reads}
    for thread in {event["tid"] for event in reads}:
        mine = sorted((event for event in reads if event["tid"] == thread), key=lambda event: event["ts"])
        assert all(end(before) <= after["ts"] + NANOSECOND for before, after in pairwise(mine))


@pytest.mark.spec("ENG-076")
def test_every_layer_of_every_token_is_there_and_phases_fill_a_token(events) -> None:
    found = [(event["args"]["token"], event["args"]["layer"]) for event in events if event["cat"] == "layer"]
    assert found == [(token, layer) for token in range(TOKENS) for layer in range(RECIPE.layers)]
    for token in (event for event in events if event["cat"] == "token"):
        number = token["args"]["token"]
        phases = [e for e in events if e["cat"] in ("compute", "wait") and e["args"]["token"] == number]
        assert [e["name"] for e in phases].count("experts") == RECIPE.layers
        assert [e["name"] for e in phases].count("prediction") == 2
        assert all(abs(end(before) - after["ts"]) <= NANOSECOND for before, after in pairwise(phases))
        assert phases[0]["ts"] == pytest.approx(token["ts"], abs=NANOSECOND)
        assert end(phases[-1]) <= end(token) + NANOSECOND
        assert phases[-1]["name"] == "logits"


@pytest.mark.spec("ENG-072", "ENG-076")
def test_what_is_told_is_what_the_file_holds(traced, events) -> None:
    told = json.loads((traced / "told.json").read_text())
    assert trace_of(traced)["otherData"] == told
    assert (told["routing"], told["routing_is_simulated"]) == ("uniform", True)
    tokens = [event["args"]["token"] for event in events if event["cat"] == "token"]
    steps = [event["dur"] for event in events if event["cat"] == "token"]
    waits = [sum(e["dur"] for e in events if (e["cat"], e["args"].get("token")) == ("wait", token)) for token in tokens]
    assert told["step_ms"] == pytest.approx(median(steps) / 1e3)
    assert told["wait_ms_per_token"] == pytest.approx(median(waits) / 1e3)
    assert told["hidden_share"] == pytest.approx(max(0, 1 - sum(waits) / 1e3 / told["reading_ms"]))
    assert told["bytes_read"] == EXPERT_BYTES * sum(event["cat"] == "read" for event in events)


@pytest.mark.spec("ENG-072", "ENG-077")
def test_the_picture_is_well_formed_and_shows_every_read_inside_itself(traced, events) -> None:
    root = ElementTree.parse(traced / "trace.svg").getroot()
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = root.findall("{*}rect")
    for box in boxes:
        x, y, wide, high = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
    titles = [title.text for title in root.iterfind(".//{*}title")]
    assert sum(" expert " in title for title in titles) == sum(event["cat"] == "read" for event in events)
    assert any("simulated" in words.text for words in root.findall("{*}text"))


@pytest.mark.spec("ENG-065")
def test_a_timeline_needs_a_place_and_that_place_a_folder(capsys, tmp_path) -> None:
    folder = build(tmp_path, RECIPE)
    assert "--out" in refusal(edge0_here(capsys, "trace", folder))
    assert "no/such" in refusal(edge0_here(capsys, "trace", folder, "--out", "no/such/trace.json"))
    assert "it is a folder" in refusal(edge0_here(capsys, "trace", folder, "--picture", folder))
    twice = folder / "both"
    assert "wanted two" in refusal(edge0_here(capsys, "trace", folder, "--out", twice, "--picture", twice))
