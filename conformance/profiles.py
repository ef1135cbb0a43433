"""[NUM-011] In which dtype a backend keeps activations between operations, and what each rounding to it may cost.

Sums are float32 in every profile. A narrow profile rounds activations where they enter a linear layer and where
results leave it: each time by at most `roundoff` of the value, or by `smallest` where the dtype has no finer numbers.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Profile:
    """A dtype of activations.

    roundoff: the largest relative error of rounding to it, 0 for float32, whose own errors every bound counts; largest:
    beyond it nothing is judged, for what is rounded may be infinite; share: how much worse than plain arithmetic with
    the same roundings an implementation may be, which rounds at other places or more often.
    """

    name: str
    roundoff: float
    smallest: float
    largest: float
    share: float


FLOAT32 = Profile("float32", 0.0, 0.0, math.inf, 16)
PROFILES = {
    profile.name: profile
    for profile in (
        FLOAT32,
        Profile("bfloat16", 2.0**-8, 2.0**-134, math.inf, 4),
        Profile("float16", 2.0**-11, 2.0**-25, 2.0**15, 4),
    )
}


def activations_of(backend: Any) -> str:
    """[BCK-012] The backend's own word; without one, float32."""
    return getattr(backend, "activations", "float32")


def profile_of(backend: Any) -> Profile:
    """A word that the spec does not know is judged like float32, and fails BCK-012."""
    return PROFILES.get(activations_of(backend), FLOAT32)
