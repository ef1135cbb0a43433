"""Commands and the Python API: everything a user touches."""

from edge0_ref.app.api import Model, open_model
from edge0_ref.app.locate import embedded_model

__all__ = ["Model", "embedded_model", "open_model"]
