"""Mutants of chapter 12: losses, one head's learning, and runs that stop and go on."""

import json
from typing import Any

import numpy as np
import pytest

from edge0_ref import adapters, head_training, losses
from edge0_ref.app import train, train_files
from edge0_ref.contract import PrerouterHead


def kl_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    forward = losses.forward_kl
    patch.setattr(losses, "forward_kl", lambda teacher, student: forward(student, teacher))


def the_tail_left_out(patch: pytest.MonkeyPatch) -> None:
    def top_only(teacher: Any, student: Any, k: int) -> Any:
        log_p, log_q = losses.log_softmax(teacher), losses.log_softmax(student)
        top = np.argsort(-teacher, axis=1, kind="stable")[:, :k]
        p, q = np.take_along_axis(log_p, top, 1), np.take_along_axis(log_q, top, 1)
        return (np.exp(q) * (q - p)).sum(axis=1), np.exp(log_q)

    patch.setattr(losses, "tail_reverse_kl", top_only)


def each_tail_class_with_its_own_ratio(patch: pytest.MonkeyPatch) -> None:
    def all_classes(teacher: Any, student: Any, k: int) -> Any:
        log_p, log_q = losses.log_softmax(teacher), losses.log_softmax(student)
        loss = (np.exp(log_q) * (log_q - log_p)).sum(axis=1)
        return loss, np.exp(log_q) * (log_q - log_p - loss[:, None])

    patch.setattr(losses, "tail_reverse_kl", all_classes)


def gelu_with_half_a_derivative(patch: pytest.MonkeyPatch) -> None:
    def backward(head: PrerouterHead, features: Any, seen: Any, slope: Any) -> PrerouterHead:
        inner = (slope @ head.fc2) * head_training.normal_mass(seen.inner)
        return PrerouterHead(fc1=inner.T @ features, fc2=slope.T @ seen.bent, linear=slope.T @ features)

    patch.setattr(head_training, "backward", backward)


def a_cold_start(patch: pytest.MonkeyPatch) -> None:
    warm = head_training.warm_start
    patch.setattr(head_training, "warm_start", lambda router, *others, **named: warm(0 * router, *others, **named))


def a_step_done_twice(patch: pytest.MonkeyPatch) -> None:
    resume = train_files.RunFolder.resume

    def one_back(self: Any, run: Any) -> Any:
        held = resume(self, run)
        return held and (held[0] - 1, held[1])

    patch.setattr(train_files.RunFolder, "resume", one_back)


def a_stage_trained_twice(patch: pytest.MonkeyPatch) -> None:
    run_stage = train.run_stage

    def forgetful(job: Any, settings: Any) -> Any:
        trained = run_stage(job, settings)
        train_files.RunFolder(job.out).forget(settings.stage)
        return trained

    patch.setattr(train, "run_stage", forgetful)


def nan_without_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "NonFiniteError", ZeroDivisionError)


def any_checkpoint_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train_files.Run, "as_json", lambda self: {"settings": {}})


def any_teacher_will_do(patch: pytest.MonkeyPatch) -> None:
    opened = train.open_teacher
    patch.setattr(train, "open_teacher", lambda folder, student: opened(student.folder, student))


def alpha_of_the_settings(patch: pytest.MonkeyPatch) -> None:
    write = train.write_adapters

    def told_wrong(path: Any, heads: Any, loras: Any, told: Any) -> None:
        write(path, heads, loras, {**told, "alpha": 32.0} if loras else told)

    patch.setattr(train, "write_adapters", told_wrong)


def any_base_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapters, "check_base", lambda checkpoint, folder, adapters: None)


def a_line_of_the_log_joined_to_a_cut_one(patch: pytest.MonkeyPatch) -> None:
    def note(folder: Any, entry: Any) -> None:
        with (folder.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")

    patch.setattr(train_files.RunFolder, "note", note)


MUTANTS = {
    kl_the_other_way_round: "TRN-001",
    the_tail_left_out: "TRN-002",
    each_tail_class_with_its_own_ratio: "TRN-002",
    gelu_with_half_a_derivative: "TRN-003",
    a_cold_start: "TRN-003",
    a_step_done_twice: "TRN-004",
    a_stage_trained_twice: "TRN-004",
    a_line_of_the_log_joined_to_a_cut_one: "TRN-004",
    nan_without_a_checkpoint: "TRN-005",
    any_checkpoint_will_do: "TRN-006",
    any_teacher_will_do: "TRN-006",
    alpha_of_the_settings: "TRN-007",
    any_base_will_do: "TRN-007",
}
