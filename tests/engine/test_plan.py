"""The memory budget: what a plan costs, what is refused, and that a plan holds what it promises."""

import re
import threading
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref import readers
from edge0_ref.adapters import Adapters
from edge0_ref.backend import create
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Lora, Plan, PrerouterHead
from edge0_ref.engine.memory import parse_size
from edge0_ref.engine.plan import CHUNKS, MemoryPlan, Request, cost_rows, make_plan, plan_text, sizes_of, state_bytes
from edge0_ref.errors import BudgetError, UsageError
from edge0_ref.inventory import open_checkpoint
from tests.ref.builders import Recipe, build
from tests.ref.sound import modes_of

PROCESS = 100 * 2**20
RECIPE = Recipe(layers=4, experts=16, top_k=2)
REQUESTS = st.builds(
    Request,
    context=st.integers(1, 4096),
    prompt_tokens=st.integers(0, 4096) | st.integers(0, 4 * RECIPE.experts),
    executor=st.sampled_from(["exact", "staged", "hot", "whole_layer"]),
    slots=st.one_of(st.none(), st.integers(1, 20)),
    read_mode=st.sampled_from(["mmap", "pread", "direct"]),
    reads_as_stored=st.booleans(),
)
SPARE = st.integers(0, 40 * 2**20)


@cache
def model(experts: int = RECIPE.experts) -> Checkpoint:
    with TemporaryDirectory() as folder:  # plans need headers alone
        return open_checkpoint(build(Path(folder), replace(RECIPE, experts=experts)))


def planned(request: Request, experts: int = RECIPE.experts) -> MemoryPlan:
    return make_plan(model(experts), Adapters(), request, PROCESS)


def minimum(request: Request) -> int:
    """The budget that a refusal names."""
    with pytest.raises(BudgetError) as refusal:
        planned(replace(request, memory=1))
    return int(re.search(r"(\d+) MiB work", str(refusal.value))[1]) * 2**20


@pytest.mark.spec("ENG-031")
@given(request=REQUESTS)
def test_the_budget_a_refusal_names_is_accepted(request) -> None:
    named = minimum(request)
    assert planned(replace(request, memory=named)).total <= named


@pytest.mark.spec("ENG-031")
@given(request=REQUESTS)
def test_a_budget_is_refused_if_and_only_if_nothing_fits(request) -> None:
    smallest = planned(replace(request, memory=minimum(request))).plan
    cheapest = replace(smallest, prefill_chunk=32, prefill_executor=smallest.executor, slots=least_slots(request))
    total = PROCESS + sum(
        nbytes for _, nbytes in cost_rows(model().config, sizes_of(model(), request.reads_as_stored), cheapest)
    )
    assert planned(replace(request, memory=total)).total <= total
    with pytest.raises(BudgetError):
        planned(replace(request, memory=total - 1))


@pytest.mark.spec("ENG-030")
def test_loras_are_planned_as_they_were_read_and_as_kernels_take_them() -> None:
    lora, part = Lora(np.zeros((3, 64), np.uint16), np.zeros((32, 3), np.uint16), 1.0), np.zeros((2, 2), np.uint16)
    adapters = Adapters({0: PrerouterHead(part, part, part)}, {"some.layer": lora})
    loras, heads = 2 * (3 * 64 + 32 * 3), 3 * 2 * 2 * 2
    for as_stored, wanted in ((True, heads + 2 * loras), (False, 3 * (heads + loras))):
        made = make_plan(model(), adapters, Request(context=64, reads_as_stored=as_stored), PROCESS)
        assert dict(made.rows)["adapters"] == wanted


@pytest.mark.spec("ENG-033")
@pytest.mark.parametrize(("size", "smaller"), list(pairwise(CHUNKS)))
@pytest.mark.parametrize(("slots", "costs"), [(3, True), (None, False)])
def test_a_whole_layer_comes_before_larger_calls(size, smaller, slots, costs) -> None:
    """Where it needs more than the slots, which are empty meanwhile: 2K of them weigh as much as a layer here."""
    request = Request(context=4096, prompt_tokens=4096, slots=slots)
    smallest = planned(replace(request, memory=minimum(request))).plan
    large = replace(smallest, prefill_chunk=size, prefill_executor="staged", slots=least_slots(request))
    total = PROCESS + sum(nbytes for _, nbytes in cost_rows(model().config, sizes_of(model()), large))
    bought = planned(replace(request, memory=total)).plan
    assert (bought.prefill_executor, bought.prefill_chunk) == ("whole_layer", smaller if costs else size)


