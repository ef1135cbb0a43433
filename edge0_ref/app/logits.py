"""`edge0 logits`: every logit of a prompt in a file, for comparing with any other engine."""

from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from edge0_ref.app.api import Model
from edge0_ref.app.output_files import check_output, written_aside
from edge0_ref.contract import Array
from edge0_ref.engine.prompts import Prompt
from edge0_ref.errors import NonFiniteError, UsageError


def run_logits(model: Model, prompt: Prompt, out: str | None) -> None:
    """[ENG-062] Write `logits` and `token_ids`; the file is whole or is not there. Raises UsageError."""
    if out is None:
        raise UsageError("wanted --out FILE.safetensors")
    path = Path(out)
    check_output(path)
    ids = model.token_ids(prompt)
    logits = model.logits(ids)
    if not np.isfinite(logits).all():
        token = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
        raise NonFiniteError(f"the logits of token {token} hold NaN or infinity")
    write_logits(path, {"logits": logits, "token_ids": np.asarray(ids, np.int64)})
    print(f"{path}: logits {list(logits.shape)} float32")


def write_logits(path: Path, tensors: dict[str, Array]) -> None:
    """Raises UsageError."""
    try:
        with written_aside(path) as aside:
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, aside)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"{path}: cannot be written ({error})") from None
