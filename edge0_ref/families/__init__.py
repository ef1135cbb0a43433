"""Model families: how a `config.json` becomes a ModelConfig, and what the tensors are called.

A family is a module with ARCHITECTURE, `matches(model_type, architectures)` and
`read(fields, quantization, eos_token_ids)`.
"""

from edge0_ref.families import bailing_v3, qwen3_5_moe

FAMILIES = (qwen3_5_moe, bailing_v3)
