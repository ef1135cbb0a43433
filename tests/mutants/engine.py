"""Mutants of chapter 10: text, sampling, sessions, budgets."""

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import pytest

from edge0_ref import tokens
from edge0_ref.adapters import Adapters
from edge0_ref.app import backends
from edge0_ref.app.api import Model
from edge0_ref.contract import Plan
from edge0_ref.engine import plan, sampling, session, stops
from edge0_ref.engine.plan import MemoryPlan
from edge0_ref.engine.sampling import DrawStream, SamplingSettings
from edge0_ref.engine.session import Generation, Piece, Session
from edge0_ref.tokens import TextStream, Tokenizer
from tests.mutants.replacing import replace_everywhere


def text_stripped(patch: pytest.MonkeyPatch) -> None:
    original = Tokenizer.encode
    patch.setattr(Tokenizer, "encode", lambda self, text, **options: original(self, text.strip(), **options))


def prompts_cut_at_the_length_of_training(patch: pytest.MonkeyPatch) -> None:
    original = tokens.open_tokenizer

    def open_tokenizer(folder: Path) -> Tokenizer:
        opened, held = original(folder), json.loads((folder / "tokenizer.json").read_text("utf-8"))
        if held["truncation"]:
            opened._inner.enable_truncation(held["truncation"]["max_length"])
        return opened

    replace_everywhere(patch, original, open_tokenizer)


def a_piece_for_each_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextStream, "push", lambda stream, token: stream._tokenizer.decode([token]))


def templates_without_a_sandbox(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jinja2.sandbox, "ImmutableSandboxedEnvironment", jinja2.Environment)


def settings_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingSettings, "__post_init__", lambda settings: None)


def greedy_ties_to_the_higher_id(patch: pytest.MonkeyPatch) -> None:
    original = sampling.sample

    def sample(logits: Any, settings: Any, prompt: Any, generated: Any, draws: Any) -> int:
        token = original(logits, settings, prompt, generated, draws)
        if settings.temperature:
            return token
        scores = sampling.penalize(logits.astype(np.float64), settings, prompt, generated)
        return int(np.flatnonzero(scores == scores[token])[-1])

    replace_everywhere(patch, original, sample)


