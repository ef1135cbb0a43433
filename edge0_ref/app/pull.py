"""`edge0 pull`: a repository of the hub, into the cache that the hub's own tools use too.

huggingface_hub knows names, tokens, redirects and retries; there, though, a file whose download was interrupted begins
anew. Here it grows as `blobs/<digest>.incomplete`, another run goes on where it ended, and it gets its name when size
and digest are what the hub says. `refs/main` follows when all files are there: until then the last whole commit stays.
"""

import errno
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from edge0_ref.adapter_headers import BESIDE_A_MODEL, default_adapters
from edge0_ref.adapters import adapters_of
from edge0_ref.app.locate import REPOSITORY, TIERS, hub_cache, repository_folder
from edge0_ref.app.pack import check_space, writing
from edge0_ref.app.progress import Advance, byte_bar
from edge0_ref.app.report import print_table
from edge0_ref.config import read_config
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import UsageError
from edge0_ref.inventory import open_checkpoint

WANTED = re.compile(r"(adapters/)?\w[\w.-]*\.(json|jinja|safetensors)")  # of a model: no code, no pictures
ADAPTERS = re.compile(rf"adapters/.*|{'|'.join(pattern.replace('*', '.*') for pattern in BESIDE_A_MODEL)}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
CHUNK = 2**20

Notify = Callable[[str], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub tells of it. digest: SHA-256 of large files, the id of Git's blob of small ones."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Place:
    """One commit of a repository in the hub's cache."""

    repository: str
    commit: str
    hub: Path

    @property
    def root(self) -> Path:
        return repository_folder(self.hub, self.repository)

    @property
    def folder(self) -> Path:
        """Where the files are under their own names."""
        return self.root / "snapshots" / self.commit

    def blob(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def begun(self, file: RemoteFile) -> int:
        """Bytes of a file that are here, whole or not."""
        paths = [path for path in (self.blob(file), self.partial(file)) if path.exists()]
        return min(paths[0].stat().st_size, file.nbytes) if paths else 0

    def link(self, file: RemoteFile) -> None:
        """Give a blob its file's name."""
        name, blob = self.folder / file.name, self.blob(file)
        if name.is_symlink() or name.exists():
            if name.resolve() == blob.resolve():
                return
            name.unlink()
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(os.path.relpath(blob, name.parent))

    def finish(self) -> None:
        """From now on this commit is what the repository's name means here."""
        (self.root / "refs").mkdir(exist_ok=True)
        aside = self.root / "refs" / f"main.{os.getpid()}"
        aside.write_text(self.commit, "utf-8")
        aside.replace(self.root / "refs" / "main")


def run_pull(
    name: str, notify: Notify, *, adapters_only: bool = False, hub: Path | None = None, endpoint: str | None = None
) -> dict[str, Any]:
    """[ENG-096] Show sizes, download what is missing, check everything; what was done, for a line of JSON.

    name: a tier or OWNER/NAME; hub, endpoint: None is what huggingface_hub has. Raises UsageError, and what opening the
    model raises.
    """
    repository = TIERS[name].repository if name in TIERS else name
    if not REPOSITORY.fullmatch(repository):
        raise UsageError(f"{name!r}: wanted a tier ({', '.join(TIERS)}) or OWNER/NAME of the hub")
    start = time.perf_counter()
    with named_errors(repository):
        commit, files = list_files(repository, endpoint, adapters_only)
        place = Place(repository, commit, hub or hub_cache())
        (place.root / "blobs").mkdir(parents=True, exist_ok=True)
        drop_damaged(place, files, notify)
        missing = [file for file in files if not place.blob(file).exists()]
        needed = sum(file.nbytes - place.begun(file) for file in missing)
        show(place, files, needed, notify)
        check_space(place.root, needed)
        download(place, files, missing, endpoint)
        place.finish()
    if not adapters_only:
        checkpoint = open_checkpoint(place.folder)
        adapters_of(checkpoint, default_adapters(place.folder))
    notify(f"{place.folder}: {len(files)} files, all as the hub has them")
    return {
        "repository": repository,
        "commit": commit,
        "folder": str(place.folder),
        "files": len(files),
        "bytes": sum(file.nbytes for file in files),
        "bytes_downloaded": needed,
        "seconds": round(time.perf_counter() - start, 3),
    }


@contextmanager
def named_errors(repository: str) -> Iterator[None]:
    """What can go wrong between here and the hub, each in a line that says what to do."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise UsageError("`edge0 pull` needs huggingface_hub: pip install 'edge0[hub]'") from None
    goes_on = "what has come stays, and another `edge0 pull` goes on from there"
    try:
        yield
    except errors.GatedRepoError:
        raise UsageError(f"{repository}: gated; accept its terms on its page, then `hf auth login`") from None
    except errors.HFValidationError as error:
        raise UsageError(f"{repository}: no name that the hub could have: {error}") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{repository}: the hub has no such repository, or shows it only after `hf auth login`"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "a token that may read it is needed: `hf auth login`" if status in (401, 403) else goes_on
        raise UsageError(f"{repository}: the hub answers {status}; {hint}") from None
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise UsageError(f"{repository}: the hub cannot be reached ({error}); {goes_on}") from None
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise UsageError(f"{repository}: {what}; {goes_on}") from None


def list_files(repository: str, endpoint: str | None, adapters_only: bool) -> tuple[str, list[RemoteFile]]:
    """The newest commit and its files that edge0 has a use for, small ones first. Raises UsageError."""
    from huggingface_hub import HfApi

    told = HfApi(endpoint=endpoint, library_name="edge0").model_info(repository, files_metadata=True)
    files = []
    for sibling in told.siblings or ():
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if not WANTED.fullmatch(sibling.rfilename) or (adapters_only and not ADAPTERS.fullmatch(sibling.rfilename)):
            continue
        if sibling.size is None or not DIGEST.fullmatch(digest or ""):
            raise UsageError(f"{repository}: the hub tells neither size nor digest of {sibling.rfilename}")
        files.append(RemoteFile(sibling.rfilename, sibling.size, cast(str, digest)))
    if not files or not DIGEST.fullmatch(told.sha or ""):
        what = "adapter files (lora_*, prerouter_*)" if adapters_only else "model files (.safetensors, .json)"
        raise UsageError(f"{repository}: holds no {what}")
    files.sort(key=lambda file: (file.name.endswith(".safetensors"), file.name))
    return cast(str, told.sha), files


def drop_damaged(place: Place, files: Sequence[RemoteFile], notify: Notify) -> None:
    """What is here already is held against its digest as well; what differs is downloaded again."""
    here = [file for file in files if place.blob(file).exists()]
    with byte_bar("checking what is here", sum(file.nbytes for file in here)) as advance:
        for file in here:
            if digest_of(place.blob(file), file.digest, advance) != file.digest:
                notify(f"{file.name}: what is here is damaged, and is downloaded again")
                place.blob(file).unlink()


def digest_of(path: Path, like: str, advance: Advance = lambda count: None) -> str:
    """The digest of a file, of the kind that `like` is: SHA-256, or Git's SHA-1 over a header and the content."""
    head = f"blob {path.stat().st_size}\0".encode()
    state = hashlib.sha256() if len(like) == 64 else hashlib.sha1(head, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
            advance(len(chunk))
    return state.hexdigest()


def show(place: Place, files: Sequence[RemoteFile], needed: int, notify: Notify) -> None:
    """What there is to download, and whether it fits."""
    rows: list[tuple[str, int | str]] = []
    for file in files:
        begun = place.begun(file)
        state = "here" if place.blob(file).exists() else f"{size_text(begun)} here" if begun else ""
        rows.append((file.name, ", ".join(filter(None, (size_text(file.nbytes), state)))))
    rows += [
        ("all", sum(file.nbytes for file in files)),
        ("to download", needed),
        ("free on the disk", shutil.disk_usage(place.root).free),
    ]
    notify(f"{place.repository}, commit {place.commit[:12]}, into {place.hub}")
    print_table("files", rows)


def download(place: Place, files: Sequence[RemoteFile], missing: Sequence[RemoteFile], endpoint: str | None) -> None:
    """File by file; a model that edge0 does not run is refused by its config.json, before its weights are loaded."""
    total, begun = sum(file.nbytes for file in missing), sum(place.begun(file) for file in missing)
    with byte_bar(f"downloading {place.repository}", total, begun) as advance:
        for file in files:
            if file in missing:
                fetch(place, file, endpoint, advance)
            place.link(file)
            if file.name == "config.json":
                read_config(place.folder)


def fetch(place: Place, file: RemoteFile, endpoint: str | None, advance: Advance) -> None:
    """One file, from where it ended. Raises UsageError when its content is not what the hub says."""
    partial = place.partial(file)
    with writing(partial) as descriptor, GrowingFile(descriptor, advance) as growing:
        if os.fstat(descriptor).st_size > file.nbytes:
            growing.truncate(0)
        grow(growing, place, file, endpoint)
        os.fsync(descriptor)
        if digest_of(partial, file.digest) != file.digest:
            partial.unlink()
            raise UsageError(f"{place.repository}: {file.name} came with another content than the hub says; it is gone")
        partial.replace(place.blob(file))


def grow(growing: "GrowingFile", place: Place, file: RemoteFile, endpoint: str | None) -> None:
    """Ask for what is missing, again and again as long as each time something comes."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    disable_progress_bars()  # there is one already, of all files
    url = hf_hub_url(place.repository, file.name, revision=place.commit, endpoint=endpoint)
    headers = build_hf_headers(library_name="edge0") | {"Accept-Encoding": "identity"}  # ranges are of the file itself
    target = cast(BinaryIO, growing)
    while True:
        done = growing.seek(0, os.SEEK_END)
        try:
            return http_get(url, target, resume_size=done, headers=headers, expected_size=file.nbytes)
        except HTTPError:
            if growing.seek(0, os.SEEK_END) == done:
                raise


class GrowingFile(io.FileIO):
    """What the hub's downloader writes to: tells how much came, and how much was thrown away to begin anew."""

    def __init__(self, descriptor: int, advance: Advance) -> None:
        super().__init__(descriptor, "r+b", closefd=False)
        self._advance = advance

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:
            count = super().write(left)
            left = left[count:]
            self._advance(count)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        self._advance(size - os.fstat(self.fileno()).st_size)
        return super().truncate(size)
