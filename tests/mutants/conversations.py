"""Mutants of chapter 10, conversations: in the terminal and on the page."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from edge0_ref.app import chat, sessions
from edge0_ref.app.serve.live_feed import LiveFeed, SlotPicture


def answers_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chat, "without_thought", lambda text: "")


def ctrl_c_ends_the_program(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chat.Brake, "ready", lambda brake: nullcontext())


def clearing_removes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sessions, "remove_all", lambda folder: [])


def clearing_tells_people_only(patch: pytest.MonkeyPatch) -> None:
    original = sessions.clear_all
    patch.setattr(sessions, "clear_all", lambda folder, files, json: original(folder, files, json=False))


def every_read_drawn_as_read_ahead(patch: pytest.MonkeyPatch) -> None:
    original = SlotPicture.show
    patch.setattr(SlotPicture, "show", lambda picture, needed, resident, count: original(picture, needed, resident, 0))


def layers_kept_for_nobody(patch: pytest.MonkeyPatch) -> None:
    original = LiveFeed.observe

    def observe(feed: Any, point: str, layer: int, value: Any) -> None:
        live = feed._live
        feed._live = SimpleNamespace(send=live.send)
        original(feed, point, layer, value)
        feed._live = live

    patch.setattr(LiveFeed, "observe", observe)


def what_a_text_left_behind_told_of_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveFeed, "begin", lambda feed: None)


MUTANTS = {
    answers_forgotten: "ENG-083",
    ctrl_c_ends_the_program: "ENG-083",
    clearing_removes_nothing: "ENG-084",
    clearing_tells_people_only: "ENG-084",
    every_read_drawn_as_read_ahead: "ENG-085",
    layers_kept_for_nobody: "ENG-085",
    what_a_text_left_behind_told_of_the_next: "ENG-085",
}
