"""Mutants of where a model is and how it comes to this machine."""

from pathlib import Path
from typing import Any

import pytest

from edge0_ref import adapter_headers
from edge0_ref.app import locate, models, pull
from tests.mutants.replacing import replace_everywhere


def every_safetensors_file_an_adapter(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, adapter_headers.adapter_files, lambda folder: sorted(folder.glob("*.safetensors")))


def a_tier_without_its_adapters(patch: pytest.MonkeyPatch) -> None:
    original = locate.locate
    replace_everywhere(patch, original, lambda model, hub=None: locate.Located(original(model, hub).folder))


def weights_that_lack_a_shard_located(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, locate.missing_files, lambda folder: [])


def a_download_that_begins_anew(patch: pytest.MonkeyPatch) -> None:
    original = pull.fetch

    def fetch(place: Any, file: Any, *others: Any) -> None:
        place.partial(file).unlink(missing_ok=True)
        original(place, file, *others)

    patch.setattr(pull, "fetch", fetch)


def digests_never_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pull, "digest_of", lambda path, like, advance=None: like)


def the_size_of_the_disk_unasked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pull, "check_space", lambda path, needed: None)


def all_that_was_begun_is_complete(patch: pytest.MonkeyPatch) -> None:
    original = models.found_in

    def found_in(hub: Path, name: str, *others: Any) -> models.Found:
        found = original(hub, name, *others)
        return models.Found(found.name, found.source, "complete", found.nbytes)

    patch.setattr(models, "found_in", found_in)


MUTANTS = {
    every_safetensors_file_an_adapter: "PRE-019",
    a_tier_without_its_adapters: "ENG-095",
    weights_that_lack_a_shard_located: "ENG-095",
    a_download_that_begins_anew: "ENG-096",
    digests_never_compared: "ENG-096",
    the_size_of_the_disk_unasked: "ENG-096",
    all_that_was_begun_is_complete: "ENG-097",
}
