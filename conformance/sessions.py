"""Driving a decoder along a script, watching it, and holding what came out to the float64 decoder."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from conformance import oracles
from conformance.compare import Judge
from conformance.decoder_oracle import Oracle, Trace
from conformance.driven import Driven, DrivenDecoder
from conformance.profiles import FLOAT32, Profile
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import EXECUTOR_KINDS, READ_MODES, Plan, Routing


@dataclass(frozen=True)
class Script:
    """Tokens, and how they are handed over: ("prefill", n) and ("step", n) in turn."""

    tokens: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]

    @property
    def stepped(self) -> set[int]:
        """Positions that are decode steps."""
        found, position = set(), 0
        for kind, count in self.parts:
            found |= set(range(position, position + count)) if kind == "step" else set()
            position += count
        return found


@st.composite
def scripts(draw: Any, vocab: int, steps: bool = True, most: int = 8) -> Script:
    parts: list[tuple[str, int]] = [("prefill", draw(st.integers(1, most)))]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(("step", "step", "prefill"))) if steps else "prefill"
        parts.append((kind, draw(st.integers(1, 4))))
    count = sum(number for _, number in parts)
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count))
    return Script(tuple(tokens), tuple(parts))


@st.composite
def plans(draw: Any, top_k: int) -> Plan:
    return Plan(
        top_k=top_k,
        executor=draw(st.sampled_from(EXECUTOR_KINDS)),
        prefill_executor=draw(st.sampled_from(EXECUTOR_KINDS)),
        slots=draw(st.integers(1, 2 * top_k + 1)),
        read_mode=draw(st.sampled_from([mode for mode in READ_MODES if mode != "direct"])),
        reader_threads=draw(st.sampled_from((1, 3))),
        prefill_chunk=draw(st.sampled_from((1, 2, 3, 256))),
        context=64,
        prefill_from=draw(st.integers(1, 4)),
        on_demand_slots=draw(st.none() | st.integers(1, 3 * top_k)),
    )


@dataclass
class Watch:
    """An observer that keeps what it sees. events: (point, layer); values: by point and layer, in order."""

    events: list[tuple[str, int]] = field(default_factory=list)
    values: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def __call__(self, point: str, layer: int, value: Any) -> None:
        kept = Routing(value.experts.copy(), value.weights.copy()) if isinstance(value, Routing) else value
        self.events.append((point, layer))
        self.values.setdefault((point, layer), []).append(kept)

    def executed(self, layer: int) -> np.ndarray:
        """Experts of all positions so far, [tokens, k]."""
        return np.concatenate([routing.experts for routing in self.values["routing", layer]])

    def rows(self, driven: Driven, point: str, layer: int) -> np.ndarray:
        """An observed array of all positions so far, in NumPy."""
        arrays = [driven.backend.to_numpy(value) for value in self.values.get((point, layer), [])]
        return np.concatenate([np.array(array) for array in arrays])


def play(decoder: DrivenDecoder, script: Script) -> np.ndarray:
    """Logits of every position, [tokens, vocab]."""
    rows, position = [], 0
    for kind, count in script.parts:
        tokens = script.tokens[position : position + count]
        rows += [decoder.all_logits(tokens)] if kind == "prefill" else [decoder.step(t)[None] for t in tokens]
        position += count
    return np.concatenate(rows)


@dataclass
class Session:
    """One script through one decoder under watch, and the float64 decoder beside it."""

    driven: Driven
    judge: Judge
    folder: Path
    checkpoint: Checkpoint
    plan: Plan
    script: Script
    adapters: Adapters

    def __post_init__(self) -> None:
        self.watch = Watch()
        self.decoder = self.driven.decoder(self.checkpoint, self.plan, self.adapters, self.watch)
        self.logits = play(self.decoder, self.script)
        self.executed = {layer: self.watch.executed(layer) for layer in self.checkpoint.config.moe_layers}

    def truth(self) -> Trace:
        return self.oracle(np.float64, FLOAT32)

    def plain(self) -> Trace:
        """The yardstick: the same equations in plain float32, activations rounded as the backend's profile has it."""
        return self.oracle(np.float32, self.judge.profile)

    def oracle(self, precision: Any, profile: Profile) -> Trace:
        oracle = Oracle(self.folder, self.adapters.heads, self.adapters.loras, precision, profile)
        with np.errstate(over="ignore", under="ignore"):
            return oracle.run(list(self.script.tokens), self.executed, self.script.stepped)

    def judge_numbers(self, what: str) -> None:
        """Every layer's output and the logits, within a share of what plain arithmetic loses on the same equations."""
        truth, plain = self.truth(), self.plain()
        for layer, wanted in truth.layer_output.items():
            got = self.watch.rows(self.driven, "layer_output", layer)
            self.judge.deep(got, wanted, plain.layer_output[layer], f"output of layer {layer}, {what}")
        for consumer, wanted in truth.prediction_logits.items():
            got = self.watch.rows(self.driven, "prediction_logits", consumer)
            named = f"predictions for layer {consumer}, {what}"
            self.judge.deep(got, wanted, plain.prediction_logits[consumer], named)
        self.judge.deep(self.logits, truth.logits, plain.logits, f"logits, {what}")
        self._judge_choices(truth, plain, what)

    def _judge_choices(self, truth: Trace, plain: Trace, what: str) -> None:
        """What was executed is the top of the right logits, up to what rounding may swap."""
        for layer, experts in self.executed.items():
            for t, chosen in enumerate(experts.tolist()):
                predicted = t in self.script.stepped and t > 0 and layer in truth.prediction_logits
                source = "prediction_logits" if predicted else "router_logits"
                row = t - 1 if predicted else t
                logits, other = getattr(truth, source)[layer][row], getattr(plain, source)[layer][row]
                profile, largest = self.judge.profile, np.abs(logits).max()
                least = max(8 * oracles.U, profile.roundoff) * largest
                slack = profile.share * max(float(np.abs(logits - other).max()), least)
                left = [float(z) for e, z in enumerate(logits) if e not in chosen]
                right = min(logits[chosen]) >= max(left, default=-np.inf) - 2 * slack
                ordered = all(logits[a] >= logits[b] - 2 * slack for a, b in pairwise(chosen))
                wanted = f"the top of {source} {np.round(logits, 4).tolist()}"
                distinct = len(set(chosen)) == len(chosen)
                self.judge.holds(right and ordered and distinct, f"layer {layer} position {t}, {what}", chosen, wanted)
