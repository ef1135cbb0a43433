"""The memory budget, spent on paper before anything is allocated.

What is promised is the whole process: what it already is, resident weights, adapters, slots, buffers of prompt and
readers, the state of every token of context, and a margin. A budget that cannot work is refused with one that does.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import AttentionConfig, GatedDeltaConfig, KdaConfig, MixerConfig, MlaConfig, ModelConfig
from edge0_ref.contract import READER_THREADS, ExecutorKind, Plan, ReadMode
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import BudgetError, UsageError
from edge0_ref.expert_store import find_experts
from edge0_ref.readers import BLOCK

CHUNKS = (512, 256, 128, 64, 32)  # tokens of a prompt's calls
SMALL_LAYER_BYTES = 2**28  # without a budget, a prompt gets a whole layer at a time only if one is this small
MARGIN_BYTES = 96 * 2**20  # compiling or loading kernels, Python objects, allocator slack
SLACK_BYTES = 2 * 2**20  # the process's own size moves by this much from run to run


@dataclass(frozen=True)
class Request:
    """What a user asks for; None is "choose".

    memory: bytes for the whole process; context: tokens of one text; prompt_tokens: of the longest prompt;
    logits_tokens: of a prompt all of whose logits are wanted; prefix_bytes: for states kept between texts;
    reads_as_stored: the backend's weights and adapters stay what they are in files, instead of float32; LoRAs are there
    twice, as they were read and as its kernels take them.
    """

    context: int
    prompt_tokens: int = 0
    logits_tokens: int = 0
    memory: int | None = None
    executor: ExecutorKind = "staged"
    slots: int | None = None
    read_mode: ReadMode = "pread"
    reader_threads: int = READER_THREADS
    prefix_bytes: int = 0
    reads_as_stored: bool = False

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("slots", self.slots), ("threads", self.reader_threads)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, wanted at least 1")


@dataclass(frozen=True)
class MemoryPlan:
    """[ENG-030] A plan and what each part of it costs, (what, bytes): printable, and summing to `total`."""

    plan: Plan
    rows: tuple[tuple[str, int], ...]
    budget: int | None = None

    @property
    def total(self) -> int:
        return sum(nbytes for _, nbytes in self.rows)


def plan_text(plan: MemoryPlan) -> str:
    """A plan as lines: what, and its bytes."""
    rows = [*plan.rows, ("together" if plan.budget is None else f"together, of {size_text(plan.budget)}", plan.total)]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:{width}}  {size_text(nbytes):>9}" for what, nbytes in rows)


@dataclass(frozen=True)
class Sizes:
    """What a model weighs, from its headers. experts: layer -> (bytes of one, how many); largest_range: of a file.

    on_demand: the layers that nobody predicts for, where there are others.
    """

    experts: Mapping[int, tuple[int, int]]
    resident: int
    largest_range: int
    on_demand: frozenset[int] = frozenset()

    @property
    def one_of_each_layer(self) -> int:
        return sum(nbytes for nbytes, _ in self.experts.values())

    @property
    def one_of_each_on_demand(self) -> int:
        return sum(self.experts[layer][0] for layer in self.on_demand)

    @property
    def all_experts(self) -> int:
        return sum(nbytes * count for nbytes, count in self.experts.values())

    @property
    def largest_layer(self) -> int:
        return max(nbytes * count for nbytes, count in self.experts.values())

    @property
    def most_experts(self) -> int:
        return max(count for _, count in self.experts.values())


def sizes_of(checkpoint: Checkpoint, reads_as_stored: bool = False, owners: Collection[int] = ()) -> Sizes:
    """owners: the layers that have heads."""
    experts, largest_range = {}, 0
    for layer, moe in checkpoint.config.moe_layers.items():
        layout, pieces = find_experts(checkpoint, layer, moe)
        experts[layer] = layout.nbytes, moe.num_experts
        ranges = (piece.nbytes for piece in pieces) if checkpoint.packed is None else [layout.nbytes]
        largest_range = max(largest_range, *ranges)
    on_demand = frozenset(layer for layer in experts if owners and layer - 1 not in owners)
    return Sizes(experts, resident_weight_bytes(checkpoint, reads_as_stored), largest_range, on_demand)


def make_plan(checkpoint: Checkpoint, adapters: Adapters, request: Request, process_bytes: int) -> MemoryPlan:
    """[ENG-031] The best plan within the budget. process_bytes: the process as it is, adapters already read.

    A budget is spent in this order: 2K slots a layer, slots for all experts, or else a whole layer for the prompt in
    calls as large as leave room for it, or else only large calls; then more slots, first where nobody predicts. Raises
    BudgetError, naming a budget that works; UsageError for a context the model does not have.
    """
    config, sizes = checkpoint.config, sizes_of(checkpoint, request.reads_as_stored, adapters.heads)
    copies = adapters.lora_bytes if request.reads_as_stored else adapters.widened_bytes  # as kernels take them
    if request.context > config.max_context:
        raise UsageError(f"context of {request.context} tokens; this model has {config.max_context}")

    def priced(plan: Plan) -> MemoryPlan:
        rows = [("process as it is", process_bytes - adapters.nbytes), ("adapters", adapters.nbytes + copies)]
        rows += [*cost_rows(config, sizes, plan), ("kept prefixes", request.prefix_bytes)]
        logits = 2 * 4 * config.vocab_size * request.logits_tokens  # call by call, then joined
        rows.append((f"logits of {request.logits_tokens} tokens", logits))
        return MemoryPlan(plan, tuple((what, nbytes) for what, nbytes in rows if nbytes), request.memory)

    smallest = smallest_plan(request, adapters.top_k or config.top_k, sizes)
    budget = request.memory
    if budget is None:
        plan = replace(smallest, prefill_chunk=useful_chunks(request)[0])
        small = sizes.largest_layer <= SMALL_LAYER_BYTES
        return priced(with_whole_layers(plan, request, sizes) if small else plan)
    if priced(smallest).total > budget:
        minimum = -(-(priced(smallest).total + SLACK_BYTES) // 2**20)
        raise BudgetError(
            f"a memory budget of {size_text(budget)} is too small: {minimum} MiB work "
            f"({smallest.slots} slots a layer, context {smallest.context})"
        )
    return priced(spend(smallest, request, sizes, lambda plan: budget - priced(plan).total))


def smallest_plan(request: Request, top_k: int, sizes: Sizes) -> Plan:
    """[ENG-032] As little memory as works: 2K slots, so that a token's experts and the next one's fit side by side.

    Hot has 4K of them where there is no budget: it is for keeping more than a token needs.
    """
    slots = request.slots or (4 if request.executor == "hot" and request.memory is None else 2) * top_k
    return Plan(
        top_k=top_k,
        executor=request.executor,
        prefill_executor=request.executor,
        slots=min(slots, sizes.most_experts),
        read_mode=request.read_mode,
        reader_threads=request.reader_threads,
        prefill_chunk=CHUNKS[-1],
        context=request.context,
    )


def useful_chunks(request: Request) -> list[int]:
    """[ENG-036] Up to the size that takes the longest prompt in one call: room in larger ones would stay empty."""
    return [size for size in CHUNKS if size // 2 < request.prompt_tokens or size == CHUNKS[-1]]


def spend(plan: Plan, request: Request, sizes: Sizes, spare: Callable[[Plan], int]) -> Plan:
    """Grow the smallest plan step by step, keeping each step that leaves no negative `spare`."""
    fitting = [larger for size in useful_chunks(request) if spare(larger := replace(plan, prefill_chunk=size)) >= 0]
    plan = fitting[0]
    fixed = request.slots is not None or request.executor not in ("staged", "hot")
    everything = replace(plan, slots=sizes.most_experts)
    if not fixed and spare(everything) >= 0:
        return everything
    wholes = [whole for each in fitting if (whole := with_whole_layers(each, request, sizes)) is not each]
    plan = next((whole for whole in wholes if spare(whole) >= 0), plan)
    return plan if fixed else with_more_slots(plan, sizes, spare)


def with_more_slots(plan: Plan, sizes: Sizes, spare: Callable[[Plan], int]) -> Plan:
    """[ENG-035] Where nobody predicts, a token waits for its reads: these layers keep what they use most."""

    def left(plan: Plan) -> int:
        """While text is decoded: what a prompt holds then is nothing."""
        return spare(replace(plan, prefill_executor=plan.executor))

    of_each = sizes.one_of_each_layer
    if sizes.on_demand and (more := left(plan) // sizes.one_of_each_on_demand):
        plan = replace(plan, on_demand_slots=min(plan.slots + more, sizes.most_experts))
        of_each -= sizes.one_of_each_on_demand
    return replace(plan, slots=min(plan.slots + left(plan) // of_each, sizes.most_experts))


def with_whole_layers(plan: Plan, request: Request, sizes: Sizes) -> Plan:
    """[ENG-033] A whole layer at a time for calls of a prompt that choose 4 times as many experts as there are.

    Then about one expert in 50 is read for nothing, and all reads of a layer are under way at once; a short prompt
    uses few experts, and reading all of them would make memory grow with their number.
    """
    enough = -(-4 * sizes.most_experts // plan.top_k)
    if plan.executor in ("staged", "hot") and min(request.prompt_tokens, plan.prefill_chunk) >= enough:
        return replace(plan, prefill_executor="whole_layer", prefill_from=enough)
    return plan


def cost_rows(config: ModelConfig, sizes: Sizes, plan: Plan) -> list[tuple[str, int]]:
    """[ENG-030] What each part of a plan adds to the process."""
    rows = [("resident weights", sizes.resident), *expert_rows(plan, sizes)]
    if plan.prefill_executor != plan.executor:
        # [DEC-058] slots are empty meanwhile, and a layer's experts are gone before the next layer's are read
        slots = sum(nbytes for _, nbytes in expert_rows(plan, sizes))
        rows.append(("experts of one whole layer, for the prompt: beyond slots", max(0, sizes.largest_layer - slots)))
    if plan.read_mode == "direct":  # one aligned buffer a thread, and one of the decoder's, which reads as well
        rows.append(("reader buffers", (plan.reader_threads + 1) * (sizes.largest_range + 2 * BLOCK)))
    return [
        *rows,
        (f"prompt buffers, {plan.prefill_chunk} tokens a call", working_bytes(config, sizes, plan)),
        (f"state of {plan.context} tokens", state_bytes(config, plan.context)),
        ("kernels and margin", MARGIN_BYTES),
    ]


def expert_rows(plan: Plan, sizes: Sizes) -> list[tuple[str, int]]:
    """What decoding keeps of each layer's experts."""
    layers, one_of_each = len(sizes.experts), sizes.one_of_each_layer
    match plan.executor:
        case "exact":
            return [(f"experts: 1 buffer x {layers} layers", one_of_each)]
        case "whole_layer":
            return [(f"experts: all x {layers} layers", sizes.all_experts)]
        case "staged" | "hot":
            rows = []
            if plan.on_demand_slots is not None:
                on_demand, of_these = len(sizes.on_demand), sizes.one_of_each_on_demand
                what = f"experts: {plan.on_demand_slots} slots x {on_demand} layers without predictions"
                rows.append((what, plan.on_demand_slots * of_these))
                layers, one_of_each = layers - on_demand, one_of_each - of_these
            return [(f"experts: {plan.slots} slots x {layers} layers", plan.slots * one_of_each), *rows]


