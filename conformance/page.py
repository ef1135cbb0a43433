"""A certificate as one HTML page: it asks for nothing from anywhere, and its tables make sense read aloud."""

from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby
from typing import Any

MARKS = {"passed": "✓", "FAIL": "✗", "known": "!", "unclaimed": "-", "not run": "·", "interrupted": "…"}
MEANINGS = {
    "passed": "every check that concerns this backend passed",
    "FAIL": "a check failed",
    "known": "it fails, and the backend's own list says so",
    "unclaimed": "the backend does not promise it",
    "not run": "no test of this suite concerns a backend",
}
STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --faint: #57606a; --head: #f6f8fa;
  --passed: #116329; --FAIL: #a40e26; --known: #7d4e00; --unclaimed: #57606a; --not-run: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #3d444d; --faint: #9198a1; --head: #161b22;
  --passed: #57d364; --FAIL: #ff8d85; --known: #e3b341; --unclaimed: #9198a1; --not-run: #9198a1; }
  body { background: #0d1117; color: #e6edf3; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2rem 0 .6rem; }
.verdict { font-size: 1.15rem; } .passed { color: var(--passed); } .FAIL { color: var(--FAIL); font-weight: 600; }
.known { color: var(--known); } .unclaimed { color: var(--unclaimed); } .not-run { color: var(--not-run); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
caption { text-align: left; color: var(--faint); padding-bottom: .4rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom-width: 2px; } tbody th[scope=rowgroup] { background: var(--head); padding-left: .4rem; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
small { overflow-wrap: anywhere; }
code, pre { font: .88em ui-monospace, monospace; } pre { overflow-x: auto; padding: .8rem; background: var(--head); }
"""


def page(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    name = escape(facts["backend"])
    sections = [
        f"<h1>Conformance of {name}</h1>",
        verdict(facts),
        section("Run", described(run_facts(facts))),
        section("Result", counts(facts["counts"])),
        section("Failures", failures(facts)),
        section("Requirements", matrix(facts["requirements"])),
        section("Worst figures", figures(facts["requirements"])),
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Conformance of {name}</title>'
    )
    body = "\n".join(part for part in sections if part)
    opening = f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>'
    return f"{opening}\n<body><main>\n{body}\n</main></body></html>\n"


def section(title: str, content: str) -> str:
    identity = title.lower().replace(" ", "-")
    return (
        f'<section aria-labelledby="{identity}"><h2 id="{identity}">{title}</h2>\n{content}</section>'
        if content
        else ""
    )


def status_text(status: str) -> str:
    """A status in words; its mark and color say nothing more."""
    return f'<span class="{status.replace(" ", "-")}"><span aria-hidden="true">{MARKS[status]}</span> {status}</span>'


def verdict(facts: Mapping[str, Any]) -> str:
    numbers = ", ".join(f"{count} {status}" for status, count in facts["counts"].items() if count)
    chosen = f" Only {', '.join(facts['only'])} were asked for." if facts["only"] else ""
    return f'<p class="verdict">{status_text(facts["verdict"])}. Requirements: {numbers}.{chosen}</p>'


def run_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    spec, machine = facts["specification"], facts["machine"]
    return {
        "claims": ", ".join(facts["claims"]) or "none",
        "specification": f"edition {spec['edition']}, sha256 {spec['sha256'][:12]}",
        "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        "machine": f"{machine['system']}, {machine['architecture']}, {machine['processors']} processors",
        "commit": facts["commit"] or "not a checkout",
        "profile": facts["profile"],
        "seed": "the standing examples" if facts["seed"] is None else str(facts["seed"]),
        "command": facts["command"] or "not from a command line",
    }


def described(facts: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>\n" for name, value in facts.items()) + "</dl>\n"


def table(caption: str, heads: Iterable[str], body: str) -> str:
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>\n'
        f"<thead><tr>{columns}</tr></thead>\n{body}</table></div>\n"
    )


def cells(*values: str, numbers: Iterable[int] = ()) -> str:
    """A row whose first cell is its heading. numbers: which of the others hold figures."""
    others = [f"<td{' class=number' if i in numbers else ''}>{value}</td>" for i, value in enumerate(values[1:], 1)]
    return f'<tr><th scope="row">{values[0]}</th>{"".join(others)}</tr>\n'


def counts(numbers: Mapping[str, int]) -> str:
    rows = [cells(status_text(status), str(count), MEANINGS[status], numbers=(1,)) for status, count in numbers.items()]
    heads = ("status", "requirements", "meaning")
    return table("How many requirements have which status", heads, f"<tbody>{''.join(rows)}</tbody>")


def failures(facts: Mapping[str, Any]) -> str:
    told = [
        f"<details open><summary><code>{escape(failure['test'])}</code></summary>"
        f"<pre>{escape(failure['message'])}</pre></details>\n"
        for failure in facts["failures"]
    ]
    lines = [*facts["stale"], *facts["notes"]]
    listed = "<ul>" + "".join(f"<li>{escape(line)}</li>\n" for line in lines) + "</ul>\n" if lines else ""
    return "".join(told) + listed


def chapter_of(row: Mapping[str, Any]) -> str:
    return str(row["spec"] or "outside of spec/").partition(":")[0]


def matrix(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row a requirement, a group of rows a chapter."""
    body = ""
    for chapter, group in groupby(rows, chapter_of):
        body += f'<tbody><tr><th scope="rowgroup" colspan="6">{escape(chapter)}</th></tr>\n'
        body += "".join(matrix_row(row) for row in group) + "</tbody>\n"
    heads = ("requirement", "class", "status", "checks", "worst of bound", "where")
    return table("Each requirement of the specification", heads, body)


def matrix_row(row: Mapping[str, Any]) -> str:
    checks = ", ".join(f"{count} {outcome}" for outcome, count in sorted(row["checks"].items()))
    status = status_text(row["status"]) + (f"<br>{escape(row['reason'])}" if row["reason"] else "")
    ratio = max((figure["ratio_to_bound"] for figure in row["paths"].values()), default=0.0)
    place = f"<code>{escape(row['spec'] or 'none')}</code>"
    return cells(
        escape(row["id"]), row["class"] or "none", status, checks or "none", percent(ratio), place, numbers=(4,)
    )


def percent(ratio: float) -> str:
    """A share of a bound."""
    return f"{100 * ratio:.3g} %" if ratio else "none"


def figures(rows: Iterable[Mapping[str, Any]]) -> str:
    """The worst errors on each path, where anything was measured."""
    body = "".join(
        figures_row(row["id"], path, figure)
        for row in rows
        for path, figure in row["paths"].items()
        if figure["ratio_to_bound"]
    )
    heads = ("requirement", "path", "relative L2", "of its bound", "case of the worst")
    return table("The worst errors, by requirement and path", heads, f"<tbody>{body}</tbody>") if body else ""


def figures_row(id_: str, path: str, figure: Mapping[str, Any]) -> str:
    distance, share = f"{figure['relative_l2']:.2e}", percent(figure["ratio_to_bound"])
    return cells(escape(id_), escape(path), distance, share, f"<small>{escape(figure['case'])}</small>", numbers=(2, 3))
