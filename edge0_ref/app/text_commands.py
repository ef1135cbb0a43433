"""The commands about one text or one model: their options. What each does is in the file of its name.

Heavy modules are imported by the command that needs them: the first token comes soon.
"""

from typing import Annotated

import typer

from edge0_ref.app.shell import (
    AdapterFolder,
    BackendName,
    CacheHome,
    DtypeName,
    ExecutorName,
    Json,
    MemoryBudget,
    MinP,
    ModelFolder,
    NoAdapters,
    Options,
    PackedFile,
    PromptIds,
    PromptText,
    ReadModeName,
    SlotCount,
    Temperature,
    TopK,
    TopP,
    choose_prompt,
    command,
    model_of,
    tell,
)


@command
def generate(
    options: Options,
    model: ModelFolder = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one, which is reported.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    backend: BackendName = "reference",
    dtype: DtypeName = None,
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    slots: SlotCount = None,
    memory: MemoryBudget = None,
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="A table of what it cost, on stderr.")] = False,
    cache_home: CacheHome = None,
) -> None:
    """Generate text."""
    from edge0_ref.app.generate import run_generate
    from edge0_ref.engine.sampling import SamplingSettings

    settings = SamplingSettings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    )
    with model_of(options) as opened:
        chosen = choose_prompt(prompt, prompt_ids)
        run_generate(opened, chosen, max_tokens, settings, tuple(stop or ()), chat=chat, json=json, stats=stats)


@command
def logits(
    options: Options,
    model: ModelFolder = None,
    prompt: PromptText = None,
    prompt_ids: PromptIds = None,
    out: Annotated[str | None, typer.Option(help="The file to write, .safetensors.")] = None,
    backend: BackendName = "reference",
    dtype: DtypeName = None,
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    executor: ExecutorName = "staged",
    read_mode: ReadModeName = None,
    packed: PackedFile = None,
    cache_home: CacheHome = None,
) -> None:
    """Write the logits of every token of a prompt: tensor `logits` [tokens, vocab], float32."""
    from edge0_ref.app.logits import run_logits

    with model_of(options) as opened:
        run_logits(opened, choose_prompt(prompt, prompt_ids), out)


@command
def inspect(
    options: Options,
    model: ModelFolder = None,
    adapters: AdapterFolder = None,
    no_adapters: NoAdapters = False,
    packed: PackedFile = None,
    json: Json = False,
) -> None:
    """Show what a model folder holds: architecture, tensors, quantisation, experts, adapters, skipped tensors."""
    from edge0_ref.app.inspect import run_inspect

    with model_of(options) as opened:
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
        model=model,
        backend=backend,
        adapters=adapters,
        use_adapters=not no_adapters,
        executor=executor,
        notify=tell,
    )
