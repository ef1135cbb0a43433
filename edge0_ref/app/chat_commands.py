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
    MemoryBudget,
    MinP,
    ModelFolder,
    NoAdapters,
    Options,
    PackedFile,
    ReadModeName,
    Temperature,
    TopK,
    TopP,
    cache_folder,
    command,
    model_of,
)


@command
def chat(
    options: Options,
    model: ModelFolder = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="No chat template: go on from the text so far.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one for each answer.")] = None,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    memory: MemoryBudget = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a conversation; default: up to 4096.")] = None,
    keep: KeepBytes = None,
    keep_disk: KeepDiskBytes = "2GiB",
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    cache_home: CacheHome = None,
) -> None:
    """Talk with a model: Ctrl-C stops an answer, Ctrl-D leaves, /help says more."""
    from edge0_ref.app.chat import Brake, Chat, run_chat
    from edge0_ref.app.context import planned_for
    from edge0_ref.app.reuse import choose_reuse
    from edge0_ref.engine.prompts import check_limits
    from edge0_ref.engine.sampling import SamplingSettings

    brake, cache = Brake(), cache_folder(cache_home)
    check_limits(max_tokens, ())
    settings = SamplingSettings(temperature, top_k, top_p, min_p, seed=seed)
    reuse = choose_reuse(memory, keep, keep_disk, cache)
    with planned_for(model_of(options, context=None, reuse=reuse, observe=brake.observe), context) as planned:
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
