"""The memory budget, spent on paper before anything is allocated.

What is promised is the whole process: what it already is, resident weights, adapters, slots, buffers of prompt and
readers, the state of every token of context, and a margin. A budget that cannot work is refused with one that does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import AttentionConfig, GatedDeltaConfig, MixerConfig
from edge0_ref.contract import ExecutorKind, Plan, ReadMode
from edge0_ref.engine.memory import size_text
from edge0_ref.errors import BudgetError, UsageError
from edge0_ref.expert_store import find_experts

CHUNKS = (256, 128, 64, 32)
SMALL_BANK_BYTES = 2**28  # without a budget, whole layers are kept for a prompt only if all of them are this small
MARGIN_BYTES = 48 * 2**20  # compiled kernels, Python objects, allocator slack; measured on the embedded model
SLACK_BYTES = 2 * 2**20  # the process's own size moves by this much from run to run


@dataclass(frozen=True)
class Request:
    """What a user asks for; None is "choose". memory: bytes for the whole process; context: tokens of one text."""

    context: int
    prompt_tokens: int = 0
    memory: int | None = None
    executor: ExecutorKind = "staged"
    slots: int | None = None
    read_mode: ReadMode = "pread"
    reader_threads: int = 2

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


def make_plan(checkpoint: Checkpoint, adapters: Adapters, request: Request, process_bytes: int) -> MemoryPlan:
    """[ENG-031] The best plan within the budget. process_bytes: the process as it is, adapters already read.

    A budget is spent in this order: 2K slots a layer, a prompt in large chunks, whole layers where they pay, then
    more slots. Raises BudgetError, naming a budget that works; UsageError for a context the model does not have.
    """
    if request.context > checkpoint.config.max_context:
        raise UsageError(f"context of {request.context} tokens; this model has {checkpoint.config.max_context}")

    def priced(plan: Plan) -> MemoryPlan:
        return MemoryPlan(plan, cost_rows(checkpoint, adapters, plan, process_bytes), request.memory)

    smallest = smallest_plan(checkpoint, adapters, request)
    if request.memory is None:
        return priced(with_whole_layers(checkpoint, replace(smallest, prefill_chunk=CHUNKS[0]), request))
    if priced(smallest).total > request.memory:
        minimum = -(-(priced(smallest).total + SLACK_BYTES) // 2**20)
        raise BudgetError(
            f"a memory budget of {size_text(request.memory)} is too small: {minimum} MiB work "
            f"({smallest.slots} slots a layer, context {smallest.context})"
        )
    return priced(spend(checkpoint, request, smallest, lambda plan: priced(plan).total <= request.memory))


def smallest_plan(checkpoint: Checkpoint, adapters: Adapters, request: Request) -> Plan:
    """[ENG-032] As little memory as works: 2K slots, so that a token's experts and the next one's fit side by side."""
    top_k = adapters.top_k or checkpoint.config.top_k
    experts = most_experts(checkpoint)
    slots = request.slots or (4 if request.executor == "hot" and request.memory is None else 2) * top_k
    return Plan(
        top_k=top_k,
        executor=request.executor,
        prefill_executor=request.executor,
        slots=min(slots, experts),
        read_mode=request.read_mode,
        reader_threads=request.reader_threads,
        prefill_chunk=CHUNKS[-1],
        context=request.context,
    )


def spend(checkpoint: Checkpoint, request: Request, plan: Plan, fits: Callable[[Plan], bool]) -> Plan:
    """Grow the smallest plan step by step, keeping each step that fits."""
    plan = next(chosen for size in CHUNKS if fits(chosen := replace(plan, prefill_chunk=size)))
    whole = with_whole_layers(checkpoint, plan, request)
    plan = whole if fits(whole) else plan
    if request.slots is None and request.executor in ("staged", "hot"):
        counts = range(most_experts(checkpoint), plan.slots, -1)
        plan = next((more for count in counts if fits(more := replace(plan, slots=count))), plan)
    return plan


def with_whole_layers(checkpoint: Checkpoint, plan: Plan, request: Request) -> Plan:
    """[ENG-033] Whole layers for the prompt, if all of them are small and it is read in several chunks.

    A prompt of one chunk reads each expert it needs once in any case; only a longer one would read them again.
    """
    several = request.prompt_tokens > plan.prefill_chunk
    pays = several and plan.prefill_chunk * plan.top_k >= most_experts(checkpoint)
    if pays and plan.executor in ("staged", "hot") and whole_layer_bytes(checkpoint) <= SMALL_BANK_BYTES:
        return replace(plan, prefill_executor="whole_layer")
    return plan


def most_experts(checkpoint: Checkpoint) -> int:
    return max(moe.num_experts for moe in checkpoint.config.moe_layers.values())


def expert_bytes(checkpoint: Checkpoint) -> dict[int, int]:
    """Layer -> bytes of one of its experts."""
    return {
        layer: find_experts(checkpoint, layer, moe)[0].nbytes for layer, moe in checkpoint.config.moe_layers.items()
    }


def whole_layer_bytes(checkpoint: Checkpoint) -> int:
    """All experts of all layers."""
    moe = checkpoint.config.moe_layers
    return sum(nbytes * moe[layer].num_experts for layer, nbytes in expert_bytes(checkpoint).items())


def cost_rows(
    checkpoint: Checkpoint, adapters: Adapters, plan: Plan, process_bytes: int
) -> tuple[tuple[str, int], ...]:
    """[ENG-030] What each part of a plan costs."""
    layers = len(checkpoint.config.moe_layers)
    rows = [
        ("process as it is", process_bytes - adapters.nbytes),
        ("adapters", adapters.nbytes),
        ("resident weights", resident_weight_bytes(checkpoint)),
        (f"experts, decoding: {bank_text(plan.executor, plan.slots, layers)}", bank_bytes(checkpoint, plan.executor, plan)),
    ]
    if plan.prefill_executor != plan.executor:
        text = f"experts, prompt: {bank_text(plan.prefill_executor, plan.slots, layers)}"
        rows.append((text, bank_bytes(checkpoint, plan.prefill_executor, plan)))
    rows += [
        ("reader buffers", reader_bytes(checkpoint, plan)),
        (f"prompt buffers, {plan.prefill_chunk} tokens a call", working_bytes(checkpoint, plan)),
        (f"state of {plan.context} tokens", state_bytes(checkpoint, plan.context)),
        ("kernels and margin", MARGIN_BYTES),
    ]
    return tuple((what, nbytes) for what, nbytes in rows if nbytes)


def bank_text(kind: ExecutorKind, slots: int, layers: int) -> str:
    match kind:
        case "exact":
            return f"1 buffer x {layers} layers"
        case "whole_layer":
            return f"all experts x {layers} layers"
        case "staged" | "hot":
            return f"{slots} slots x {layers} layers"


def bank_bytes(checkpoint: Checkpoint, kind: ExecutorKind, plan: Plan) -> int:
    """Memory of one executor kind over all layers."""
    moe = checkpoint.config.moe_layers
    counts = {"exact": 1, "staged": plan.slots, "hot": plan.slots}
    return sum(
        nbytes * counts.get(kind, moe[layer].num_experts) for layer, nbytes in expert_bytes(checkpoint).items()
    )


def resident_weight_bytes(checkpoint: Checkpoint) -> int:
    """Everything but routed experts: codes as stored, coefficients and float tensors in float32."""
    total = sum(prod(shape) * 4 for shape in checkpoint.config.tensors.vectors.values())
    for module, (rows, cols) in checkpoint.config.tensors.linears.items():
        if f"{module}.scales" in checkpoint:
            groups = checkpoint.info(f"{module}.scales").shape[-1]
            total += checkpoint.info(f"{module}.weight").nbytes + 2 * rows * groups * 4
        else:
            total += rows * cols * 4
    return total


def reader_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Direct reads go through one aligned buffer a thread, as large as the largest range of an expert."""
    if plan.read_mode != "direct":
        return 0
    pieces = [
        piece
        for layer, moe in checkpoint.config.moe_layers.items()
        for piece in find_experts(checkpoint, layer, moe)[1]
    ]
    return plan.reader_threads * (max(piece.nbytes for piece in pieces) + 2 * 4096)


