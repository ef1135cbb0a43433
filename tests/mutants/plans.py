"""Mutants of chapter 10: the memory budget."""

from dataclasses import replace
from typing import Any

import pytest

from edge0_ref.adapters import Adapters
from edge0_ref.app import backends
from edge0_ref.app.api import Model
from edge0_ref.contract import Plan
from edge0_ref.engine import plan
from edge0_ref.engine.plan import MemoryPlan
from tests.mutants.replacing import replace_everywhere


def the_last_row_left_out_of_the_total(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryPlan, "total", property(lambda made: sum(nbytes for _, nbytes in made.rows[:-1])))


def a_decoder_that_reads_without_a_buffer(patch: pytest.MonkeyPatch) -> None:
    original = plan.cost_rows

    def cost_rows(config: Any, sizes: Any, made: Plan) -> Any:
        return original(config, sizes, replace(made, reader_threads=made.reader_threads - 1))

    replace_everywhere(patch, original, cost_rows)


def a_refusal_names_too_little(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "SLACK_BYTES", -4 * 2**20)


def slots_for_one_token(patch: pytest.MonkeyPatch) -> None:
    original = plan.smallest_plan

    def smallest(request: Any, top_k: int, sizes: Any) -> Any:
        made = original(request, top_k, sizes)
        return made if request.slots else replace(made, slots=max(1, made.slots // 2))

    patch.setattr(plan, "smallest_plan", smallest)


def whole_layers_for_short_prompts(patch: pytest.MonkeyPatch) -> None:
    original = plan.with_whole_layers

    def whole(made: Any, request: Any, sizes: Any) -> Any:
        return original(made, replace(request, prompt_tokens=4 * request.prompt_tokens), sizes)

    patch.setattr(plan, "with_whole_layers", whole)


def whole_layers_in_the_largest_calls_only(patch: pytest.MonkeyPatch) -> None:
    original = plan.with_whole_layers

    def whole(made: Any, request: Any, sizes: Any) -> Any:
        return original(made, request, sizes) if made.prefill_chunk == plan.CHUNKS[0] else made

    patch.setattr(plan, "with_whole_layers", whole)


def large_calls_for_short_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "useful_chunks", lambda request: plan.CHUNKS)


def whole_layers_for_small_calls_too(patch: pytest.MonkeyPatch) -> None:
    original = plan.with_whole_layers

    def whole(made: Any, request: Any, sizes: Any) -> Any:
        bought = original(made, request, sizes)
        return made if bought is made else replace(bought, prefill_from=1)

    patch.setattr(plan, "with_whole_layers", whole)


def state_of_half_the_context(patch: pytest.MonkeyPatch) -> None:
    original = plan.mixer_state_bytes
    replace_everywhere(patch, original, lambda mixer, context: original(mixer, context // 2))


def logits_of_a_prompt_unplanned(patch: pytest.MonkeyPatch) -> None:
    original = Model._session_for

    def _session_for(model: Model, prompt_tokens: int, context: int, logits_tokens: int = 0) -> Any:
        return original(model, prompt_tokens, context)

    patch.setattr(Model, "_session_for", _session_for)


def a_context_planned_for_its_first_prompt(patch: pytest.MonkeyPatch) -> None:
    original = Model.start_decoder

    def start_decoder(model: Model, prompt_tokens: int, context: int, logits_tokens: int = 0) -> Any:
        return original(model, 1 if model.settings.context else prompt_tokens, context, logits_tokens)

    patch.setattr(Model, "start_decoder", start_decoder)


def kept_prefixes_unplanned(patch: pytest.MonkeyPatch) -> None:
    original = plan.make_plan

    def make_plan(checkpoint: Any, adapters: Any, request: Any, process_bytes: int) -> MemoryPlan:
        return original(checkpoint, adapters, replace(request, prefix_bytes=0), process_bytes)

    replace_everywhere(patch, original, make_plan)


def adapters_planned_as_in_their_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "widened_bytes", 0)


def copies_of_loras_for_kernels_unplanned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "lora_bytes", 0)


def every_backend_taken_to_widen(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, backends.reads_as_stored, lambda backend: False)


def slots_for_every_layer_alike(patch: pytest.MonkeyPatch) -> None:
    original = plan.with_more_slots

    def with_more_slots(smallest: Plan, sizes: plan.Sizes, spare: Any) -> Plan:
        return original(smallest, replace(sizes, on_demand=frozenset()), spare)

    patch.setattr(plan, "with_more_slots", with_more_slots)


MUTANTS = {
    the_last_row_left_out_of_the_total: "ENG-030",
    a_decoder_that_reads_without_a_buffer: "ENG-030",
    a_refusal_names_too_little: "ENG-031",
    slots_for_one_token: "ENG-032",
    whole_layers_for_short_prompts: "ENG-033",
    whole_layers_in_the_largest_calls_only: "ENG-033",
    large_calls_for_short_prompts: "ENG-036",
    whole_layers_for_small_calls_too: "ENG-033",
    state_of_half_the_context: "ENG-034",
    logits_of_a_prompt_unplanned: "ENG-034",
    slots_for_every_layer_alike: "ENG-035",
    a_context_planned_for_its_first_prompt: "ENG-033",
    kept_prefixes_unplanned: "ENG-082",
    adapters_planned_as_in_their_file: "ENG-030",
    copies_of_loras_for_kernels_unplanned: "ENG-030",
    every_backend_taken_to_widen: "ENG-030",
}
