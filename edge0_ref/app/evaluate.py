"""`edge0 eval`: what predicted routing costs in text quality, what the LoRA pays back, what merging it would lose.

Decode mode: every position but the first of a window is routed by what was predicted one position earlier, as when
tokens are generated one by one; whole windows are computed in parallel, with the same experts.
"""

import json as json_format
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.adapters import Adapters, adapters_of
from edge0_ref.app.evaluate_report import draw_recall, print_tables
from edge0_ref.app.machine import provenance
from edge0_ref.app.train import find_trainer, open_teacher
from edge0_ref.app.train_text import Corpus, read_corpus
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.data import Array
from edge0_ref.errors import UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.tokens import open_tokenizer
from edge0_ref.training import Scored, Trainer

SEQUENCES = 8  # at once
MERGE_WINDOWS = 16  # the effect on logits is the same story on any text


@dataclass(frozen=True)
class Question:
    """What to measure: adapters of one folder, or of each stage of a run."""

    student: Path
    teacher: Path | None
    text: Path
    adapters: Path | None
    run: Path | None
    window: int
    windows: int | None


def run_evaluate(
    asked: Question,
    backend: str,
    tell: Callable[[str], None],
    *,
    paper: bool = False,
    picture: Path | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """A table on stderr, and with `json` an object on the last line of stdout."""
    student, trainer = open_checkpoint(asked.student), find_trainer(backend)
    teacher = None if asked.teacher is None else open_teacher(asked.teacher, student)
    corpus = read_corpus(asked.text, open_tokenizer(asked.student), student.config, asked.window)
    windows = corpus.windows[: asked.windows]
    stages = stage_adapters(asked, student)
    final = list(stages.values())[-1]
    tell(f"{windows.size} tokens in {len(windows)} windows of {asked.window}, {corpus.bytes_per_token:.3f} bytes each")
    variants = qualities(models(trainer, teacher, student, stages), windows, corpus)
    told: dict[str, Any] = {
        "bits_per_byte": {name: round(bits, 4) for name, (bits, _) in variants.items()},
        "agreement": {name: round(same, 4) for name, (_, same) in variants.items() if same is not None},
        "recovered": recovered({name: bits for name, (bits, _) in variants.items()}),
        "recall": None if teacher is None else recall_table(trainer, teacher, final, windows),
        "merged_retention": retention(trainer, student, final, windows[:MERGE_WINDOWS]) if final.loras else None,
        "tokens": int(windows.size),
        **provenance(),
    }
    print_tables(told, paper)
    if picture is not None and told["recall"]:
        draw_recall(told["recall"], picture)
    if json:
        print(json_format.dumps(told))
    return told


def stage_adapters(asked: Question, student: Checkpoint) -> dict[str, Adapters]:
    """Name -> adapters, in the order of the stages. Raises UsageError when there are none."""
    if asked.run is not None:
        found = [name for name in ("heads", "sft", "opd") if (asked.run / name).is_dir()]
        folders = {name: asked.run / name for name in found}
    else:
        folder = asked.adapters or asked.student / "adapters"
        earlier = {"sft": folder / "sft"} if (folder / "sft").is_dir() else {}
        folders = {**earlier, "final": folder} if folder.is_dir() else {}
    if not folders:
        raise UsageError(f"no adapters in {asked.run or asked.adapters or asked.student}; --adapters DIR or --run DIR")
    opened = {name: adapters_of(student, path) for name, path in folders.items()}
    driven = list(opened.values())[-1].heads  # stage 1 trains more heads than later stages let drive a layer
    heads = next(each.heads for each in opened.values() if each.heads)
    heads = {owner: head for owner, head in heads.items() if owner in driven} or heads
    stages = {"heads": Adapters(heads)}
    for each in opened.values():
        if each.loras:
            stages[str(each.metadata.get("stage", "lora"))] = replace(each, heads=each.heads or heads)
    return stages


def models(
    trainer: Trainer, teacher: Checkpoint | None, student: Checkpoint, stages: Mapping[str, Adapters]
) -> Iterator[tuple[str, Scored, bool]]:
    """(name, model, whether in decode mode); one model of a checkpoint serves all its adapters."""
    if teacher is not None:
        yield "teacher", trainer.scored(teacher, Adapters()), False
    yield "int4", trainer.scored(student, Adapters()), False
    for name, adapters in stages.items():
        yield "int4 + heads" if name == "heads" else f"+ LoRA ({name})", trainer.scored(student, adapters), True


def qualities(
    variants: Iterable[tuple[str, Scored, bool]], windows: Array, corpus: Corpus
) -> dict[str, tuple[float, float | None]]:
    """Name -> bits per byte, and the share of positions whose likeliest token is the teacher's."""
    variants, nats, same = list(variants), defaultdict[str, float](float), defaultdict[str, int](int)
    for tokens in batches(windows):
        best_of = {}
        for name, model, decode in variants:
            logits = model.logits(tokens, 1 if decode else None)
            nats[name] -= float(log_chances(logits[:, :-1], tokens[:, 1:]).sum())
            best_of[name] = logits.argmax(-1)
            if "teacher" in best_of:
                same[name] += int((best_of[name] == best_of["teacher"]).sum())
    predicted = len(windows) * (windows.shape[1] - 1)
    in_bits = predicted * float(np.log(2.0)) * corpus.bytes_per_token
    return {name: (nats[name] / in_bits, same[name] / windows.size if same else None) for name, _, _ in variants}


def batches(windows: Array) -> Iterator[Array]:
    for first in range(0, len(windows), SEQUENCES):
        yield windows[first : first + SEQUENCES]


def log_chances(logits: Array, tokens: Array) -> Array:
    """Natural logarithm of each token's probability, float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    totals = np.log(np.exp(wide).sum(axis=-1))
    chances: Array = np.take_along_axis(wide, tokens[..., None], axis=-1)[..., 0] - totals
    return chances


def recovered(bits: Mapping[str, float]) -> dict[str, float]:
    """Stage -> the share it pays back of what int4 and predicted routing lost against the teacher."""
    lost = bits["int4 + heads"] - bits["teacher"] if "teacher" in bits else 0.0
    stages = {name: value for name, value in bits.items() if name.startswith("+ LoRA")}
    return {name[8:-1]: round((bits["int4 + heads"] - value) / lost, 4) for name, value in stages.items() if lost > 0}


def recall_table(
    trainer: Trainer, teacher: Checkpoint, adapters: Adapters, windows: Array
) -> dict[int, dict[str, float]]:
    """Consumer -> how many of the teacher's experts for the next token each way of guessing names."""
    k, scored = teacher.config.top_k, trainer.scored(teacher, Adapters(adapters.heads))
    collected: dict[int, list[dict[str, Array]]] = {owner + 1: [] for owner in adapters.heads}
    for tokens in batches(windows):
        routing, predictions = scored.routing(tokens)
        for consumer, parts in collected.items():
            logits = routing[consumer][1]
            chosen = best(logits, k)
            parts.append(
                {
                    "wanted": chosen[:, 1:],
                    "heads": best(predictions[consumer], k)[:, :-1],
                    "same_as_last_token": chosen[:, :-1],
                    "next_router_here": best(scored.router(consumer, routing[consumer - 1][0]), k)[:, :-1],
                }
            )
    return {
        consumer: recalls(parts, k, teacher.config.moe_layers[consumer].num_experts)
        for consumer, parts in collected.items()
    }


def best(logits: Array, k: int) -> Array:
    """Ids of the k largest."""
    chosen: Array = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    return chosen


def recalls(parts: list[dict[str, Array]], k: int, experts: int) -> dict[str, float]:
    """Way of guessing -> recall@k; the most frequent experts are those of this very text, which favors them."""
    joined = {name: np.concatenate([part[name].reshape(-1, k) for part in parts]) for name in parts[0]}
    wanted = joined.pop("wanted")
    often = np.argsort(-np.bincount(wanted.ravel(), minlength=experts), kind="stable")[:k]
    joined["most_frequent"] = np.broadcast_to(often, wanted.shape)
    return {name: round(hit_share(guess, wanted), 4) for name, guess in joined.items()}


def hit_share(guess: Array, wanted: Array) -> float:
    """How many of the wanted ids are among the guessed ones.

    >>> hit_share(np.array([[1, 2]]), np.array([[2, 3]]))
    0.5
    """
    return float((guess[:, :, None] == wanted[:, None, :]).any(axis=1).mean())


def retention(trainer: Trainer, student: Checkpoint, adapters: Adapters, windows: Array) -> float:
    """How much of the LoRA's effect on the logits is left when it is merged and quantised again.

    effect d = with LoRA - without; merged m = merged - without; left is <m, d> / <d, d>, all routed by the routers.
    """
    loras = Adapters({}, adapters.loras)
    base, beside = trainer.scored(student, Adapters()), trainer.scored(student, loras)
    merged, product, square = trainer.scored(student, loras, merged=True), 0.0, 0.0
    for tokens in batches(windows):
        without = base.logits(tokens).astype(np.float64)
        effect = beside.logits(tokens) - without
        product += float((effect * (merged.logits(tokens) - without)).sum())
        square += float((effect * effect).sum())
    return round(product / square, 4)
