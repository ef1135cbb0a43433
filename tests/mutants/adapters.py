"""Mutants of chapters 7 and 8: adapter files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge0_ref import adapter_headers, adapters
from edge0_ref.adapters import HEAD_KEY, LORA_KEY, Adapters
from edge0_ref.app import inspect
from edge0_ref.config import ModelConfig
from edge0_ref.contract import PrerouterHead
from edge0_ref.errors import AdapterError
from tests.mutants.replacing import replace_everywhere


def k_guessed_from_the_config(patch: pytest.MonkeyPatch) -> None:
    original = adapter_headers.top_k_of

    def top_k(folder: Path, metadata: Any, config: ModelConfig) -> Any:
        value, notes = original(folder, metadata, config)
        return config.top_k if value is None else value, notes

    replace_everywhere(patch, original, top_k)


def nested_metadata_unread(patch: pytest.MonkeyPatch) -> None:
    def decode_metadata(path: Path, raw: Any) -> dict[str, Any]:
        return {key: value for key, value in raw.items() if key != "__metadata__"}

    replace_everywhere(patch, adapter_headers.decode_metadata, decode_metadata)


def another_k_goes_unsaid(patch: pytest.MonkeyPatch) -> None:
    original = adapter_headers.top_k_of
    replace_everywhere(patch, original, lambda *arguments: (original(*arguments)[0], ()))


def a_head_that_nobody_consumes_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        adapters, "_head", lambda owner, parts, config: PrerouterHead(*(parts[p] for p in adapters.HEAD_PARTS))
    )


def owners_of_the_metadata_unread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapters, "_check_owners", lambda folder, metadata, heads: None)


def only_known(patch: pytest.MonkeyPatch, known: Any) -> None:
    """Pass over tensors by name."""
    original = adapter_headers.read_adapter_header

    def read_adapter_header(path: Path) -> Any:
        tensors, metadata = original(path)
        return {name: info for name, info in tensors.items() if known(name)}, metadata

    replace_everywhere(patch, original, read_adapter_header)


def unknown_tensors_passed_over(patch: pytest.MonkeyPatch) -> None:
    only_known(patch, lambda name: HEAD_KEY.fullmatch(name) or LORA_KEY.fullmatch(name))


def lora_on_routed_experts_passed_over(patch: pytest.MonkeyPatch) -> None:
    only_known(patch, lambda name: "switch_mlp" not in name)


def nan_weights_are_zeros(patch: pytest.MonkeyPatch) -> None:
    original = adapters._put

    def put(parts: dict[str, Any], part: str, info: Any) -> None:
        try:
            original(parts, part, info)
        except AdapterError as error:
            if "NaN" not in str(error):
                raise
            parts[part] = np.zeros(info.shape, np.float32)

    patch.setattr(adapters, "_put", put)


def the_last_of_two_files_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapters, "SETTINGS", ())


def facts_without_scales(patch: pytest.MonkeyPatch) -> None:
    original = inspect.adapter_facts

    def facts(opened: Adapters) -> dict[str, Any]:
        return {name: fact for name, fact in original(opened).items() if name != "scales"}

    patch.setattr(inspect, "adapter_facts", facts)


def adapters_written_in_place(patch: pytest.MonkeyPatch) -> None:
    original, save_file = adapters.write_adapters, adapters.save_file

    def write(path: Path, *content: Any) -> None:
        patch.setattr(adapters, "save_file", lambda tensors, aside, metadata: save_in_place(path, tensors, metadata))
        original(path, *content)

    def save_in_place(path: Path, tensors: Any, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes())

    replace_everywhere(patch, original, write)


def scale_without_the_rank(patch: pytest.MonkeyPatch) -> None:
    original = adapters._lora

    def lora(*arguments: Any) -> Any:
        read = original(*arguments)
        return replace(read, scale=read.scale * read.down.shape[0])

    patch.setattr(adapters, "_lora", lora)


def number_unless(patch: pytest.MonkeyPatch, name: str, otherwise: float | None) -> None:
    """Read a number of the metadata, but not this one."""
    original = adapter_headers.number_of

    def number(metadata: Any, asked: str) -> float | None:
        return otherwise if asked == name else original(metadata, asked)

    replace_everywhere(patch, original, number)


def rank_of_the_metadata_unread(patch: pytest.MonkeyPatch) -> None:
    number_unless(patch, "r", None)


def alpha_guessed(patch: pytest.MonkeyPatch) -> None:
    number_unless(patch, "alpha", 16.0)


def another_name_taken_for_alpha(patch: pytest.MonkeyPatch) -> None:
    original = adapter_headers.number_of

    def number(metadata: Any, asked: str) -> float | None:
        value = original(metadata, asked)
        return original(metadata, "lora_alpha") if asked == "alpha" and value is None else value

    replace_everywhere(patch, original, number)


def lora_names_without_prefix_unknown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModelConfig, "outer_prefix", "")


MUTANTS = {
    k_guessed_from_the_config: "PRE-010",
    nested_metadata_unread: "PRE-010",
    another_name_taken_for_alpha: "PRE-010",
    another_k_goes_unsaid: "PRE-011",
    a_head_that_nobody_consumes_accepted: "PRE-012",
    owners_of_the_metadata_unread: "PRE-014",
    unknown_tensors_passed_over: "PRE-015",
    nan_weights_are_zeros: "PRE-016",
    the_last_of_two_files_wins: "PRE-017",
    facts_without_scales: "PRE-018",
    adapters_written_in_place: "PRE-013",
    scale_without_the_rank: "LOR-002",
    rank_of_the_metadata_unread: "LOR-003",
    lora_on_routed_experts_passed_over: "LOR-004",
    alpha_guessed: "LOR-005",
    lora_names_without_prefix_unknown: "LOR-006",
}
