"""Mutants of chapter 11, reports: what a run says of a backend."""

from typing import Any

import pytest

from conformance import certificate, loading, report, vector_files
from conformance.failures import Keeper
from conformance.known_failures import stale_entries
from conformance.report import Report
from edge0_ref.app import api, backends
from edge0_ref.errors import BackendError
from tests.mutants.replacing import replace_everywhere


def unclaimed_counts_as_passed(patch: pytest.MonkeyPatch) -> None:
    original = Report.status

    def status(self: Report, requirement: str) -> str:
        found = original(self, requirement)
        return "passed" if found == "unclaimed" else found

    patch.setattr(Report, "status", status)


def every_executor_taken_to_have_slots(patch: pytest.MonkeyPatch) -> None:
    from conformance import paths  # of marks that pytest knows in a run of the suite alone

    patch.setattr(paths, "every_slot_table", paths.every_executor)


def one_passed_test_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(report, "OUTCOMES", ("passed", "FAIL", "unclaimed"))


def an_unknown_backend_is_the_reference(patch: pytest.MonkeyPatch) -> None:
    original = backends.find_backend

    def find(name: str, needs: str = "decoder") -> Any:
        try:
            return original(name, needs)
        except BackendError:
            return original("reference")

    replace_everywhere(patch, original, find)


def a_notice_goes_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api, "notice_of", lambda backend: None)


def a_report_without_versions(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, certificate.versions, lambda packages=(): {})


def an_interrupted_run_has_passed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Report, "verdict", property(lambda self: "FAIL" if self.failed or self.stale else "passed"))


def a_stale_entry_is_no_matter(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, stale_entries, lambda known, status: [])


def a_failure_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keeper, "keep", lambda self, test, cited, error: "")


def a_newer_vector_file_is_like_any_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vector_files, "VERSION", 99)


def a_backend_without_members_is_tried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loading, "check_backend", lambda name, backend: None)


MUTANTS = {
    unclaimed_counts_as_passed: "BCK-002",
    every_executor_taken_to_have_slots: "BCK-002",
    one_passed_test_is_enough: "BCK-003",
    an_unknown_backend_is_the_reference: "BCK-008",
    a_notice_goes_unheard: "BCK-011",
    a_report_without_versions: "BCK-030",
    an_interrupted_run_has_passed: "BCK-030",
    a_stale_entry_is_no_matter: "BCK-031",
    a_failure_is_not_kept: "BCK-032",
    a_newer_vector_file_is_like_any_other: "BCK-033",
    a_backend_without_members_is_tried: "BCK-034",
}
