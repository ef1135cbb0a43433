"""`edge0 bench --paper`: the paper's figures, each beside its own measured one, and never without what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from edge0_ref.app import bench_paper
from edge0_ref.app.bench_paper import PAPER, compare, model_difference, paper_cases, run_paper
from edge0_ref.app.presets import LING, QWEN, make_config, model_of
from edge0_ref.app.scenario import Case
from edge0_ref.errors import BudgetError
from edge0_ref.inventory import open_checkpoint
from tests.app.command import edge0, edge0_here, refusal
from tests.ref.builders import Recipe, build, build_adapters

RECIPE = Recipe(layers=4, experts=16, top_k=2)
LINE = {"machine": "m", "backend": "mlx", "routing": "model", "routing_is_simulated": False, "peak_is": "MLX's peak"}
FIGURES = {published.figure for published in PAPER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = build(tmp_path_factory.mktemp("model"), RECIPE)
    build_adapters(made / "adapters", RECIPE, [1, 2], {})
    return made


def line(scenario: str, k: int, **changes: Any) -> dict[str, Any]:
    """A case's line whose every figure says which case it is of."""
    figures = {figure: float(f"{k}.{len(scenario)}") for figure in FIGURES}
    return {**LINE, "scenario": scenario, "k": k, "cap_bytes": None, "cap_is_enforced": False, **figures, **changes}


@pytest.mark.spec("ENG-078")
def test_each_row_is_the_case_it_names() -> None:
    told = [line(scenario, k) for scenario, k in {(published.scenario, published.k) for published in PAPER}]
    for published, row in zip(PAPER, compare(told, {}, None), strict=True):
        assert row.published is published
        assert row.here == float(f"{published.k}.{len(published.scenario)}")
        assert set(row.differs) == ({"machine", "memory"} if published.figure == "peak_bytes" else {"machine"})


@pytest.mark.spec("ENG-078")
@pytest.mark.parametrize(
    ("changes", "respect"),
    [
        ({"backend": "numba"}, "backend"),
        ({"routing": "uniform", "routing_is_simulated": True}, "routing"),
        ({"cap_bytes": 2**30}, "cap"),
    ],
)
def test_what_differs_is_said_in_every_row(changes, respect) -> None:
    told = [line(published.scenario, published.k, **changes) for published in PAPER]
    assert all(respect in row.differs for row in compare(told, {}, None))
    assert all("model" in row.differs for row in compare(told, {}, "4 layers of 64"))


@pytest.mark.spec("ENG-078")
def test_a_model_differs_by_its_shapes() -> None:
    assert model_difference(model_of(make_config(QWEN), "")) is None
    assert model_difference(model_of(make_config(QWEN, {"num_hidden_layers": 4}), "")) is not None
    assert model_difference(model_of(make_config(LING), "")) is not None


@pytest.mark.spec("ENG-078")
def test_what_cannot_be_run_is_left_out_and_said(folder, tmp_path, monkeypatch) -> None:
    few = open_checkpoint(build(tmp_path, Recipe(layers=4, experts=6, top_k=2)))
    cases, left_out = paper_cases(Case("prefetch"), few)
    assert {case.k for case in cases} == {2, 4}
    assert {k for _, k in left_out} == {8}
    monkeypatch.setattr(bench_paper, "machine_bytes", lambda: 1)
    cases, left_out = paper_cases(Case("prefetch"), open_checkpoint(folder))
    assert [*left_out] == [("resident", 4)]
    nothing = [
        row.published for row in compare([line(c.scenario, c.k) for c in cases], left_out, None) if row.here is None
    ]
    assert {(published.scenario, published.k) for published in nothing} == {("resident", 4)}


@pytest.mark.spec("ENG-078")
def test_a_case_beyond_its_cap_leaves_the_others(folder, monkeypatch, capsys) -> None:
    def figures_of(case: Case, earlier: object, notify: object) -> dict[str, Any]:
        if case.k == 8:
            raise BudgetError("too small")
        assert case.cap == (None if case.scenario == "resident" else 2**30)
        return line(case.scenario, case.k or 0)

    monkeypatch.setattr(bench_paper, "figures_of", figures_of)
    rows = run_paper(Case("prefetch", str(folder), cap=2**30), None, lambda text: None, table=False)
    for row in rows:
        assert (row.here is None) == (row.published.k == 8)
        assert ("too small" in row.differs.values()) == (row.published.k == 8)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["paper"]) == len(PAPER)


@pytest.mark.spec("ENG-078")
def test_the_command_measures_every_row_in_one_run(folder) -> None:
    done = edge0("bench", folder, "--paper", "--tokens", 2, "--prompt-tokens", 2)
    assert done.returncode == 0, done.stderr
    *lines, last = map(json.loads, done.stdout.splitlines())
    assert {(one["scenario"], one["k"]) for one in lines} == {(published.scenario, published.k) for published in PAPER}
    measured = {(one["scenario"], one["k"]): one for one in lines}
    for row in last["paper"]:
        published = row["published"]
        assert row["here"] == measured[published["scenario"], published["k"]][published["figure"]]
        assert {"machine", "model", "backend"} <= {*row["differs"]}
    assert "M4 Pro" in done.stderr


@pytest.mark.spec("ENG-065", "ENG-078")
def test_what_the_paper_does_not_have_is_refused(capsys, folder, tmp_path) -> None:
    assert "--paper" in refusal(edge0_here(capsys, "bench", folder, "--paper", "--k", 2))
    assert "heads" in refusal(edge0_here(capsys, "bench", build(tmp_path, RECIPE), "--paper"))
