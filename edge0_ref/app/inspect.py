"""`edge0 inspect`: what a model folder holds, from headers alone; no weight is read."""

import json as json_format
from collections import Counter
from typing import Any

from edge0_ref.adapters import Adapters
from edge0_ref.app.api import Model
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import AttentionConfig, GatedDeltaConfig, KdaConfig, MixerConfig, MlaConfig, ModelConfig
from edge0_ref.contract import SigmoidGroup, SoftmaxTopK
from edge0_ref.engine.memory import size_text
from edge0_ref.engine.plan import sizes_of
from edge0_ref.errors import CheckpointError
from edge0_ref.expert_store import COEFFICIENT_NAMES, find_experts
from edge0_ref.packed import verify_sidecar

Section = dict[str, Any]


def run_inspect(model: Model, *, json: bool) -> None:
    """[ENG-063] The same facts for people, or as one JSON object."""
    facts = describe(model)
    if json:
        print(json_format.dumps(facts))
        return
    for title, section in facts.items():
        print(title)
        width = max((len(name) for name in section), default=0)
        for name, value in section.items():
            for line in lines_of(name, value):
                print(f"  {name:{width}}  {line}")
                name = ""


def describe(model: Model) -> dict[str, Section]:
    """All sections. Names with `bytes` in them are bytes."""
    checkpoint, adapters = model.checkpoint, model.adapters
    return {
        "architecture": architecture(checkpoint.config),
        "files": files(checkpoint),
        "quantization": quantization(checkpoint),
        "experts": experts(checkpoint, adapters),
        "packed": packed(checkpoint),
        "adapters": adapter_facts(adapters),
        "skipped": skipped(checkpoint),
    }


def architecture(config: ModelConfig) -> Section:
    mixers: dict[str, list[int]] = {}
    for number, layer in enumerate(config.layers):
        mixers.setdefault(mixer_text(layer.mixer), []).append(number)
    return {
        "family": config.family,
        "layers": len(config.layers),
        "mixers": mixers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "tied_head": config.head == config.embedding,
        "norm_epsilon": config.norm_epsilon,
        "max_context": config.max_context,
        "end_ids": list(config.eos_token_ids),
    }


def mixer_text(mixer: MixerConfig) -> str:
    match mixer:
        case AttentionConfig():
            return (
                f"gated attention, {mixer.heads} heads of {mixer.head_size} on {mixer.kv_heads} key-value heads, "
                f"{mixer.rotary_size} rotary dims, theta {mixer.rope_theta:g}"
            )
        case GatedDeltaConfig():
            return (
                f"gated delta net, {mixer.key_heads} key heads of {mixer.key_size}, "
                f"{mixer.value_heads} value heads of {mixer.value_size}, convolution of {mixer.conv_kernel}"
            )
        case KdaConfig():
            return f"Kimi delta attention, {mixer.heads} heads of {mixer.head_size}, convolution of {mixer.conv_kernel}"
        case MlaConfig():
            return (
                f"latent attention, {mixer.heads} heads of {mixer.key_size} + {mixer.rotary_size} rotary dims, "
                f"latent of {mixer.latent_size}, theta {mixer.rope_theta:g}"
            )


def files(checkpoint: Checkpoint) -> Section:
    shards: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        shards[info.path.name] = shards.get(info.path.name, 0) + info.nbytes
    return {
        "folder": str(checkpoint.folder),
        "shards": {name: size_text(nbytes) for name, nbytes in sorted(shards.items())},
        "tensors": len(checkpoint.tensors),
        "dtypes": dict(sorted(Counter(info.dtype for info in checkpoint.tensors.values()).items())),
        "bytes_of_tensors": sum(shards.values()),
    }


def quantization(checkpoint: Checkpoint) -> Section:
    """[STO-005] What config.json promises, and what the shapes say, which is what counts."""
    promised = checkpoint.config.quantization
    kinds: dict[str, list[str]] = {}
    for module, (rows, cols) in checkpoint.config.tensors.linears.items():
        kind = "float"
        if f"{module}.scales" in checkpoint:
            bits, group_size = checkpoint.quantization(module, (rows,), cols)
            kind = kind_text(bits, group_size, checkpoint.info(f"{module}.scales").dtype)
        kinds.setdefault(kind, []).append(module)
    overrides: dict[str, list[str]] = {}
    for module, (bits, group_size) in promised.overrides.items():
        overrides.setdefault(kind_text(bits, group_size), []).append(module)
    return {
        "default": None if promised.bits is None else kind_text(promised.bits, promised.group_size or 0),
        "overrides": {kind: endings(modules) for kind, modules in overrides.items()},
        "resident": {kind: endings(modules) for kind, modules in kinds.items()},
    }


