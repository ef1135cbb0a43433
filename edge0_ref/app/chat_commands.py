"""The commands about conversations: their options."""

from typing import Annotated

import typer

from edge0_ref.app.shell import (
    AdapterFolder,
    BackendName,
    CacheHome,
    ExecutorName,
    Json,
    KeepBytes,
    KeepDiskBytes,
    ModelFolder,
    NoAdapters,
    PackedFile,
    ReadModeName,
    cache_folder,
    command,
    tell,
)


@command
def chat(
    model: ModelFolder = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No chat template: go on from the text so far.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the best; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one for each answer.")] = None,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    memory: Annotated[str | None, typer.Option(help="Budget of the whole process, 3GiB.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a conversation; default: up to 4096.")] = None,
    keep: KeepBytes = None,
    keep_disk: KeepDiskBytes = "2GiB",
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    cache_home: CacheHome = None,
) -> None:
    """Talk with a model: Ctrl-C stops an answer, Ctrl-D leaves, /help says more."""
    from edge0_ref.app.api import open_model
    from edge0_ref.app.chat import Brake, Chat, run_chat
    from edge0_ref.app.context import planned_for
    from edge0_ref.app.reuse import choose_reuse
    from edge0_ref.engine.sampling import SamplingSettings
    from edge0_ref.engine.session import check_limits

    brake, cache = Brake(), cache_folder(cache_home)
    check_limits(max_tokens, ())
    settings = SamplingSettings(temperature, top_k, top_p, min_p, seed=seed)
    with (
        open_model(
            model,
            backend=backend,
            adapters=adapters,
            use_adapters=not no_adapters,
            memory=memory,
            executor=executor,
            read_mode=read_mode,
            packed=packed,
            reuse=choose_reuse(memory, keep, keep_disk, cache),
            observe=brake.observe,
            cache=cache,
            notify=tell,
        ) as opened,
        planned_for(opened, context) as planned,
    ):
        run_chat(Chat(planned, brake, settings, max_tokens, system, plain), cache and cache / "chat-history")


@command
def sessions(
    clear: Annotated[bool, typer.Option("--clear", help="Remove them all.")] = False,
    json: Json = False,
    cache_home: CacheHome = None,
) -> None:
    """List the prefixes of conversations that are kept on the disk."""
    from edge0_ref.app.reuse import FOLDER
    from edge0_ref.app.sessions import run_sessions
    from edge0_ref.errors import UsageError

    cache = cache_folder(cache_home)
    if cache is None:
        raise UsageError("there is no home folder, so nothing is kept")
    run_sessions(cache / FOLDER, clear=clear, json=json)
