"""`edge0 generate`: text to stdout as it comes, a live line and a table to stderr, one JSON object at the end."""

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict

from edge0_ref.app.api import Model
from edge0_ref.app.live import open_screen
from edge0_ref.app.report import measure_rows, print_table, result_rows
from edge0_ref.engine.prompts import Prompt
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Generation
from edge0_ref.errors import UsageError


def run_generate(
    model: Model,
    prompt: Prompt,
    max_tokens: int,
    settings: SamplingSettings,
    stop: Sequence[str],
    *,
    chat: bool,
    json: bool,
    stats: bool,
) -> None:
    """[ENG-061] Stream a text (ids, if there is no tokenizer), then say what it cost."""
    if chat:
        prompt = chat_prompt(model, prompt)
    generation = model.generate(prompt, max_tokens, settings, stop)
    screen = open_screen(lambda: generation.result)
    try:
        for piece in generation:
            screen.write(piece.text if model.has_tokenizer else f"{piece.token_id} ")
    finally:
        screen.close()
        sys.stdout.write("\n")
    result = generation.result
    if result.seed is not None and settings.seed is None:
        model.settings.notify(f"seed {result.seed}")
    if stats:
        assert model.plan is not None
        print_table("memory plan", [(what, nbytes) for what, nbytes in model.plan.rows])
        print_table("what it cost", [*result_rows(result), *measure_rows(model.measures)])
    if json:
        print(json_format.dumps(json_result(model, generation)))


def chat_prompt(model: Model, prompt: Prompt) -> list[int]:
    """The prompt as a user's message in the model's chat template, which writes special tokens itself."""
    if not isinstance(prompt, str):
        raise UsageError("--chat wants a text prompt, not ids")
    if not prompt:
        raise UsageError("empty prompt: a conversation needs a message")
    text = model.tokenizer.chat([{"role": "user", "content": prompt}])
    return model.tokenizer.encode(text, special=False)


def json_result(model: Model, generation: Generation) -> dict[str, object]:
    """The result, and how it was run."""
    assert model.plan is not None
    return {
        **asdict(generation.result),
        "model": str(model.checkpoint.folder),
        "backend": model.settings.backend,
        "plan": asdict(model.plan.plan),
        "planned_bytes": model.plan.total,
        "packed": None if model.checkpoint.packed is None else str(model.checkpoint.packed),
        "adapters": {"heads": len(model.adapters.heads), "loras": len(model.adapters.loras)},
    }
