"""The snippets of spec/ run, and print what they say."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "spec").glob("[0-9]*.md"))
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_snippets_run(chapter: Path) -> None:
    """A chapter is one session: later snippets see the names of earlier ones."""
    text = chapter.read_text("utf-8")
    names: dict[str, object] = {"np": np}
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for snippet in SNIPPET.finditer(text):
        line = text[: snippet.start(1)].count("\n")
        test = doctest.DocTestParser().get_doctest(snippet[1], names, chapter.name, str(chapter), line)
        runner.run(test, out=report.append, clear_globs=False)
        names = test.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_snippets_are_doctests() -> None:
    """A snippet without a prompt would run nothing."""
    snippets = [snippet[1] for chapter in CHAPTERS for snippet in SNIPPET.finditer(chapter.read_text("utf-8"))]
    assert snippets
    assert not [snippet for snippet in snippets if ">>>" not in snippet]
