"""One context for all texts of a conversation or a server, so that the decoder is planned and built once."""

from dataclasses import replace

from edge0_ref.app.api import Model
from edge0_ref.errors import UsageError

DEFAULT_CONTEXT = 4096


def planned_for(model: Model, context: int | None) -> Model:
    """The same model, planned once for all texts: `context` tokens, or as many as it knows up to a default.

    Raises UsageError.
    """
    longest = model.config.max_context
    wanted = min(longest, DEFAULT_CONTEXT) if context is None else context
    if not 2 <= wanted <= longest:
        raise UsageError(f"--context {wanted}: wanted 2 to {longest}, which is what this model knows")
    return Model(model.checkpoint, model.adapters, replace(model.settings, context=wanted))
