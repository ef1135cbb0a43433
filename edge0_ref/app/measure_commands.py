"""The commands that make models to measure, and measure: their options. What each does is in the file of its name."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge0_ref.app.shell import (
    AdapterFolder,
    BackendName,
    CacheHome,
    DtypeName,
    Json,
    ModelFolder,
    Options,
    PackedFile,
    ReadModeName,
    app,
    cache_folder,
    carrying,
    choose_fields,
    choose_numbers,
    command,
    tell,
)
from edge0_ref.errors import UsageError

if TYPE_CHECKING:
    from edge0_ref.app.scenario import Case


@command
def synth(
    name: Annotated[str, typer.Argument(metavar="NAME", help="qwen3.6-35b-a3b or ling-3.0-tiny.")],
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The folder to make.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers; default: all.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts a layer; default: as published.")] = None,
    set_fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=N", help="Change a field of config.json; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same bytes.")] = 0,
    tokenizer: Annotated[bool, typer.Option("--tokenizer", help="A tokenizer too, one token a byte.")] = False,
    adapters: Annotated[bool, typer.Option(help="Prerouter heads and LoRA of the published shape.")] = True,
    json: Json = False,
) -> None:
    """Write a checkpoint of a published model's names, shapes and dtypes, with random weights."""
    from json import dumps

    from edge0_ref.app.synth import run_synth

    changes = choose_fields(set_fields or [], num_hidden_layers=layers, num_experts=experts)
    made = run_synth(name, out, changes, seed, tokenizer=tokenizer, adapters=adapters)
    tell(f"{made['model']}: {made['bytes']:,} bytes in {made['files']} files, {made['seconds']} s, {made['gb_s']} GB/s")
    if json:
        print(dumps(made))


@command
def pack(
    model: ModelFolder = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where the file goes; default: MODEL.")] = None,
    json: Json = False,
) -> None:
    """Write the sidecar of a model, one aligned read an expert; or check the one that is there."""
    from json import dumps

    from edge0_ref.app.pack import run_pack

    did = run_pack(model, out, tell)
    tell(f"{did['sidecar']}: {did['did']}, {did['bytes_done']:,} bytes in {did['seconds']} s, {did['gb_s']} GB/s")
    if json:
        print(dumps(did))


@command
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As everywhere; default: the two published.")
    ] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token; default: as the adapters say.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="As everywhere; default: all that are installed, and the fastest is expected.")
    ] = None,
    cache_home: CacheHome = None,
) -> None:
    """Measure memory, kernels and disk, and say what to expect of a model; the best read mode is remembered."""
    from edge0_ref.app.doctor import run_doctor

    run_doctor(model, k, backend, cache_folder(cache_home))


@command
def bench(
    options: Options,
    model: ModelFolder = None,
    scenario: Annotated[
        str | None, typer.Option(help="on-demand, prefetch (default), resident, exact or oracle; several: a,b.")
    ] = None,
    k: Annotated[str | None, typer.Option(help="Experts a token, or several, 2,4,8; default: by adapters.")] = None,
    routing: Annotated[str, typer.Option(help="model; simulated: uniform, or replay:reuse=0.45.")] = "model",
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Page cache dropped, or all run once before.")] = True,
    cap: Annotated[str | None, typer.Option(help="Memory of the process and its page cache, such as 3GiB.")] = None,
    backend: BackendName = "reference",
    dtype: DtypeName = None,
    tokens: Annotated[int, typer.Option(help="Decode steps to count.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    slots: Annotated[int | None, typer.Option(help="Expert slots a layer; default: by plan.")] = None,
    adapters: AdapterFolder = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's tables, beside the same measured here.")] = False,
    picture: Annotated[str | None, typer.Option(help="A picture of the steps, .svg.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Only the lines of JSON, no table.")] = False,
    cache_home: CacheHome = None,
) -> None:
    """Measure decoding: a table, and a line of JSON for each case."""
    from edge0_ref.app.bench import run_bench
    from edge0_ref.app.bench_paper import run_paper

    drawn = None if picture is None else Path(picture)
    if paper:
        if scenario or k:
            raise UsageError("--paper runs the scenarios and Ks of the paper's tables: without --scenario and --k")
        run_paper(case_of(options, scenario="prefetch"), drawn, tell, table=not json)
        return
    scenarios, top_ks = (scenario or "prefetch").split(","), choose_numbers("--k", k)
    cases = [case_of(options, scenario=name, k=each) for each in top_ks for name in scenarios]
    run_bench(cases, drawn, tell, table=not json)


@command
def trace(
    options: Options,
    model: ModelFolder = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="The timeline, .json, for ui.perfetto.dev.")] = None,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="The same as a picture, .svg.")] = None,
    scenario: Annotated[str, typer.Option(help="As of `edge0 bench`.")] = "prefetch",
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token; default: as the adapters say.")] = None,
    routing: Annotated[str, typer.Option(help="As of `edge0 bench`.")] = "model",
    backend: BackendName = "reference",
    dtype: DtypeName = None,
    tokens: Annotated[int, typer.Option(help="Decode steps to record.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 16,
    cap: Annotated[str | None, typer.Option("--memory", help="Budget of the whole process, such as 3GiB.")] = None,
    slots: Annotated[int | None, typer.Option(help="Expert slots a layer; default: by plan.")] = None,
    adapters: AdapterFolder = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    json: Json = False,
    cache_home: CacheHome = None,
) -> None:
    """Record one decode's timeline: reads, waits, and compute of every layer and token."""
    from json import dumps

    from edge0_ref.app.trace import run_trace

    told = run_trace(case_of(options), out, picture, tell)
    if json:
        print(dumps(told))


def case_of(options: Options, **changes: str | int | None) -> "Case":
    """What a command is to measure: the options that have the name of a field of a case are that field."""
    from edge0_ref.app.scenario import Case
    from edge0_ref.engine.memory import parse_size

    options = {**options, **changes}
    cap, cache = options["cap"], cache_folder(options["cache_home"])
    options |= {"cap": None if cap is None else parse_size(cap), "cache": None if cache is None else str(cache)}
    return Case(**{field.name: options[field.name] for field in fields(Case) if field.name in options})


def conformance(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Hold a backend to the specification; options as of `python -m conformance`."""
    from importlib import import_module

    raise typer.Exit(import_module("conformance.__main__").main(arguments or []))


app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})(carrying(conformance))
