"""Comparing by exactness class: bits, either, choice, bound, state, error.

A tolerance is never a number somebody liked: it is the error bound of the arithmetic that is allowed, derived beside
the oracle, and outside of it stands one wall for every backend: 1 % relative L2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.profiles import FLOAT32, Profile
from conformance.report import Recorder
from conformance.requirements import Requirement

OUTER_WALL = 0.01  # relative L2 against the float64 oracle, whatever the derived bound allows
ROUNDOFF = 2.0**-24  # of float32
SLACK = 2.0**-50  # how far two correct float64 evaluations of exp, erf or a sum of few terms may lie apart


@dataclass(frozen=True, eq=False)
class Evidence:
    """What was compared, in the terms of a vector: an output that was got, and what the vector would say of it.

    wanted: values, a list of alternatives, or (error kind, what its message mentions); bound: beside a float64 value.
    """

    got: np.ndarray | None
    wanted: Any
    bound: np.ndarray | None = None


class ConformanceError(AssertionError):
    """A backend and the spec differ. The message says where, by how much, and how to see it again."""

    def __init__(self, message: str, requirement: str = "", evidence: Evidence | None = None) -> None:
        super().__init__(message)
        self.requirement, self.evidence = requirement, evidence


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|; the plain |got| where the wanted values are all zero."""
    scale = float(np.linalg.norm(want.astype(np.float64).ravel()))
    distance = float(np.linalg.norm((got.astype(np.float64) - want.astype(np.float64)).ravel()))
    return distance / scale if scale else distance


def hexadecimal(value: Any) -> str:
    """A value with its bit pattern, for classes where the last bit matters."""
    array = np.asarray(value)
    return f"{array.item()!r} (0x{array.view(f'u{array.dtype.itemsize}').item():0{2 * array.dtype.itemsize}x})"


