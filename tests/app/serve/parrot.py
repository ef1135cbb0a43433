"""A backend that says what it is told to: the last text between ⟦ and ⟧ of its prompt, and then ends.

In that text ⌛ is a token that never comes, ☠ one whose experts cannot be read, 🐌 one that takes its time. So a test
decides, in its request, what a model does, and servers in other processes can be brought into any situation.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge0_ref.app import embedded_model
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Array, Counters, Plan
from edge0_ref.errors import ReadError
from edge0_ref.tokens import open_tokenizer

TOLD = re.compile(r"⟦([^⟦⟧]*)⟧")
NEVER, BROKEN, SLOW = "⌛", "☠", "🐌"
MARKS = f"⟦⟧{NEVER}{BROKEN}{SLOW}"
LIKELY = 60.0  # a logit beside zeros: no draw chooses another token

# As published templates do, this one can show tools in two notations, begin a thought, and refuse a conversation.
TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% if tags %} as <function=NAME>{% endif %}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "system" and not loop.first -%}{{ raise_exception("system comes first") }}{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{% if enable_thinking %}<think>\n{% endif %}{%- endif -%}
"""


def told(text: str) -> str:
    """The prompt that makes the parrot say this."""
    return f"⟦{text}⟧"


def make_model(folder: Path) -> Path:
    """The embedded model's folder, with that template."""
    import json

    folder.mkdir()
    for path in embedded_model().iterdir():
        if path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


class ParrotDecoder:
    """Reads prompts as text, and follows the script it finds there."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, observe: Any) -> None:
        self._tokenizer = open_tokenizer(checkpoint.folder)
        self._vocab_size, self._end = checkpoint.config.vocab_size, checkpoint.config.eos_token_ids[0]
        self._observe = observe or (lambda *point: None)
        self.counters = Counters()
        self.reset()

    def reset(self) -> None:
        self._ids: list[int] = []
        self._script: list[int | str] = []

    @property
    def position(self) -> int:
        return len(self._ids)

    def prefill(self, tokens: Sequence[int]) -> Array:
        self._ids += tokens
        found = TOLD.findall(self._tokenizer.decode(self._ids))
        self._script = []
        for part in re.split(f"([{MARKS}])", found[-1] if found else "Amen."):
            self._script += [part] if part in MARKS and part else self._tokenizer.encode(part)
        return self._next()

    def step(self, token: int) -> Array:
        self._ids.append(token)
        return self._next()

    def _next(self) -> Array:
        self.counters.reads += 1
        self._observe("layer_output", 0, None)
        while self._script and isinstance(self._script[0], str):
            self._happen(str(self._script.pop(0)))
        logits = np.zeros(self._vocab_size, np.float32)
        logits[self._script.pop(0) if self._script else self._end] = LIKELY
        return logits

    def _happen(self, mark: str) -> None:
        if mark == BROKEN:
            raise ReadError("layer 2 expert 3: the disk failed")
        for _ in range(1 if mark == SLOW else 2000):
            time.sleep(0.005)
            self._observe("layer_output", 0, None)
        assert mark == SLOW, "nobody ended a token that never comes"

    def all_logits(self, tokens: Sequence[int]) -> Array:
        return np.stack([self.prefill([token]) for token in tokens])

    def snapshot(self) -> Any:
        return list(self._ids), list(self._script)

    def restore(self, state: Any) -> None:
        self._ids, self._script = list(state[0]), list(state[1])

    def close(self) -> None:
        pass


class ParrotBackend:
    """What `--backend tests.app.serve.parrot:create` finds."""

    name = "parrot"
    claims = frozenset({"decoder"})

    def to_numpy(self, array: Array) -> Array:
        return array

    def decoder(self, checkpoint: Checkpoint, plan: Plan, adapters: Any = None, observe: Any = None) -> ParrotDecoder:
        return ParrotDecoder(checkpoint, plan, observe)


def create() -> ParrotBackend:
    return ParrotBackend()
