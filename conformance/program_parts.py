"""Executors and decoders that live inside a program; each request names one by its number."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.framing import Message
from conformance.process import ProgramError
from conformance.reply import Reply
from edge0_ref.adapters import Adapters
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.contract import Counters, ExecutorKind, ExpertStore, Observe, Plan, Routing
from edge0_ref.errors import ReadError

if TYPE_CHECKING:
    from conformance.program import Program

PLAIN_TYPES = (bool, int, float, str)
Tensors = dict[str, np.ndarray]


class Part:
    """What executors and decoders share: a number, the process that knows it, an end."""

    noun = ""

    def __init__(self, program: "Program") -> None:
        self._program = program
        self._number, self._process = program.handle()
        self._closed = False
        self.counters = Counters()

    def _ask(self, what: str, fields: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Reply:
        """A request to this one. Its state is told also by a refusal, if it has one by then."""
        if not self._program.knows(self._process):
            raise ProgramError(f"{self._program.command}: {self.noun} {self._number} ended with its process")
        numbered = {self.noun: self._number, **(fields or {})}
        reply = self._program.send(f"{self.noun}_{what}", numbered, tensors or {}, **self._callbacks())
        if "error" not in reply.message.fields or "counters" in reply.message.fields:
            self.counters = reply.counters()
            self._take_state(reply)
        return reply.checked()

    def _callbacks(self) -> dict[str, Any]:
        raise NotImplementedError

    def _take_state(self, reply: Reply) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if not self._closed and self._program.knows(self._process):
            self._ask("close")
        self._closed = True


class ProgramExecutor(Part):
    """Its reads reach the store while a request is open, and at no other time."""

    noun = "executor"

    def __init__(self, program: "Program", kind: ExecutorKind, store: ExpertStore, slots: int) -> None:
        super().__init__(program)
        self._store = store
        self.resident: frozenset[int] = frozenset()
        form = {name: value for name, value in vars(store.layout).items() if isinstance(value, PLAIN_TYPES)}
        self._ask("open", {"kind": kind, "slots": slots, "num_experts": store.num_experts, **form})

    def _callbacks(self) -> dict[str, Any]:
        return {"read": self._read}

    def _take_state(self, reply: Reply) -> None:
        self.resident = reply.numbers("resident")

    def _read(self, expert: Any) -> Message:
        """[BCK-026] The bytes of an expert, or the error of reading them."""
        slot = np.empty(self._store.layout.nbytes, np.uint8)
        try:
            self._store.read_into(expert, slot)
        except (ReadError, IndexError, TypeError) as error:
            return Message({"error": {"kind": "ReadError", "message": str(error)}})
        return Message({}, {"slot": slot})

    def prepare(self, experts: Sequence[int]) -> None:
        self._ask("prepare", {"experts": [int(expert) for expert in experts]})

    def __call__(self, x: np.ndarray, routing: Routing) -> np.ndarray:
        return self._ask("call", {}, {"x": x, "experts": routing.experts, "weights": routing.weights}).tensor("y")

    def release_hints(self) -> None:
        self._ask("release")


class ProgramDecoder(Part):
    """A decoder that reads the checkpoint's files itself."""

    noun = "decoder"

    def __init__(
        self, program: "Program", checkpoint: Checkpoint, plan: Plan, adapters: Adapters, observe: Observe | None
    ) -> None:
        super().__init__(program)
        self._observe = observe
        self.position = 0
        tensors: Tensors = {}
        for owner, head in adapters.heads.items():
            tensors |= {f"head.{owner}.{name}": array for name, array in vars(head).items()}
        for module, lora in adapters.loras.items():
            tensors |= {f"lora.{module}.down": lora.down, f"lora.{module}.up": lora.up}
        loras = {module: lora.scale for module, lora in adapters.loras.items()}
        fields = {"checkpoint": str(checkpoint.folder), "observe": observe is not None, **vars(plan)}
        self._ask("open", fields | {"heads": list(adapters.heads), "loras": loras}, tensors)

    def _callbacks(self) -> dict[str, Any]:
        return {"observe": self._observed}

    def _observed(self, reply: Reply) -> None:
        """[BCK-027] Counters are known while the observer looks, as they are of a decoder in this process."""
        self.counters = reply.counters()
        if self._observe is not None:
            self._observe(*reply.observation())

    def _take_state(self, reply: Reply) -> None:
        self.position = reply.field("position", int)

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        return self._ask("prefill", {"tokens": [int(token) for token in tokens]}).tensor("logits")

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self._ask("all_logits", {"tokens": [int(token) for token in tokens]}).tensor("logits")

    def step(self, token: int) -> np.ndarray:
        return self._ask("step", {"token": int(token)}).tensor("logits")

    def reset(self) -> None:
        self._ask("reset")

    def snapshot(self) -> int:
        state: int = self._ask("snapshot").field("state", int)
        return state

    def restore(self, state: int) -> None:
        self._ask("restore", {"state": state})