def working_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Activations of one call, in the reference's float32 and float64, or what loading needs at once if that is more.

    Widest are a mixer's projections, each with a few float64 copies, and the outputs of K experts a token.
    """
    config = checkpoint.config
    outside = {config.embedding, config.head}
    widest = max(rows for module, (rows, _) in config.tensors.linears.items() if module not in outside)
    features = config.hidden_size + 2 * most_experts(checkpoint)
    per_token = 32 * widest + 12 * plan.top_k * config.hidden_size + 8 * features + 16 * config.hidden_size
    largest = max(rows * cols for rows, cols in config.tensors.linears.values())
    return max(plan.prefill_chunk * per_token + 48 * config.vocab_size, largest // 4)


def state_bytes(checkpoint: Checkpoint, context: int) -> int:
    """[ENG-034] Everything a position is made of, for all layers, when `context` tokens have been seen."""
    return sum(mixer_state_bytes(layer.mixer, context) for layer in checkpoint.config.layers)


def mixer_state_bytes(mixer: MixerConfig, context: int) -> int:
    match mixer:
        case AttentionConfig():
            capacity = 64
            while capacity < context:
                capacity *= 2  # the cache doubles
            return 2 * capacity * mixer.kv_heads * mixer.head_size * 4
        case GatedDeltaConfig():
            channels = 2 * mixer.key_heads * mixer.key_size + mixer.value_heads * mixer.value_size
            memory = mixer.value_heads * mixer.value_size * mixer.key_size
            return 4 * ((mixer.conv_kernel - 1) * channels + memory)