def kind_text(bits: int, group_size: int, dtype: str = "") -> str:
    return f"{bits} bits in groups of {group_size}" + (f", {dtype} coefficients" if dtype else "")


def endings(modules: list[str]) -> dict[str, int]:
    """How many modules end in the same name: 40 x `mlp.gate` need not be listed one by one."""
    return dict(Counter(".".join(module.split(".")[-2:]) for module in modules).most_common())


def experts(checkpoint: Checkpoint, adapters: Adapters) -> Section:
    config = checkpoint.config
    layer, moe = next(iter(config.moe_layers.items()))
    layout, pieces = find_experts(checkpoint, layer, moe)
    top_k = adapters.top_k or config.top_k
    sizes = sizes_of(checkpoint)
    coefficients = {word: dtype for dtype, word in COEFFICIENT_NAMES.items()}[layout.coefficient_dtype]
    return {
        "layers": len(config.moe_layers),
        "num_experts": sorted({moe.num_experts for moe in config.moe_layers.values()}),
        "top_k": top_k,
        "router": router_text(moe.router),
        "inner": moe.inner_size,
        "shared_inner": moe.shared_inner_size,
        "quantization": kind_text(layout.bits, layout.group_size, coefficients),
        "ranges_an_expert": len(pieces),
        "bytes_per_expert": layout.nbytes,
        "bytes_per_token": top_k * sizes.one_of_each_layer,
        "bytes_of_all_experts": sizes.all_experts,
        "bytes_of_resident_weights": sizes.resident,
    }


def router_text(router: SoftmaxTopK | SigmoidGroup) -> str:
    match router:
        case SoftmaxTopK():
            return f"softmax, top {router.top_k}"
        case SigmoidGroup():
            return f"sigmoid, top {router.top_k} of the best {router.top_groups} of {router.num_groups} groups"


def packed(checkpoint: Checkpoint) -> Section:
    """[STO-044] The sidecar that experts are read from, and whether it would be refused."""
    path = checkpoint.packed
    if path is None:
        return {"present": False}
    try:
        verify_sidecar(checkpoint, path)
    except CheckpointError as error:
        return {"present": True, "file": str(path), "refused": str(error)}
    return {"present": True, "file": str(path), "bytes_of_file": path.stat().st_size, "ranges_an_expert": 1}


def adapter_facts(adapters: Adapters) -> Section:
    if not adapters.heads and not adapters.loras:
        return {"present": False}
    told = {name: value for name, value in adapters.metadata.items() if name not in ("K", "r", "alpha", "owners")}
    return {
        "present": True,
        "K": adapters.top_k,
        "owners": sorted(adapters.heads),
        "heads": len(adapters.heads),
        "loras": len(adapters.loras),
        "ranks": sorted({lora.down.shape[0] for lora in adapters.loras.values()}),
        "alpha": adapters.metadata.get("alpha"),
        "scales": sorted({lora.scale for lora in adapters.loras.values()}),
        "bytes_of_adapters": adapters.nbytes,
        "metadata": {name: str(value) for name, value in told.items()},
        "notes": list(adapters.notes),
    }


def skipped(checkpoint: Checkpoint) -> Section:
    """Tensors of parts edge0 does not run, by the prefix of the rule that skips them."""
    found = Counter(
        next(prefix for prefix in checkpoint.config.skipped if name.startswith(prefix)) for name in checkpoint.skipped
    )
    return {"tensors": len(checkpoint.skipped), "by_prefix": dict(found), "rule": list(checkpoint.config.skipped)}


def lines_of(name: str, value: Any) -> list[str]:
    """A value as lines for people."""
    match value:
        case int() if "bytes" in name:
            return [f"{value:,} ({size_text(value)})"]
        case dict():
            texts = {key: ", ".join(lines_of("", part)) for key, part in value.items()}
            return [f"{key}: {text}" for key, text in texts.items()] or ["none"]
        case list() if value and all(type(part) is int for part in value):
            return [number_ranges(value)]
        case list():
            return [", ".join(map(str, value)) or "none"]
        case None | True | False:
            return [{None: "not said", True: "yes", False: "no"}[value]]
        case _:
            return [str(value)]


def number_ranges(numbers: list[int]) -> str:
    """Runs of numbers, shortened.

    >>> number_ranges([0, 1, 2, 4, 6, 7])
    '0-2, 4, 6-7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
