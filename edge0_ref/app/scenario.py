"""What a measurement runs: a model, a way to have its experts, a routing; and the decoder that follows from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.adapters import Adapters
from edge0_ref.app.api import Model, Notify, open_model
from edge0_ref.app.bench_routing import RoutingRule, SimulatedRouting, parse_routing
from edge0_ref.app.capacity import largest_file
from edge0_ref.contract import Decoder, ExecutorKind, Observe, WrapStore
from edge0_ref.engine.plan import MemoryPlan
from edge0_ref.errors import UsageError
from edge0_ref.expert_store import find_experts
from edge0_ref.packed import stride_of

SEED = 0
POOL_TOKENS = 2  # tokens whose experts make up what stays in slots


@dataclass(frozen=True)
class Scenario:
    """[ENG-071] heads: predictions are made and read ahead; cached: only experts that stay in slots are used."""

    executor: ExecutorKind
    heads: bool = True
    cached: bool = False


SCENARIOS: Mapping[str, Scenario] = {
    "on-demand": Scenario("staged", heads=False),
    "prefetch": Scenario("staged"),
    "resident": Scenario("whole_layer"),
    "exact": Scenario("exact"),
    "oracle": Scenario("staged", cached=True),
}


@dataclass(frozen=True)
class Case:
    """One thing to measure. Plain values only, so that it can be handed to another process; sizes in bytes."""

    scenario: str
    model: str | None = None
    k: int | None = None
    routing: str = "model"
    backend: str = "reference"
    cold: bool = True
    cap: int | None = None
    slots: int | None = None
    tokens: int = 32
    prompt_tokens: int = 64
    adapters: str | None = None
    read_mode: str | None = None
    packed: str | None = None
    cache: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise UsageError(f"scenario {self.scenario!r}, wanted one of {', '.join(SCENARIOS)}")
        parse_routing(self.routing)
        for name, value in (("tokens", self.tokens), ("prompt tokens", self.prompt_tokens), ("K", self.k)):
            if value is not None and value < 1:
                raise UsageError(f"{name}: got {value}, wanted at least 1")

    @property
    def how(self) -> Scenario:
        return SCENARIOS[self.scenario]

    @property
    def rule(self) -> RoutingRule:
        """What is asked for; with cached experts only, the model's own choice is no choice."""
        rule = parse_routing(self.routing)
        return parse_routing("uniform") if self.how.cached and not rule.simulated else rule


@dataclass(frozen=True, eq=False)
class Running:
    """A case with its decoder."""

    case: Case
    model: Model
    plan: MemoryPlan
    decoder: Decoder[Any]

    @property
    def text(self) -> str:
        """What runs, in a line."""
        plan, simulated = self.plan.plan, " (simulated)" if self.case.rule.simulated else ""
        held = f", {plan.slots} slots a layer" if plan.executor in ("staged", "hot") else ""
        held += f" and {plan.on_demand_slots} where nobody predicts" if plan.on_demand_slots else ""
        reads = f"{plan.read_mode} reads by {plan.reader_threads} threads"
        routing = f"routing {self.case.rule.name}{simulated}"
        return f"{self.case.scenario}, K = {plan.top_k}, {routing}: {plan.executor}{held}, {reads}"

    @property
    def top_k(self) -> int:
        return self.plan.plan.top_k

    @property
    def can_simulate(self) -> bool:
        return hasattr(self.decoder, "routing_source")

    def prompt(self) -> list[int]:
        """Token ids, the same ones every time."""
        ids = np.random.default_rng(SEED).integers(0, self.model.config.vocab_size, self.case.prompt_tokens)
        return [int(token) for token in ids]

    def best(self, logits: Any) -> int:
        """The token that greedy decoding takes."""
        return int(np.argmax(self.model.backend.to_numpy(logits)))

    def cached_pool(self) -> dict[int, int]:
        """Layer -> how many experts stay in slots if a text uses no others."""
        experts = {layer: moe.num_experts for layer, moe in self.model.config.moe_layers.items()}
        held = min(POOL_TOKENS * self.top_k, self.plan.plan.slots)
        return {layer: min(max(held, self.top_k), count) for layer, count in experts.items()}

    def simulate(self, rule: RoutingRule, *, cached: bool) -> int:
        """From the token after the next one on, have `rule` executed; the tokens until cached experts are cached."""
        if not self.can_simulate:
            raise UsageError(f"backend {self.case.backend} cannot run another routing than the model's own")
        experts = {layer: moe.num_experts for layer, moe in self.model.config.moe_layers.items()}
        pool = self.cached_pool() if cached else experts
        source = SimulatedRouting(rule, pool, self.decoder.position + 1, SEED, in_turn=cached)
        source.draw(self.plan.plan.context - self.decoder.position, self.top_k)
        self.decoder.routing_source = source  # type: ignore[attr-defined]
        return -(-max(pool.values()) // self.top_k) if cached else 0

    def stop_simulating(self) -> None:
        if self.can_simulate:
            self.decoder.routing_source = lambda layer, position, routing: routing  # type: ignore[attr-defined]

    def files(self) -> list[Path]:
        """Every file of the model that is read."""
        checkpoint = self.model.checkpoint
        paths = {info.path for info in checkpoint.tensors.values()}
        return sorted(paths if checkpoint.packed is None else {*paths, checkpoint.packed})

    def expert_file(self) -> tuple[Path, int]:
        """The file whose reading is to be compared with, and the bytes of one read."""
        checkpoint = self.model.checkpoint
        layer, moe = next(iter(checkpoint.config.moe_layers.items()))
        return largest_file(checkpoint), stride_of(find_experts(checkpoint, layer, moe)[0])


@contextmanager
def open_case(
    case: Case,
    context: int,
    notify: Notify,
    observe: Observe | None = None,
    wrap_store: WrapStore | None = None,
) -> Iterator[Running]:
    """The decoder of a case, with room for `context` tokens. Raises what `open_model` raises, and BudgetError."""
    with open_model(
        case.model,
        backend=case.backend,
        dtype=case.dtype,
        adapters=case.adapters,
        memory=case.cap,
        executor=case.how.executor,
        slots=case.slots,
        read_mode=case.read_mode,
        packed=case.packed,
        cache=None if case.cache is None else Path(case.cache),
        observe=observe,
        notify=notify,
    ) as model:
        model.adapters = adapters_for(case, model)  # heads that nobody uses are not kept
        model.checkpoint = replace(model.checkpoint, wrap_store=wrap_store)
        plan, decoder = model.start_decoder(case.prompt_tokens, context)
        try:
            yield Running(case, model, plan, decoder)
        finally:
            decoder.close()


def adapters_for(case: Case, model: Model) -> Adapters:
    """[ENG-071] With the K that is asked for; without heads where nothing is to be read ahead."""
    fewest = min(moe.num_experts for moe in model.config.moe_layers.values())
    if case.k is not None and case.k > fewest:
        raise UsageError(f"K is {case.k}, this model has {fewest} experts a layer")
    adapters = replace(model.adapters, top_k=case.k or model.adapters.top_k)
    if not case.how.heads:
        return replace(adapters, heads={})
    if case.scenario == "prefetch" and not adapters.heads:
        raise UsageError("scenario prefetch: no prerouter heads, so nothing is predicted; --adapters DIR names some")
    return adapters