def resident_weight_bytes(checkpoint: Checkpoint, reads_as_stored: bool = False) -> int:
    """Everything but routed experts: codes as stored, float tensors in float32, and so are coefficients if widened.

    A layer that files may hold as stacks of heads is taken apart into heads, in float32, however it is stored.
    """
    total = sum(prod(shape) * 4 for shape in checkpoint.config.tensors.vectors.values())
    for module, (rows, cols) in checkpoint.config.tensors.linears.items():
        if f"{module}.scales" in checkpoint and module not in checkpoint.config.tensors.stacks:
            scales = checkpoint.info(f"{module}.scales")
            coefficients = 2 * (scales.nbytes if reads_as_stored else 4 * prod(scales.shape))
            total += checkpoint.info(f"{module}.weight").nbytes + coefficients
        else:
            total += rows * cols * 4
    return total


def working_bytes(config: ModelConfig, sizes: Sizes, plan: Plan) -> int:
    """Activations of one call, in the reference's float32 and float64, or what loading needs at once if that is more.

    Widest are a mixer's projections, each with a few float64 copies, and the outputs of K experts a token.
    """
    outside = {config.embedding, config.head}
    widest = max(rows for module, (rows, _) in config.tensors.linears.items() if module not in outside)
    features = config.hidden_size + 2 * sizes.most_experts
    per_token = 32 * widest + 12 * plan.top_k * config.hidden_size + 8 * features + 16 * config.hidden_size
    largest = max(rows * cols for rows, cols in config.tensors.linears.values())
    return max(plan.prefill_chunk * per_token + 48 * config.vocab_size, largest // 4)


def state_bytes(config: ModelConfig, context: int) -> int:
    """[ENG-034] Everything a position is made of, for all layers, when `context` tokens have been seen."""
    return sum(mixer_state_bytes(layer.mixer, context) for layer in config.layers)


def mixer_state_bytes(mixer: MixerConfig, context: int) -> int:
    capacity = 64
    while capacity < context:
        capacity *= 2  # what is kept for each position grows by doubling
    match mixer:
        case AttentionConfig():
            return 4 * capacity * 2 * mixer.kv_heads * mixer.head_size
        case MlaConfig():
            return 4 * capacity * (mixer.latent_size + mixer.rotary_size)
        case GatedDeltaConfig():
            channels = 2 * mixer.key_heads * mixer.key_size + mixer.value_heads * mixer.value_size
            memory = mixer.value_heads * mixer.value_size * mixer.key_size
            return 4 * ((mixer.conv_kernel - 1) * channels + memory)
        case KdaConfig():
            channels = 3 * mixer.heads * mixer.head_size
            return 4 * ((mixer.conv_kernel - 1) * channels + mixer.heads * mixer.head_size**2)
