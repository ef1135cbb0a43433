"""Kept prefixes: a prompt that begins as an earlier one did computes only what is new.

A recurrent state cannot be cut back to an earlier position, so whole states are kept where texts are likely to go on:
at the end of a turn, and where two prompts part. Only states that computing the same ids as a prompt would give are
kept. After tokens that consumed predictions the state is another one, so an answer is a prompt's part in the next turn;
otherwise a text would depend on what happened to be kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from edge0_ref.contract import Array, Decoder
from edge0_ref.engine.memory import size_text
from edge0_ref.engine.prefix_files import PrefixFiles
from edge0_ref.errors import ReadError, UsageError

Ids = Int32[np.ndarray, " tokens"]
WORTH_KEEPING = 64  # tokens that two prompts must share, beyond what is kept, for the place where they part to be kept


@dataclass(frozen=True)
class PrefixBudget:
    """Bytes for kept states in memory, and on the disk below `folder`; 0 is none."""

    memory: int
    disk: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("memory", self.memory), ("disk", self.disk)):
            if value < 0:
                raise UsageError(f"bytes of {name} for kept prefixes: {value}, wanted at least 0")


@runtime_checkable
class PortableSnapshots(Protocol):
    """A decoder whose snapshots may leave it: for a file, or for another decoder of the same model, K and adapters."""

    def arrays_of(self, state: Any) -> dict[str, Array]: ...

    def state_of(self, arrays: Mapping[str, Array]) -> Any: ...


@dataclass(frozen=True, eq=False)
class Kept:
    """The state after `ids`, and the logits of the last of them. In memory it has a state, on the disk a path.

    after_answer: the ids end with an answer, which the conversation's next prompt may hold in other tokens.
    """

    ids: Ids
    nbytes: int
    state: Any = None
    logits: Array | None = None
    path: Path | None = None
    after_answer: bool = False

    def begins(self, ids: Ids) -> bool:
        return shared(self.ids, ids) == len(self.ids)

    def goes_on_from(self, earlier: "Kept") -> bool:
        return len(self.ids) > len(earlier.ids) and earlier.begins(self.ids) and not self.after_answer


class Prefixes:
    """[ENG-080] States by the ids they stand for; the longest that begins a prompt is restored.

    nbytes: of a state after so many tokens and its logits, at most; to_numpy: the backend's, for logits;
    steps_are_prompts: nothing is predicted, so a decoded token leaves the state that it would leave in a prompt.
    """

    def __init__(
        self,
        budget: PrefixBudget,
        nbytes: Callable[[int], int],
        to_numpy: Callable[[Any], Array],
        files: PrefixFiles | None = None,
        *,
        steps_are_prompts: bool = False,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.budget, self._nbytes, self._to_numpy, self._files, self._notify = budget, nbytes, to_numpy, files, notify
        self._steps_are_prompts = steps_are_prompts
        self._kept: dict[bytes, Kept] = {}  # least recently used first
        self._decoder: Decoder[Any] | None = None
        self._said: set[str] = set()
        for ids, path in files.find() if files else ():
            self._kept[ids.tobytes()] = Kept(ids, nbytes(len(ids)), path=path)

    @property
    def memory_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values() if kept.state is not None)

    def attach(self, decoder: Decoder[Any]) -> None:
        """The decoder that states come from and go to. Those in memory follow it if they can."""
        if not isinstance(decoder, PortableSnapshots):
            self._kept = {key: kept for key, kept in self._kept.items() if kept.path}
            if self.budget.disk:
                self._say_once("disk", "this backend's states cannot be written: prefixes are kept in memory only")
        self._decoder = decoder

    def prefill(self, prompt: Sequence[int], turn: int | None = None) -> tuple[Array, int]:
        """[ENG-080] (logits of the prompt's last token, how many of its tokens were not computed), after a `reset`.

        turn: where the last turn ends, which the next prompt of the conversation will begin with; None: at the end.
        """
        assert self._decoder is not None
        ids = np.asarray(prompt, np.int32)
        logits, done = self._restore_longest(ids)
        cached = done
        for end in self._cuts(ids, done, len(ids) if turn is None else turn):
            logits = self._to_numpy(self._decoder.prefill(prompt[done:end]))
            done = end
            if end < len(ids) or turn in (None, end):
                self.keep(ids[:end], logits)
        assert logits is not None
        return logits, cached

    def _cuts(self, ids: Ids, done: int, turn: int) -> Iterator[int]:
        """Where to stop: where this prompt parts from a kept one, at the end of the turn, at the end."""
        parting = max((shared(kept.ids, ids) for kept in self._kept.values()), default=0)
        cuts = {turn, len(ids)} | ({parting} if parting >= done + WORTH_KEEPING else set())
        return (cut for cut in sorted(cuts) if done < cut <= len(ids))

    def _restore_longest(self, ids: Ids) -> tuple[Array | None, int]:
        assert self._decoder is not None
        for kept in sorted(self._kept.values(), key=lambda kept: -len(kept.ids)):
            if not kept.begins(ids):
                continue
            held = self._from_disk(kept) if kept.state is None else kept
            if held is not None:
                self._decoder.restore(held.state)
                self._kept.pop(held.ids.tobytes(), None)
                self._kept[held.ids.tobytes()] = held  # as the most recently used
                return held.logits, len(held.ids)
        return None, 0

    def keep_text(self, ids: Sequence[int], logits: Array) -> None:
        """The state after an answer, where no step consumed a prediction: there it is that of a prompt (DEC-043)."""
        if self._steps_are_prompts:
            self.keep(np.asarray(ids, np.int32), logits, after_answer=True)

    def keep(self, ids: Ids, logits: Array, *, after_answer: bool = False) -> None:
        """[ENG-082] Keep the decoder's present state, which `ids` led to, if that fits into the memory budget."""
        assert self._decoder is not None
        nbytes = self._nbytes(len(ids))
        if self._make_room(nbytes, ids):
            old = self._kept.pop(ids.tobytes(), None)
            path = old.path if old else None
            self._kept[ids.tobytes()] = Kept(
                ids.copy(), nbytes, self._decoder.snapshot(), logits.copy(), path, after_answer
            )

    def _make_room(self, nbytes: int, ids: Ids) -> bool:
        if nbytes > self.budget.memory:
            self._say_once(
                "memory",
                f"a prefix of {len(ids)} tokens takes {size_text(nbytes)}, more than the "
                f"{size_text(self.budget.memory)} there are for prefixes: not kept",
            )
            return False
        for kept in [kept for kept in self._kept.values() if kept.state is not None]:
            if self.memory_bytes + nbytes > self.budget.memory:
                self._evict(kept)
        return True

    def _evict(self, kept: Kept) -> None:
        """To the disk, unless a longer one goes on from it: an older turn of a conversation is not needed again."""
        del self._kept[kept.ids.tobytes()]
        path = kept.path if kept.path and self._files and self._files.touch(kept.path) else None
        if path is None and not any(o.goes_on_from(kept) for o in self._kept.values()):
            path = self._to_disk(kept)
        if path is not None:
            self._kept = {kept.ids.tobytes(): replace(kept, state=None, logits=None, path=path), **self._kept}

    def _to_disk(self, kept: Kept) -> Path | None:
        if self._files is None or not isinstance(self._decoder, PortableSnapshots):
            return None
        assert kept.logits is not None
        path = self._files.write(kept.ids, {**self._decoder.arrays_of(kept.state), "logits": kept.logits})
        self._kept = {  # without those whose files had to go for this one
            key: other
            for key, other in self._kept.items()
            if other.state is not None or (other.path and other.path.exists())
        }
        return path

    def _from_disk(self, kept: Kept) -> Kept | None:
        """The same in memory; None, and forgotten, if the file is gone or damaged."""
        assert self._files is not None
        assert kept.path is not None
        if not isinstance(self._decoder, PortableSnapshots):
            return None
        del self._kept[kept.ids.tobytes()]
        try:
            arrays = self._files.read(kept.path, kept.ids)
        except ReadError as error:
            self._notify(str(error))
            return None
        if arrays is None or not self._make_room(kept.nbytes, kept.ids):
            return None
        logits = arrays.pop("logits")
        return replace(kept, state=self._decoder.state_of(arrays), logits=logits)

    def close(self) -> None:
        """What is in memory goes to the disk, the most recently used last."""
        for kept in [kept for kept in self._kept.values() if kept.state is not None]:
            self._evict(kept)

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._notify(text)


def turn_of(ids: Sequence[int], asked: Sequence[int]) -> int:
    """How many ids of a prompt the conversation's next one begins with. asked: it without the answer's opening.

    >>> turn_of([5, 6, 90], asked=[5, 6, 7])
    2
    """
    return shared(np.array(ids, np.int32), np.array(asked, np.int32))


def shared(first: Int32[np.ndarray, " first"], second: Int32[np.ndarray, " second"]) -> int:
    """How many ids both begin with.

    >>> shared(np.array([5, 6, 7], np.int32), np.array([5, 6, 9, 9], np.int32))
    2
    """
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if differ.size else length
