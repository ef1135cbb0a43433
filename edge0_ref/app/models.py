"""`edge0 models`: which models are on this machine, how much of each, and what gets the rest."""

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edge0_ref.app.locate import (
    TIERS,
    embedded_model,
    hub_cache,
    locate,
    missing_files,
    repository_folder,
    snapshot,
)
from edge0_ref.app.report import open_console
from edge0_ref.app.shell import printable
from edge0_ref.config import read_config
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import CheckpointError
from edge0_ref.packed import SIDECAR


@dataclass(frozen=True)
class Found:
    """A model by the name that commands take. nbytes: on this machine; published: bytes of all its files, if known."""

    name: str
    source: str
    state: str
    nbytes: int
    published: int | None = None
    folder: str | None = None
    packed: bool = False
    command: str | None = None

    @property
    def size(self) -> str:
        if self.state == "complete":
            return size_text(self.nbytes) + (", packed" if self.packed else "")
        whole = "?" if self.published is None else size_text(self.published)
        return f"{size_text(self.nbytes)} of {whole}" if self.nbytes else whole


def run_models(*, json: bool, hub: Path | None = None) -> list[Found]:
    """[ENG-097] A table on stderr, or a line of JSON for each model. hub: None is the cache that the hub has."""
    hub = hub or hub_cache()
    found = list(find_models(hub))
    if json:
        for one in found:
            print(json_format.dumps(asdict(one)))
    else:
        print_models(found, hub)
    return found


def find_models(hub: Path) -> Iterator[Found]:
    """The embedded one, the tiers, and every other repository of the cache that edge0 runs."""
    folder = embedded_model()
    yield Found("(none)", "embedded", "complete", bytes_below(folder), folder=str(folder))
    for name, tier in TIERS.items():
        yield found_in(hub, name, tier.repository, tier.nbytes)
    published = {repository_folder(hub, tier.repository) for tier in TIERS.values()}
    for root in sorted(set(hub.glob("models--*--*")) - published):
        repository = root.name.removeprefix("models--").replace("--", "/")
        if runs_here(snapshot(hub, repository)):
            yield found_in(hub, repository, repository, None)


def runs_here(folder: Path | None) -> bool:
    """Whether a folder's config.json is of an architecture that edge0 knows."""
    try:
        return folder is not None and bool(read_config(folder).layers)
    except CheckpointError:
        return False


def found_in(hub: Path, name: str, repository: str, published: int | None) -> Found:
    root, pull = repository_folder(hub, repository), f"edge0 pull {name}"
    here = sum(path.stat().st_size for path in root.glob("blobs/*") if path.is_file())
    try:
        located = locate(name, hub)
    except CheckpointError:
        folder = snapshot(hub, repository)
        missing = [] if folder is None else missing_files(folder)
        files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        state = f"incomplete: {files} missing" if missing else "begun" if here else "not here"
        return Found(name, repository, state, here, published, command=pull)
    packed = (located.folder / SIDECAR).exists()
    return Found(name, repository, "complete", bytes_below(located.folder), published, str(located.folder), packed)


def bytes_below(folder: Path) -> int:
    """Of a folder's files; links count as what they lead to."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def print_models(found: list[Found], hub: Path) -> None:
    from rich.table import Table

    table = Table(title=printable(f"hub cache {hub}"), title_justify="left")
    for title in ("MODEL", "from", "here", "size", "get it by"):
        table.add_column(title)
    for one in found:
        table.add_row(one.name, one.source, one.state, one.size, one.command or "")
    open_console(160).print(table)
