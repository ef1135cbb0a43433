"""Vector operations that are functions of edge0 itself: pieces of the decoder, and headers of files."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge0_ref.arithmetic import Arithmetic
from edge0_ref.functions import l2_normalize
from edge0_ref.mixers.attention import rotary_angles, rotate_halves
from edge0_ref.mixers.gated_delta import L2_EPSILON, decay_of
from edge0_ref.mixers.kda import channel_decay
from edge0_ref.mixers.mla import LatentReader, rotate_pairs
from edge0_ref.mixers.norm import rms_norm
from edge0_ref.safetensors_header import read_header


def piece(operation: str, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The outputs of an operation by name, or None if it is none of these."""
    match operation:
        case "rms_norm":
            return {"y": rms_norm(inputs["x"], inputs["weight"], inputs["epsilon"])}
        case "rotary":
            angles = rotary_angles(inputs["positions"], inputs["size"], inputs["theta"])
            if inputs["pairs"] == "halves":
                return {"y": rotate_halves(inputs["x"], angles, inputs["size"])}
            return {"y": rotate_pairs(inputs["x"], angles)}
        case "l2_normalize":
            return {"y": l2_normalize(inputs["x"], inputs["scale"], L2_EPSILON)}
        case "decay":
            return {"decay": decay_of(inputs["a"], inputs["a_log"], inputs["dt_bias"])}
        case "channel_decay":
            return {"decay": channel_decay(inputs["f"], inputs["a_log"], inputs["dt_bias"], inputs["lower_bound"])}
        case "header":
            return header(inputs["file"])
        case _:
            return with_state(operation, inputs)


def with_state(operation: str, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Pieces that remember: the state is an input, and an output where it is advanced."""
    arithmetic = Arithmetic()
    match operation:
        case "conv":
            y = arithmetic.causal_conv(inputs["x"], np.ascontiguousarray(inputs["taps"].T), inputs["state"])
            return {"y": y, "state": inputs["state"]}
        case "delta_rule":
            parts = (inputs[part] for part in ("q", "k", "v", "beta", "decay", "state"))
            return {"y": arithmetic.delta_rule(*parts), "state": inputs["state"]}
        case "attention":
            q, keys, values = inputs["q"], inputs["keys"], inputs["values"]
            y = arithmetic.causal_attention(q, keys, values, inputs["first"], inputs["scale"], values.shape[2])
            return {"y": y}
        case "latent":
            reader = LatentReader(inputs["w_uk"], inputs["w_uv"], inputs["scale"])
            return {"y": reader.absorbed(inputs["q"], inputs["q_rotary"], inputs["rows"], inputs["first"])}
        case _:
            return None


def header(file: str) -> dict[str, Any]:
    """What a file says of its tensors; file: its bytes in hexadecimal."""
    with TemporaryDirectory(prefix="conformance-") as folder:
        path = Path(folder) / "file.safetensors"
        path.write_bytes(bytes.fromhex(file))
        tensors, metadata = read_header(path)
    told = {
        name: {"dtype": info.dtype, "axes": list(info.shape), "offset": info.offset, "nbytes": info.nbytes}
        for name, info in tensors.items()
    }
    return {"tensors": told, "metadata": metadata}
