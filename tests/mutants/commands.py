"""Mutants of chapter 10, commands: what they print and write, and how they end."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge0_ref.app import cli, generate, inspect, live, logits, step


def the_live_line_on_stdout(patch: pytest.MonkeyPatch) -> None:
    original = live.LiveScreen
    patch.setattr(live, "LiveScreen", lambda result, text_on_terminal: original(result, text_on_terminal=True))


def json_over_many_lines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generate, "json_format", SimpleNamespace(dumps=lambda value: json.dumps(value, indent=1)))


def logits_written_in_place(patch: pytest.MonkeyPatch) -> None:
    original = logits.write_logits

    def write(path: Any, tensors: dict[str, Any]) -> None:
        save_file = logits.save_file

        def save(held: dict[str, Any], aside: Any) -> None:
            save_file(held, path)
            aside.write_bytes(path.read_bytes())

        with pytest.MonkeyPatch.context() as here:
            here.setattr(logits, "save_file", save)
            original(path, tensors)

    patch.setattr(logits, "write_logits", write)


def logits_rounded(patch: pytest.MonkeyPatch) -> None:
    original = logits.write_logits

    def write(path: Any, tensors: dict[str, Any]) -> None:
        original(path, tensors | {"logits": tensors["logits"].astype(np.float16)})

    patch.setattr(logits, "write_logits", write)


def logits_in_place_of_a_pipe(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logits, "check_output", lambda path: None)


def a_token_reads_one_expert(patch: pytest.MonkeyPatch) -> None:
    original = inspect.experts

    def experts(*arguments: Any) -> dict[str, Any]:
        facts = original(*arguments)
        return facts | {"bytes_per_token": facts["bytes_per_token"] // facts["top_k"]}

    patch.setattr(inspect, "experts", experts)


def predictions_shown_as_choices_of_the_router(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "any_router", lambda recorder, layer: True)


def errors_exit_with_1(patch: pytest.MonkeyPatch) -> None:
    original = cli.fail
    patch.setattr(cli, "fail", lambda message: original(message) - 1)


MUTANTS = {
    the_live_line_on_stdout: "ENG-060",
    json_over_many_lines: "ENG-061",
    logits_written_in_place: "ENG-062",
    logits_rounded: "ENG-062",
    logits_in_place_of_a_pipe: "ENG-062",
    a_token_reads_one_expert: "ENG-063",
    predictions_shown_as_choices_of_the_router: "ENG-064",
    errors_exit_with_1: "ENG-065",
}
