"""Mutants of chapter 10: text, sampling, sessions."""

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
from edge0_ref.app.api import Model
from edge0_ref.engine import prompts, sampling, session, stops
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
    original = prompts.prompt_ids

    def ids(prompt: Any, tokenizer: Any, config: Any) -> list[int]:
        known = prompt if isinstance(prompt, str) else [token % config.vocab_size for token in prompt]
        return original(known, tokenizer, config)

    replace_everywhere(patch, original, ids)


def limits_unchecked(patch: pytest.MonkeyPatch) -> None:
    replace_everywhere(patch, prompts.check_limits, lambda max_tokens, stop: None)


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
    patch.setattr(session, "Piece", lambda text, token, chances=None: Piece(text, None, chances))


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
}
