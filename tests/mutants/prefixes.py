"""Mutants of chapter 10, kept prefixes: states that are not what they are kept for, and room that is not there."""

from dataclasses import replace
from typing import Any

import pytest

from edge0_ref.engine import prefix_files, prefixes
from edge0_ref.engine.prefix_files import Owner, PrefixFiles
from edge0_ref.engine.prefixes import Prefixes


def answers_kept_as_if_they_were_prompts(patch: pytest.MonkeyPatch) -> None:
    original = Prefixes.__init__

    def initialize(kept: Any, *arguments: Any, **options: Any) -> None:
        original(kept, *arguments, **options | {"steps_are_prompts": True})

    patch.setattr(Prefixes, "__init__", initialize)


def the_last_token_uncompared(patch: pytest.MonkeyPatch) -> None:
    original = prefixes.shared

    def shared(first: Any, second: Any) -> int:
        return min(original(first, second) + 1, len(first), len(second))

    patch.setattr(prefixes, "shared", shared)


def damage_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_files, "digest", lambda tensors: "")


def states_of_another_k(patch: pytest.MonkeyPatch) -> None:
    key = Owner.key.fget
    patch.setattr(Owner, "key", property(lambda owner: key(replace(owner, top_k=0))))


def nothing_leaves_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "_evict", lambda held, kept: None)


def room_is_made_afterwards(patch: pytest.MonkeyPatch) -> None:
    original = Prefixes._make_room
    patch.setattr(Prefixes, "_make_room", lambda held, nbytes, ids: original(held, 0, ids))


def the_disk_overspent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixFiles, "_spend", lambda files, newest: None)


def uses_in_memory_unknown_to_the_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixFiles, "touch", lambda files, path: True)


MUTANTS = {
    answers_kept_as_if_they_were_prompts: "ENG-080",
    the_last_token_uncompared: "ENG-080",
    damage_unseen: "ENG-081",
    states_of_another_k: "ENG-081",
    nothing_leaves_memory: "ENG-082",
    room_is_made_afterwards: "ENG-082",
    the_disk_overspent: "ENG-082",
    uses_in_memory_unknown_to_the_disk: "ENG-082",
}
