"""The command `edge0`: options, and how errors leave the process. What a command does is in the file of its name.

[ENG-065] Exit codes: 0; 2 for every error that edge0 names, in one line on stderr; 130 after Ctrl-C; 141 if nobody
reads the output any more. Heavy modules are imported by the commands that need them: the first token comes soon.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from edge0_ref.errors import Edge0Error

app = typer.Typer(
    help="Mixture-of-Experts models that do not fit in memory, streamed from the SSD.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelFolder = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model folder; default: the embedded one.")]
PromptText = Annotated[str | None, typer.Option("--prompt", help="The text to go on from.")]
PromptIds = Annotated[str | None, typer.Option("--prompt-ids", help="The same as token ids: 5,6,7.")]
BackendName = Annotated[str, typer.Option("--backend", help="A backend's name, or package.module:factory.")]
AdapterFolder = Annotated[
    str | None, typer.Option("--adapters", help="Adapter folder; default: MODEL/adapters, if it is there.")
]
NoAdapters = Annotated[bool, typer.Option("--no-adapters", help="Run without prerouter heads and LoRA.")]
ExecutorName = Annotated[str, typer.Option("--executor", help="exact, staged, hot or whole_layer.")]
ReadModeName = Annotated[
    str | None, typer.Option("--read-mode", help="mmap, pread or direct; default: as `edge0 doctor` found.")
]
PackedFile = Annotated[
    str | None,
    typer.Option("--packed", help="Sidecar of `edge0 pack`, or its folder; default: MODEL/experts.edge0; or none."),
]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of stdout.")]


def main() -> NoReturn:
    """Entry point of the command."""
    # a kernel's idle thread soon goes to sleep: by default it spins for milliseconds on a core that readers could use
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = run_command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # nobody reads stdout any more: quiet, with the code of SIGPIPE; Python must not try to flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def run_command(arguments: list[str]) -> int:
    """The exit code of a command, with named errors told. Any other exception is a bug and keeps its traceback."""
    try:
        code = app(args=arguments or ["--help"], prog_name="edge0", standalone_mode=False)
    except CarriedError as leaving:
        raise leaving.reason from None
    except Edge0Error as error:
        return fail(str(error))
    except Exception as error:
        # what typer raises for a wrong command line has this method; its classes move between versions
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return fail(message())
    return code if isinstance(code, int) else 0


class CarriedError(Exception):
    """Carries Ctrl-C and a broken pipe past typer, which would turn them into exit codes of its own."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command."""

    @wraps(function)
    def guarded(**options: Any) -> None:
        try:
            function(**options)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise CarriedError(error) from error

    app.command()(guarded)
    return function


def fail(message: str) -> int:
    """One line on stderr."""
    print(f"edge0: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def tell(text: str) -> None:
    """Something to know, on stderr."""
    for line in text.splitlines():
        print(f"edge0: {line}", file=sys.stderr, flush=True)


@command
def generate(
    model: ModelFolder = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass; 1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the best; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one, which is reported.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    slots: Annotated[int | None, typer.Option(help="Expert slots a layer; default: by plan.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget of the whole process, 3GiB.")] = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="A table of what it cost, on stderr.")] = False,
) -> None:
    """Generate text."""
    from edge0_ref.app.api import open_model
    from edge0_ref.app.generate import run_generate
    from edge0_ref.engine.sampling import SamplingSettings

    settings = SamplingSettings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    )
    with open_model(
        model,
        backend=backend,
        adapters=adapters,
        use_adapters=not no_adapters,
        memory=memory,
        executor=executor,
        slots=slots,
        read_mode=read_mode,
        packed=packed,
        cache=cache_folder(),
        notify=tell,
    ) as opened:
        chosen = choose_prompt(prompt, prompt_ids)
        run_generate(opened, chosen, max_tokens, settings, tuple(stop or ()), chat=chat, json=json, stats=stats)


@command
def logits(
    model: ModelFolder = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    out: Annotated[str | None, typer.Option(help="The file to write, .safetensors.")] = None,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
) -> None:
    """Write the logits of every token of a prompt: tensor `logits` [tokens, vocab], float32."""
    from edge0_ref.app.api import open_model
    from edge0_ref.app.logits import run_logits

    with open_model(
        model,
        backend=backend,
        adapters=adapters,
        use_adapters=not no_adapters,
        executor=executor,
        read_mode=read_mode,
        packed=packed,
        cache=cache_folder(),
        notify=tell,
    ) as opened:
        run_logits(opened, choose_prompt(prompt, prompt_ids), out)


@command
def inspect(
    model: ModelFolder = None,
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    packed: PackedFile = None,
    json: Json = False,
) -> None:
    """Show what a model folder holds: architecture, tensors, quantisation, experts, adapters, skipped tensors."""
    from edge0_ref.app.api import open_model
    from edge0_ref.app.inspect import run_inspect

    with open_model(model, adapters=adapters, use_adapters=not no_adapters, packed=packed, notify=tell) as opened:
        run_inspect(opened, json=json)


@command
def step(
    model: ModelFolder = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    layer: Annotated[int, typer.Option(help="The layer to watch.")] = 0,
    backend: BackendName = "reference",
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
) -> None:
    """Show one decoded token's way through one layer."""
    from edge0_ref.app.step import run_step

    run_step(
        choose_prompt(prompt, prompt_ids),
        layer,
        folder=model,
        backend=backend,
        adapters=adapters,
        use_adapters=not no_adapters,
        executor=executor,
        notify=tell,
    )


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

    from edge0_ref.app.api import embedded_model
    from edge0_ref.app.pack import run_pack

    did = run_pack(embedded_model() if model is None else Path(model), out, tell)
    tell(f"{did['sidecar']}: {did['did']}, {did['bytes_done']:,} bytes in {did['seconds']} s, {did['gb_s']} GB/s")
    if json:
        print(dumps(did))