@pytest.mark.spec("ENG-030", "DEC-058")
@given(request=REQUESTS, spare=SPARE)
def test_a_whole_layer_costs_what_the_slots_lack(request, spare) -> None:
    made = planned(replace(request, memory=minimum(request) + spare))
    plan, config, sizes = made.plan, model().config, sizes_of(model(), request.reads_as_stored)
    without = sum(nbytes for _, nbytes in cost_rows(config, sizes, replace(plan, prefill_executor=plan.executor)))
    slots = plan.slots * sizes.one_of_each_layer
    whole = plan.prefill_executor != plan.executor
    assert made.total - PROCESS - without == (max(0, sizes.largest_layer - slots) if whole else 0)


@pytest.mark.spec("ENG-036")
@given(request=REQUESTS, budgeted=st.booleans())
def test_a_prompt_has_no_call_that_half_the_room_would_take(request, budgeted) -> None:
    plan = planned(replace(request, memory=2**40) if budgeted else request).plan
    assert request.prompt_tokens > plan.prefill_chunk // 2 or plan.prefill_chunk == CHUNKS[-1]
    assert plan.prefill_chunk >= min(request.prompt_tokens, CHUNKS[0])


def least_slots(request: Request) -> int:
    return min(request.slots or 2 * RECIPE.top_k, RECIPE.experts)


@pytest.mark.spec("ENG-031", "ENG-032")
@given(request=REQUESTS, spare=SPARE)
def test_a_plan_fits_its_budget_and_has_room_for_two_tokens(request, spare) -> None:
    budget = minimum(request) + spare
    plan = planned(replace(request, memory=budget))
    assert plan.total <= budget
    assert least_slots(request) <= plan.plan.slots <= RECIPE.experts
    assert plan.plan.slots == least_slots(request) or request.slots is None
    assert plan.plan.context == request.context


def worth(request: Request, plan: Plan) -> tuple[bool, bool, int]:
    """What is bought first: slots for all experts, then a whole layer for the prompt, then large calls."""
    everything = request.slots is None and plan.slots == RECIPE.experts
    return everything, plan.prefill_executor == "whole_layer", plan.prefill_chunk


@pytest.mark.spec("ENG-030")
@given(request=REQUESTS, spare=SPARE)
def test_more_memory_is_never_worse(request, spare) -> None:
    budget = minimum(request)
    small = planned(replace(request, memory=budget)).plan
    large = planned(replace(request, memory=budget + spare)).plan
    assert worth(request, large) >= worth(request, small)
    everything = planned(replace(request, memory=2**40)).plan
    assert everything.slots == (
        least_slots(request) if request.slots or request.executor in ("exact", "whole_layer") else RECIPE.experts
    )


@pytest.mark.spec("ENG-035")
@given(request=REQUESTS, part=st.floats(0, 1), owners=st.sets(st.integers(0, RECIPE.layers - 2)))
def test_what_is_left_goes_first_to_layers_that_nobody_predicts_for(request, part, owners) -> None:
    tiny = np.zeros((1, 1), np.float32)
    adapters = Adapters({owner: PrerouterHead(tiny, tiny, tiny) for owner in owners})
    sizes = sizes_of(model(), request.reads_as_stored, owners)
    smallest = planned(replace(request, memory=minimum(request))).plan
    useful = next(size for size in reversed(CHUNKS) if size >= min(request.prompt_tokens, CHUNKS[0]))
    large = replace(smallest, prefill_chunk=useful, prefill_executor=smallest.executor, slots=least_slots(request))
    spent = PROCESS + 2 * adapters.nbytes + sum(nbytes for _, nbytes in cost_rows(model().config, sizes, large))
    budget = spent + int(part * (sizes.all_experts + sizes.largest_layer))
    bought = make_plan(model(), adapters, replace(request, memory=budget), PROCESS)
    plan, slots, one_more = bought.plan, bought.plan.on_demand_slots, sizes.one_of_each_on_demand
    assert bought.total <= budget
    if not owners or request.slots or request.executor not in ("staged", "hot"):
        assert slots is None
    elif (slots or plan.slots) < RECIPE.experts:
        too_little = (plan.slots - least_slots(request)) * (sizes.one_of_each_layer - one_more)
        assert too_little < one_more
        assert bought.total - too_little + one_more > budget
    else:
        assert slots is None or least_slots(request) <= plan.slots <= slots == RECIPE.experts


@pytest.mark.spec("ENG-030")
@given(request=REQUESTS)
def test_the_printed_rows_are_the_whole(request) -> None:
    plan = planned(request)
    assert plan.total == sum(nbytes for _, nbytes in plan.rows)
    assert all(nbytes > 0 for _, nbytes in plan.rows)
    lines = plan_text(plan).splitlines()
    assert len(lines) == len(plan.rows) + 1
    assert all(what in line for (what, _), line in zip(plan.rows, lines, strict=False))


