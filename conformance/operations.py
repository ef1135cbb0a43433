"""The operations that vectors name, as spec/README.md lists them: what each is given and what it gives.

Inputs that may be absent are not among these.
"""

OPERATIONS = {
    "dequantize": ("matrix", "weights"),
    "quantize": ("weights bits group_size", "packed scales biases"),
    "linear": ("x weight", "y"),
    "route": ("logits spec", "experts weights"),
    "predict": ("head features", "logits"),
    "executor": ("experts x routing slots", "y"),
    "residency": ("kind slots num_experts events", "events counters"),
    "sequence": ("kind slots experts events", "y"),
    "features": ("hidden executed before num_experts", "features"),
    "sample": ("logits settings prompt generated draw", "token"),
    "draws": ("seed count", "draws"),
    "adapters": ("files", "owners top_k notes scales"),
    "widen": ("values", "values"),
    "narrow": ("values dtype", "values"),
    "dequantize_as": ("matrix", "weights"),
    "elementwise": ("function x", "y"),
    "rms_norm": ("x weight epsilon", "y"),
    "rotary": ("pairs x positions size theta", "y"),
    "conv": ("x taps state", "y state"),
    "l2_normalize": ("x scale", "y"),
    "decay": ("a a_log dt_bias", "decay"),
    "channel_decay": ("f a_log dt_bias lower_bound", "decay"),
    "delta_rule": ("q k v beta decay state", "y state"),
    "attention": ("q keys values first scale", "y"),
    "latent": ("q q_rotary rows w_uk w_uv first scale", "y"),
    "header": ("file", "tensors metadata"),
    "fold": ("terms", "sum"),
}


def inputs_of(operation: str) -> set[str]:
    return set(OPERATIONS[operation][0].split())


def outputs_of(operation: str) -> set[str]:
    return set(OPERATIONS[operation][1].split())
