"""Which folder a MODEL is: a folder, the name of a tier, or a repository that the hub's cache on this machine holds.

The cache is huggingface_hub's: `models--<owner>--<name>` holds each content once, in `blobs`, and `snapshots/<commit>`
of symbolic links to them under the names of files. A sidecar lies in the snapshot's folder: it belongs to that commit,
and goes when the hub's own tools remove it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from edge0_ref.adapter_headers import default_adapters
from edge0_ref.errors import CheckpointError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Tier:
    """A published model. repository: weights and adapters in one place, of `nbytes`; bases: its weights elsewhere."""

    repository: str
    nbytes: int
    bases: tuple[str, ...] = ()


TIERS: Mapping[str, Tier] = MappingProxyType(
    {
        "edge0-35b": Tier("Edge0/Edge0-35B-A3B-preview", 19_731_249_723, ("mlx-community/Qwen3.6-35B-A3B-4bit",)),
        "edge0-8b": Tier("Edge0/Edge0-8B-A1B-preview", 4_576_122_089),
    }
)


@dataclass(frozen=True)
class Located:
    """Where a model's files are, and its adapters if it has any. note: what a user should know of that."""

    folder: Path
    adapters: Path | None = None
    note: str = ""


def embedded_model() -> Path:
    """The model that comes with edge0."""
    return Path(str(files("edge0_ref"))) / "assets" / "kjv-moe"


def locate(model: Path | str | None, hub: Path | None = None) -> Located:
    """[ENG-095] The folder of a MODEL; None is the embedded one. hub: the hub's cache; None is where the hub has it.

    A folder of that name comes first. Raises CheckpointError, saying where was looked and what gets the model.
    """
    if model == "":  # pathlib takes it for the folder this process is in
        raise CheckpointError(f"MODEL is '', wanted a folder, a tier ({', '.join(TIERS)}) or OWNER/NAME of the hub")
    folder = embedded_model() if model is None else Path(model)
    if folder.is_dir():
        return Located(folder, default_adapters(folder))
    name = str(model)
    tier = TIERS.get(name)
    if tier is None and not REPOSITORY.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder, and no tier ({', '.join(TIERS)}) or OWNER/NAME of the hub")
    hub = hub or hub_cache()
    return find_repository(name, hub) if tier is None else find_tier(name, tier, hub)


def find_repository(name: str, hub: Path) -> Located:
    """A repository's snapshot with all its weights. Raises CheckpointError."""
    folder = snapshot(hub, name)
    if folder is None:
        raise CheckpointError(f"{name}: no such folder, and not in {hub}; `edge0 pull {name}` gets it from the hub")
    if missing := missing_files(folder):
        what = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        raise CheckpointError(f"{name}: incomplete in {hub}, without {what}; `edge0 pull {name}` gets the rest")
    return Located(folder, default_adapters(folder))


def find_tier(name: str, tier: Tier, hub: Path) -> Located:
    """The tier's own repository if its weights are here, else a base that is, with the tier's adapters."""
    own = snapshot(hub, tier.repository)
    if own is not None and missing_files(own) and (adapters := default_adapters(own)):
        for base in tier.bases:
            folder = snapshot(hub, base)
            if folder is not None and not missing_files(folder):
                return Located(folder, adapters, f"{name}: weights of {base}, adapters of {tier.repository}")
    if own is None:
        raise CheckpointError(
            f"{name}: no such folder, and {tier.repository} is not in {hub}; `edge0 pull {name}` gets it from the hub"
        )
    return find_repository(tier.repository, hub)


def hub_cache() -> Path:
    """Where the hub keeps what it downloads; which variables move it is its own affair."""
    try:
        from huggingface_hub import constants
    except ImportError:  # the extra `hub` is not installed: where it would be by default
        return Path("~/.cache/huggingface/hub").expanduser()
    return Path(constants.HF_HUB_CACHE)


def repository_folder(hub: Path, repository: str) -> Path:
    return hub / f"models--{repository.replace('/', '--')}"


def snapshot(hub: Path, repository: str) -> Path | None:
    """The newest files of a repository that are here: what `main` was when it was last pulled, or what there is."""
    folder = repository_folder(hub, repository)
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    if commit and (named := folder / "snapshots" / commit).is_dir():
        return named
    others = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return max(others, key=lambda path: path.stat().st_mtime, default=None)


def missing_files(folder: Path) -> list[str]:
    """What a model's folder lacks of config.json and shards; a link to nothing is missing."""
    names = {"config.json", *shard_names(folder)}
    return sorted(name for name in names if not (folder / name).exists())


def shard_names(folder: Path) -> set[str]:
    """The files of a model's weights. One without an index has one file; an index that makes no sense names none."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {"model.safetensors"}
    try:
        return {str(name) for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()
