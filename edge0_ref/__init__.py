"""edge0's reference: Mixture-of-Experts streamed from the SSD, in NumPy and Numba, to be read from top to bottom.

READING_ORDER is also the import order: no module imports one that comes after it.
"""

READING_ORDER = (
    # words: what things are called
    "errors",
    "data",
    "contract",
    "json_files",
    "config",
    "families",
    # numbers and files: bytes on a disk, bytes in a slot
    "bits",
    "safetensors_header",
    "readers",
    "checkpoint",
    "expert_store",
    "packed",
    "inventory",
    "adapter_headers",
    "adapters",
    "training",
    "tokens",
    "residency",
    "prefetch",
    # maths: from int4 to logits
    "kernels",
    "functions",
    "dequant",
    "lora",
    "router",
    "prerouter",
    "losses",
    "head_training",
    "experts",
    "executors",
    "arithmetic",
    "weights",
    "mixers",
    "moe",
    "snapshots",
    "decoder",
    "backend",
    "lanes",
    "fast_shares",
    "fast_kernels",
    "fast_dense",
    "fast_rows",
    "fast_linear",
    "fast_experts",
    "fast_operands",
    "fast_backend",
    # drive: what turns logits into text
    "engine",
    "app",
    "__main__",
)