@pytest.mark.spec("ENG-033")
@given(request=REQUESTS, prompt_tokens=st.integers(0, 4 * RECIPE.experts // RECIPE.top_k + 8))
def test_whole_layers_are_for_prompts_that_use_them(request, prompt_tokens) -> None:
    request = replace(request, prompt_tokens=prompt_tokens)
    plan = planned(request).plan
    whole = plan.prefill_executor == "whole_layer" and plan.executor != "whole_layer"
    chosen = min(request.prompt_tokens, plan.prefill_chunk) * RECIPE.top_k
    assert whole == (request.executor in ("staged", "hot") and chosen >= 4 * RECIPE.experts)
    if whole:
        assert (plan.prefill_from - 1) * RECIPE.top_k < 4 * RECIPE.experts <= plan.prefill_from * RECIPE.top_k


@pytest.mark.spec("ENG-034")
@pytest.mark.parametrize("context", [1, 64, 65, 300])
def test_the_planned_state_is_the_state(tmp_path, context) -> None:
    checkpoint = open_checkpoint(build(tmp_path, RECIPE))
    decoder = create().decoder(checkpoint, Plan(top_k=RECIPE.top_k, context=context))
    decoder.prefill([5] * context)
    assert array_bytes(decoder.snapshot().mixers) == state_bytes(checkpoint.config, context)
    decoder.close()


def array_bytes(value: object) -> int:
    """Bytes of all arrays held by an object."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value if isinstance(value, list) else vars(value).values() if hasattr(value, "__dict__") else []
    return sum(array_bytes(part) for part in parts)


@pytest.mark.spec("ENG-030")
@pytest.mark.parametrize("threads", [0, 2])
def test_buffers_are_planned_for_reader_threads_and_for_the_decoders_own(tmp_path, monkeypatch, threads) -> None:
    if "direct" not in modes_of(tmp_path):
        pytest.skip(f"no direct reads in {tmp_path}")
    monkeypatch.setattr(readers, "SCRATCH", own := threading.local())
    checkpoint = open_checkpoint(build(tmp_path, RECIPE))
    plan = Plan(top_k=RECIPE.top_k, read_mode="direct", reader_threads=threads)
    decoder = create().decoder(checkpoint, plan)
    decoder.prefill([5])
    decoder.close()
    planned_bytes = dict(cost_rows(checkpoint.config, sizes_of(checkpoint), plan))["reader buffers"]
    assert 0 < len(own.map) * (threads + 1) <= planned_bytes


@pytest.mark.spec("ENG-030")
def test_staged_decoding_costs_the_same_whatever_the_number_of_experts() -> None:
    """But for the routers, one row of hidden size and its coefficients for each expert, and features of heads."""
    few, many = (planned(Request(context=100, prompt_tokens=3), experts).total for experts in (16, 128))
    router_row = RECIPE.hidden + 2 * 4 * (RECIPE.hidden // RECIPE.group_size)  # int8 codes, float32 coefficients
    features = 2 * 8 * CHUNKS[-1]  # two float64 for each expert and each token of a call
    assert many - few == (128 - 16) * (RECIPE.layers * router_row + features)


@pytest.mark.spec("ENG-034")
@given(request=REQUESTS, tokens=st.integers(0, 4096))
def test_logits_of_a_whole_prompt_are_planned_twice(request, tokens) -> None:
    with_logits = replace(request, logits_tokens=tokens)
    assert planned(with_logits).total - planned(request).total == 2 * 4 * tokens * model().config.vocab_size
    assert minimum(with_logits) >= minimum(request)


@pytest.mark.parametrize("text", ["", "GiB", "3 bananas", "-1", "1e9", "3 Gi B"])
def test_a_size_that_is_none_is_refused(text) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(0, 2**20), st.sampled_from([("KiB", 2**10), ("mb", 10**6), ("G", 10**9), ("Ti", 2**40), ("", 1)]))
def test_sizes_have_binary_and_decimal_units(number, unit) -> None:
    assert parse_size(f"{number}{unit[0]}") == parse_size(f" {number} {unit[0]} ") == number * unit[1]


@pytest.mark.parametrize("wrong", [{"context": 0}, {"slots": 0}, {"reader_threads": 0}, {"context": 4097}])
def test_an_impossible_request_is_refused(wrong) -> None:
    with pytest.raises(UsageError):
        planned(Request(**({"context": 8} | wrong)))
