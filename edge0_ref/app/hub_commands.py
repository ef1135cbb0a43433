"""The commands about where models come from: their options. What each does is in the file of its name."""

from typing import Annotated

import typer

from edge0_ref.app.shell import Json, command, tell


@command
def pull(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="edge0-35b, edge0-8b, or OWNER/NAME of the hub.")],
    adapters_only: Annotated[
        bool, typer.Option("--adapters-only", help="Heads and LoRA alone, for a base that is here already.")
    ] = False,
    json: Json = False,
) -> None:
    """Download a model into the hub's cache: sizes first, checks after; goes on where it was interrupted."""
    from json import dumps

    from edge0_ref.app.pull import run_pull

    did = run_pull(name, tell, adapters_only=adapters_only)
    if json:
        print(dumps(did))


@command
def models(json: Annotated[bool, typer.Option("--json", help="A JSON object a line, no table.")] = False) -> None:
    """List the models on this machine, and the two published ones."""
    from edge0_ref.app.models import run_models

    run_models(json=json)