@command
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model folder; default: the two published.")
    ] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token; default: as the adapters say.")] = None,
    backend: BackendName = "reference",
) -> None:
    """Measure memory, kernels and disk, and say what to expect of a model; the best read mode is remembered."""
    from edge0_ref.app.doctor import run_doctor

    run_doctor(None if model is None else Path(model), k, backend, cache_folder())


@command
def bench(
    model: ModelFolder = None,
    scenario: Annotated[
        str, typer.Option(help="on-demand, prefetch, resident, exact or oracle; several: a,b.")
    ] = "prefetch",
    k: Annotated[str | None, typer.Option(help="Experts a token, or several, 2,4,8; default: by adapters.")] = None,
    routing: Annotated[str, typer.Option(help="model; simulated: uniform, or replay:reuse=0.45.")] = "model",
    cold: Annotated[bool, typer.Option("--cold/--warm", help="Page cache dropped, or all run once before.")] = True,
    cap: Annotated[str | None, typer.Option(help="Memory of the process and its page cache, 3GiB.")] = None,
    backend: BackendName = "reference",
    tokens: Annotated[int, typer.Option(help="Decode steps to count.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    slots: Annotated[int | None, typer.Option(help="Expert slots a layer; default: by plan.")] = None,
    adapters: AdapterFolder = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    picture: Annotated[str | None, typer.Option(help="A picture of the steps, .svg.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Only the lines of JSON, no table.")] = False,
) -> None:
    """Measure decoding: a table, and a line of JSON for each case."""
    from edge0_ref.app.bench import run_bench
    from edge0_ref.app.scenario import Case
    from edge0_ref.engine.memory import parse_size

    cases = [
        Case(
            scenario=name,
            model=model,
            k=each,
            routing=routing,
            backend=backend,
            cold=cold,
            cap=None if cap is None else parse_size(cap),
            slots=slots,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            adapters=adapters,
            read_mode=read_mode,
            packed=packed,
            cache=str(cache_folder() or "") or None,
        )
        for each in choose_numbers("--k", k)
        for name in scenario.split(",")
    ]
    run_bench(cases, None if picture is None else Path(picture), tell, table=not json)


@command
def trace(
    model: ModelFolder = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="The timeline, .json, for ui.perfetto.dev.")] = None,
    picture: Annotated[str | None, typer.Option(metavar="FILE", help="The same as a picture, .svg.")] = None,
    scenario: Annotated[str, typer.Option(help="As of `edge0 bench`.")] = "prefetch",
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token; default: as the adapters say.")] = None,
    routing: Annotated[str, typer.Option(help="As of `edge0 bench`.")] = "model",
    backend: BackendName = "reference",
    tokens: Annotated[int, typer.Option(help="Decode steps to record.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 16,
    memory: Annotated[str | None, typer.Option(help="Budget of the whole process, 3GiB.")] = None,
    slots: Annotated[int | None, typer.Option(help="Expert slots a layer; default: by plan.")] = None,
    adapters: AdapterFolder = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    json: Json = False,
) -> None:
    """Record one decode's timeline: reads, waits, and compute of every layer and token."""
    from json import dumps

    from edge0_ref.app.scenario import Case
    from edge0_ref.app.trace import run_trace
    from edge0_ref.engine.memory import parse_size

    case = Case(
        scenario=scenario,
        model=model,
        k=k,
        routing=routing,
        backend=backend,
        cap=None if memory is None else parse_size(memory),
        slots=slots,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        adapters=adapters,
        read_mode=read_mode,
        packed=packed,
        cache=str(cache_folder() or "") or None,
    )
    told = run_trace(case, out, picture, tell)
    if json:
        print(dumps(told))


def choose_numbers(name: str, text: str | None) -> list[int | None]:
    """Whole numbers above 0 between commas; None if there is no text. Raises UsageError."""
    from edge0_ref.errors import UsageError

    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or not int(part)]
    if wrong:
        raise UsageError(f"{name} {text!r}: {wrong[0]!r} is not a whole number above 0; wanted 4, or 2,4,8")
    return [int(part) for part in parts]


def cache_folder() -> Path | None:
    """Where what was measured on this machine is kept; None without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge0"
    except RuntimeError:
        return None


def choose_fields(texts: list[str], **named: int | None) -> dict[str, int]:
    """Fields of config.json to change. Raises UsageError."""
    from edge0_ref.errors import UsageError

    fields = {name: value for name, value in named.items() if value is not None}
    for text in texts:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise UsageError(f"--set {text!r}: wanted a field and a whole number, num_experts=512")
        fields[name] = int(value)
    return fields


def choose_prompt(text: str | None, ids: str | None) -> str | list[int]:
    """The one prompt that was given. Raises UsageError."""
    from edge0_ref.errors import UsageError

    if (text is None) == (ids is None):
        raise UsageError("wanted one prompt: --prompt TEXT, or --prompt-ids 5,6,7")
    if ids is None:
        return text or ""
    parts = [part.strip() for part in ids.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal()]
    if wrong:
        raise UsageError(f"--prompt-ids: {wrong[0]!r} is not a token id; wanted 5,6,7")
    return [int(part) for part in parts]


if __name__ == "__main__":
    main()
