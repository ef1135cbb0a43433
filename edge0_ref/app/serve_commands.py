"""The command that serves a model to other programs: its options."""

import signal
from importlib.util import find_spec
from typing import Annotated

import typer

from edge0_ref.app.shell import (
    AdapterFolder,
    BackendName,
    CacheHome,
    ExecutorName,
    KeepBytes,
    KeepDiskBytes,
    MemoryBudget,
    ModelFolder,
    NoAdapters,
    Options,
    PackedFile,
    ReadModeName,
    SlotCount,
    cache_folder,
    command,
    model_of,
    tell,
)
from edge0_ref.errors import UsageError


@command
def serve(
    options: Options,
    model: ModelFolder = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one, which is told.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in requests; default: its folder's.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="EDGE0_API_KEY", help="Requests must carry it as a bearer token.")
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Let other machines ask without a key.")] = False,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name this server is reached by; repeatable.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A site whose pages may ask; repeatable.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of prompt and text; default: 4096 at most.")] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused.")] = 64,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds from request to the end of its answer.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds a running answer has left at the end.")
    ] = 10.0,
    max_body: Annotated[str, typer.Option(help="Longest body of a request.")] = "4MiB",
    body_seconds: Annotated[float, typer.Option(help="Seconds for a body to arrive.", hidden=True)] = 30.0,
    comment_seconds: Annotated[float, typer.Option(help="Silence in a stream.", hidden=True)] = 10.0,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    slots: SlotCount = None,
    memory: MemoryBudget = None,
    keep: KeepBytes = None,
    keep_disk: KeepDiskBytes = "2GiB",
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    cache_home: CacheHome = None,
) -> None:
    """Serve a model through OpenAI's HTTP interface."""
    check_extra()
    from edge0_ref.app.api import Model
    from edge0_ref.app.context import planned_for
    from edge0_ref.app.reuse import choose_reuse
    from edge0_ref.app.serve.application import Limits
    from edge0_ref.app.serve.guards import Access
    from edge0_ref.app.serve.server import ServeSettings, run_serve
    from edge0_ref.app.serve.sse import Patience
    from edge0_ref.contract import Observe
    from edge0_ref.engine.memory import parse_size

    reuse = choose_reuse(memory, keep, keep_disk, cache_folder(cache_home))

    def open_planned(observe: Observe) -> Model:
        return planned_for(model_of(options, context=None, reuse=reuse, observe=observe), context)

    settings = ServeSettings(
        host,
        port,
        name,
        no_auth,
        Access(api_key, [host, *(allow_host or ())], allow_origin or ()),
        Limits(parse_size(max_body), body_seconds),
        Patience(deadline, comment_seconds),
        queue,
        grace,
    )
    if run_serve(open_planned, settings, tell) == signal.SIGINT:
        raise KeyboardInterrupt


def check_extra() -> None:
    """Raises UsageError if what serving needs is not installed."""
    missing = [name for name in ("starlette", "uvicorn", "pydantic") if find_spec(name) is None]
    if missing:
        raise UsageError(f"`edge0 serve` needs {', '.join(missing)}: pip install 'edge0[serve]'")