@dataclass(frozen=True, repr=False)
class Judge:
    """Compares for one test: the requirements it cites, the path it takes, where its figures go.

    requirements: those the test cites, the first is blamed unless `blame` says which; path: "staged" and so on;
    profile: the dtype of the backend's activations, on which bounds depend.
    """

    requirements: Sequence[Requirement]
    path: str
    recorder: Recorder
    again: str
    profile: Profile = FLOAT32

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Short: Hypothesis prints the arguments of a failing test."""
        printer.text("judge")

    def bits(self, got: np.ndarray, want: np.ndarray, what: str, blame: str = "") -> None:
        """Every bit equal: -0.0 is not 0.0, and NaN patterns count."""
        self.either(got, [want], what, blame)

    def either(self, got: np.ndarray, options: Sequence[np.ndarray], what: str, blame: str = "") -> None:
        """Each element has the bits of one of the options (fused and unfused, say)."""
        options = [np.asarray(option) for option in options]
        self._same_form(got, options[0], what, blame)
        same = np.zeros(got.shape, bool)
        for option in options:
            same |= as_bits(got) == as_bits(option)
        if not same.all():
            where = tuple(int(i) for i in np.argwhere(~same)[0])
            wanted = " or ".join(hexadecimal(option[where]) for option in options)
            self.fail(what, hexadecimal(got[where]), wanted, blame, where, Evidence(got, list(options)))
        self._measure(blame, 0.0, 0.0, what)

    def rounded_once(self, got: np.ndarray, low: np.ndarray, high: np.ndarray, what: str, blame: str = "") -> None:
        """float32 nearest to a value that float64 arithmetic knows to lie in [low, high]."""
        self._same_form(got, low.astype(np.float32), what, blame)
        inside = (got >= low.astype(np.float32)) & (got <= high.astype(np.float32))
        if not inside.all():
            where = tuple(int(i) for i in np.argwhere(~inside)[0])
            wanted = f"{hexadecimal(low.astype(np.float32)[where])}, the float32 nearest to {low[where]!r}"
            ends = (low.astype(np.float32).astype(np.float64), high.astype(np.float32).astype(np.float64))
            evidence = Evidence(got, (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2)
            self.fail(what, hexadecimal(got[where]), wanted, blame, where, evidence)
        self._measure(blame, 0.0, 0.0, what)

    def choice(self, got: np.ndarray, want: np.ndarray, what: str, blame: str = "") -> None:
        """The same ids in the same order."""
        self._same_form(got, want, what, blame)
        if not np.array_equal(got, want):
            row = int(np.argwhere((got != want).any(axis=-1))[0][0])
            self.fail(what, got[row].tolist(), want[row].tolist(), blame, (row,), Evidence(got, [want]))
        self._measure(blame, 0.0, 0.0, what)

    def bound(self, got: np.ndarray, want: np.ndarray, bound: np.ndarray, what: str, blame: str = "") -> None:
        """|got - want| <= bound for every element, and 1 % relative L2 for the whole."""
        self._same_form(got, want.astype(np.float32), what, blame)
        error = np.abs(got.astype(np.float64) - want)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where((error == 0) | np.isinf(bound), 0.0, error / bound)
        ratios = np.where(np.isnan(ratios), np.inf, ratios)
        distance, ratio = relative_l2(got, want), float(ratios.max(initial=0.0))
        self._measure(blame, distance, ratio, what)
        if not ratio <= 1.0:
            where = tuple(int(i) for i in np.unravel_index(int(ratios.argmax()), ratios.shape))
            wanted, evidence = f"{float(want[where])!r} within {float(bound[where]):.3g}", Evidence(got, want, bound)
            self.fail(what, repr(float(got[where])), wanted, blame, where, evidence)
        self._wall(got, want, bound, distance, what, blame)

    def whole(
        self, got: np.ndarray, want: np.ndarray, bound: float, what: str, blame: str = "", wall: float = OUTER_WALL
    ) -> None:
        """Relative L2 of the whole array within a derived bound, and within 1 %."""
        self._same_form(got, want.astype(np.float32), what, blame)
        distance = relative_l2(got, want)
        distance = math.inf if math.isnan(distance) else distance
        self._measure(blame, distance, distance / bound if bound else math.inf * distance, what)
        limit = min(bound, wall)
        if not distance <= limit:
            # an element at least is off by more than an even share of what is allowed: a vector can say that
            share = limit * (float(np.linalg.norm(want.ravel())) or 1.0) / math.sqrt(want.size)
            evidence = Evidence(got, want, np.full(want.shape, share))
            self.fail(what, f"relative L2 {distance:.3g}", f"at most {limit:.3g}", blame, evidence=evidence)

    def like_plain(self, got: np.ndarray, want: np.ndarray, plain: np.ndarray, what: str, blame: str = "") -> None:
        """Relative L2 of the whole, within a share of what plain arithmetic of the same profile loses."""
        self._like_plain(got, want, plain, what, blame, OUTER_WALL)

    def deep(self, got: np.ndarray, want: np.ndarray, plain: np.ndarray, what: str, blame: str = "") -> None:
        """The same of whole layers of a decoder, where the roundings of a narrow profile add up beyond any wall."""
        wall = OUTER_WALL if self.profile is FLOAT32 else math.inf
        self._like_plain(got, want, plain, what, blame, wall)

    def _like_plain(
        self, got: np.ndarray, want: np.ndarray, plain: np.ndarray, what: str, blame: str, wall: float
    ) -> None:
        least = max(8 * ROUNDOFF, self.profile.roundoff)
        self.whole(got, want, self.profile.share * max(relative_l2(plain, want), least), what, blame, wall)

    def state(self, got: Any, want: Any, what: str, blame: str = "") -> None:
        """Integers, sets and counters: equal."""
        if got != want:
            self.fail(what, got, want, blame)
        self._measure(blame, 0.0, 0.0, what)

    def holds(self, condition: bool, what: str, got: Any, want: Any, blame: str = "") -> None:
        """A law that is not an equality."""
        if not condition:
            self.fail(what, got, want, blame)
        self._measure(blame, 0.0, 0.0, what)

    def error(
        self, kind: type[Exception], call: Callable[[], object], what: str, names: str = "", blame: str = ""
    ) -> None:
        """`call` raises `kind`, and the message contains `names`."""
        evidence = Evidence(None, (kind.__name__, names))
        try:
            result = call()
        except kind as error:
            if names not in str(error):
                self.fail(
                    what, f"{type(error).__name__}: {error}", f"a message that names {names!r}", blame, (), evidence
                )
        except Exception as error:
            self.fail(what, f"{type(error).__name__}: {error}", kind.__name__, blame, (), evidence)
        else:
            self.fail(what, f"a result ({type(result).__name__})", kind.__name__, blame, (), evidence)
        self._measure(blame, 0.0, 0.0, what)

    def fail(
        self,
        what: str,
        got: Any,
        want: Any,
        blame: str = "",
        where: tuple[int, ...] = (),
        evidence: Evidence | None = None,
    ) -> None:
        requirement = self._blamed(blame)
        index = f"[{', '.join(map(str, where))}]" if where else ""
        path = f" on {self.path}" if self.path else ""
        raise ConformanceError(
            f"{requirement.id} {requirement.exactness}, {requirement.place}: {what}{index}{path}\n"
            f"  got     {got}\n  wanted  {want}\n  again   {self.again} --only {requirement.id}",
            requirement.id,
            evidence,
        )

    def _blamed(self, blame: str) -> Requirement:
        return next((r for r in self.requirements if r.id == blame), self.requirements[0])

    def _measure(self, blame: str, distance: float, ratio: float, what: str) -> None:
        for requirement in [self._blamed(blame)] if blame else self.requirements:
            self.recorder.measure(requirement.id, self.path, distance, ratio, what)

    def _wall(
        self, got: np.ndarray, want: np.ndarray, bound: np.ndarray, distance: float, what: str, blame: str
    ) -> None:
        """The outer wall; results that cancel to less than their own rounding error have no relative error to judge."""
        meaningful = np.linalg.norm(want.ravel()) * OUTER_WALL > np.linalg.norm(np.asarray(bound).ravel())
        if meaningful and distance > OUTER_WALL:
            self.fail(what, f"relative L2 {distance:.3g}", f"at most {OUTER_WALL}", blame)

    def _same_form(self, got: Any, want: np.ndarray, what: str, blame: str) -> None:
        if not isinstance(got, np.ndarray) or got.shape != want.shape or got.dtype != want.dtype:
            form = f"{got.dtype} {list(got.shape)}" if isinstance(got, np.ndarray) else type(got).__name__
            self.fail(what, form, f"{want.dtype} {list(want.shape)}", blame)


def as_bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape)
