"""How likely the model held a token: natural logarithms, of the logits as they are, before any sampling setting."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from edge0_ref.engine.sampling import rank


@dataclass(frozen=True)
class Chances:
    """The log probability of a token where it stands, and of the likeliest tokens there, likeliest first."""

    token_id: int
    log_probability: float
    top: tuple[tuple[int, float], ...]


def chances(logits: Float32[np.ndarray, " vocab"], token: int, top: int) -> Chances:
    """[ENG-094] log softmax(logits) in float64, of the token and the `top` largest; of equal ones the lower id first.

    >>> chances(np.zeros(2, np.float32), token=0, top=1)
    Chances(token_id=0, log_probability=-0.6931471805599453, top=((0, -0.6931471805599453),))
    """
    scores = logits.astype(np.float64)
    best = rank(scores, top) if top else ()
    scores = scores - scores.max()
    scores -= np.log(np.exp(scores).sum())
    return Chances(token, float(scores[token]), tuple((int(other), float(scores[other])) for other in best))
