"""Commands and the Python API: everything a user touches."""

from edge0_ref.app.api import Model, embedded_model, open_model

__all__ = ["Model", "embedded_model", "open_model"]