def penalties_after_the_best_is_known(patch: pytest.MonkeyPatch) -> None:
    original = sampling.sample

    def sample(logits: Any, settings: Any, *rest: Any) -> int:
        plain = replace(settings, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        return original(logits, settings if settings.temperature else plain, *rest)

    replace_everywhere(patch, original, sample)


def negative_logits_divided(patch: pytest.MonkeyPatch) -> None:
    def penalize(scores: Any, settings: Any, prompt: Any, generated: Any) -> Any:
        scores = scores.copy()
        scores[np.unique(np.array([*prompt, *generated], np.int64))] /= settings.repetition_penalty
        for token in generated:
            scores[token] -= settings.frequency_penalty
        for token in set(generated):
            scores[token] -= settings.presence_penalty
        return scores

    replace_everywhere(patch, sampling.penalize, penalize)


def ranked_ties_to_the_higher_id(patch: pytest.MonkeyPatch) -> None:
    def rank(scores: Any, top_k: int) -> Any:
        order = (scores.size - 1 - np.argsort(-scores[::-1], kind="stable")).astype(np.int64)
        return order[:top_k] if top_k else order

    replace_everywhere(patch, sampling.rank, rank)


def weights_in_float64(patch: pytest.MonkeyPatch) -> None:
    def weights(scores: Any, temperature: float) -> Any:
        with np.errstate(over="ignore", under="ignore"):
            return np.exp((scores - scores[0]) / temperature)

    replace_everywhere(patch, sampling.relative_weights, weights)


def the_crossing_token_dropped(patch: pytest.MonkeyPatch) -> None:
    original = sampling.keep_top_p

    def keep(weights: Any, top_p: float) -> Any:
        kept = original(weights, top_p)
        return kept[:-1] if top_p < 1 and len(kept) > 1 else kept

    replace_everywhere(patch, original, keep)


def min_p_of_the_whole(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, sampling.keep_min_p, lambda weights, p: weights[weights >= p * weights.sum()])


def a_draw_on_the_edge_stays_below_it(patch: pytest.MonkeyPatch) -> None:
    def index(weights: Any, draw: float) -> int:
        mass = np.cumsum(weights)
        return int(np.searchsorted(mass, draw * mass[-1], side="left"))

    replace_everywhere(patch, sampling.draw_index, index)


def the_seed_again_for_each_token(patch: pytest.MonkeyPatch) -> None:
    original = DrawStream.__init__

    def initialize(stream: Any, seed: int) -> None:
        stream.seed = seed
        original(stream, seed)

    def again(stream: Any) -> float:
        original(stream, stream.seed)
        return float(stream._generator.random())

    patch.setattr(DrawStream, "__init__", initialize)
    patch.setattr(DrawStream, "next", again)


def a_choice_feels_earlier_ones(patch: pytest.MonkeyPatch) -> None:
    original, calls = sampling.sample, count()

    def sample(logits: Any, settings: Any, *rest: Any) -> int:
        cooler = replace(settings, temperature=settings.temperature / (1 + next(calls) % 2))
        return original(logits, cooler, *rest)

    replace_everywhere(patch, original, sample)


def ids_outside_the_vocabulary_accepted(patch: pytest.MonkeyPatch) -> None:
    original = session.prompt_ids

    def ids(prompt: Any, tokenizer: Any, config: Any) -> list[int]:
        known = prompt if isinstance(prompt, str) else [token % config.vocab_size for token in prompt]
        return original(known, tokenizer, config)

    replace_everywhere(patch, original, ids)


def limits_unchecked(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, session.check_limits, lambda max_tokens, stop: None)


def a_text_goes_on_from_the_last_one(patch: pytest.MonkeyPatch) -> None:
    def prefill(text: Any) -> Any:
        start, running = time.perf_counter(), text._session
        running.running = text
        text._counters_before = replace(running.decoder.counters)
        logits = running.to_numpy(running.decoder.prefill(text._prompt))
        text._prefill_seconds = time.perf_counter() - start
        return logits

    patch.setattr(Generation, "_prefill", prefill)


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Generation.__init__

    def initialize(text: Any, running: Any, prompt: Any, max_tokens: int, *rest: Any) -> None:
        original(text, running, prompt, max_tokens + 1, *rest)

    patch.setattr(Generation, "__init__", initialize)


def nothing_held_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stops, "overlap", lambda text, stop: 0)


def pieces_without_their_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "Piece", lambda text, token: Piece(text, None))


def a_text_pays_for_earlier_ones(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, session.counters_between, lambda before, after: replace(after))


def a_text_pays_for_later_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "settle", lambda text: None)


def a_closed_model_goes_on(patch: pytest.MonkeyPatch) -> None:
    original = Model.close

    def close(model: Any) -> None:
        original(model)
        model._closed = False

    patch.setattr(Model, "close", close)


def texts_of_a_closed_model_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "close", lambda session: session.decoder.close())


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
    text_stripped: "ENG-001",
    prompts_cut_at_the_length_of_training: "ENG-001",
    a_piece_for_each_token: "ENG-002",
    templates_without_a_sandbox: "ENG-003",
    settings_unchecked: "ENG-010",
    greedy_ties_to_the_higher_id: "ENG-012",
    penalties_after_the_best_is_known: "ENG-012",
    negative_logits_divided: "ENG-013",
    ranked_ties_to_the_higher_id: "ENG-014",
    weights_in_float64: "ENG-015",
    the_crossing_token_dropped: "ENG-016",
    min_p_of_the_whole: "ENG-017",
    a_draw_on_the_edge_stays_below_it: "ENG-018",
    the_seed_again_for_each_token: "ENG-011",
    a_choice_feels_earlier_ones: "ENG-019",
    ids_outside_the_vocabulary_accepted: "ENG-043",
    limits_unchecked: "ENG-045",
    a_text_goes_on_from_the_last_one: "ENG-042",
    one_token_too_many: "ENG-044",
    nothing_held_back: "ENG-020",
    pieces_without_their_tokens: "ENG-040",
    a_text_pays_for_earlier_ones: "ENG-041",
    a_text_pays_for_later_ones: "ENG-041",
    a_closed_model_goes_on: "ENG-050",
    texts_of_a_closed_model_go_on: "ENG-050",
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
