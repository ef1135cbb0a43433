"""`edge0 doctor`: what this machine's memory and disk can do, and what to expect of a model on it.

Of model and adapters only headers are read for the arithmetic; the model's files serve as something to read from when
the disk is measured. A token needs the bytes of K experts a layer from the disk, less those that stayed in slots, and
from memory the same experts, all resident weights and the adapters. Reads that were predicted hide behind compute, or
compute behind them; those of layers that nobody predicts for are waited for:

    seconds a token = max(compute, predicted reads) + other reads

Compute is that of the fastest backend here, unless one is named.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0_ref.adapter_headers import AdapterFacts, adapter_facts, decode_metadata, facts_of, owners_of
from edge0_ref.app.capacity import Machine, measure
from edge0_ref.app.locate import locate
from edge0_ref.app.presets import PRESETS, Preset, make_config, model_of
from edge0_ref.app.read_mode import machine_bytes, write_measured
from edge0_ref.app.synth import adapter_files, expert_layout, model_files
from edge0_ref.checkpoint import Checkpoint
from edge0_ref.config import ModelConfig
from edge0_ref.contract import ExpertLayout
from edge0_ref.expert_store import find_experts
from edge0_ref.inventory import open_checkpoint

EXPECTED = 0.9  # of a limit
REUSE = 0.45  # of a token's experts were the last token's, at best, in trained models


@dataclass(frozen=True)
class Load:
    """What one token needs. experts: bytes of K experts a layer; resident: of every other weight that it meets.

    adapters: bytes of theirs; unpredicted: of `experts`, those of layers that no head predicts for.
    """

    model: str
    top_k: int
    layout: ExpertLayout
    experts: int
    resident: int
    all_experts: int
    adapters: int
    unpredicted: int

    @property
    def touched(self) -> int:
        return self.experts + self.resident + self.adapters


def run_doctor(model: Path | str | None, top_k: int | None, backend: str | None, cache: Path | None) -> dict[str, Any]:
    """Measure, remember the read mode, and tell: a table on stderr, a line of JSON on stdout."""
    if model is None:
        loads = [preset_load(name, preset, top_k) for name, preset in PRESETS.items()]
        folder, checkpoint = Path.cwd(), None
    else:
        located = locate(model)
        checkpoint = open_checkpoint(located.folder)
        loads = [checkpoint_load(checkpoint, top_k, facts_of_adapters(checkpoint, located.adapters))]
        folder = checkpoint.folder
    machine = measure(folder, loads[0].layout, loads[0].top_k, backend, checkpoint)
    told: dict[str, Any] = {"machine": machine_facts(machine), "models": [expectation(load, machine) for load in loads]}
    told |= {"remembered": remember(cache, machine)}
    show(told)
    print(json.dumps(told))
    return told


def facts_of_adapters(checkpoint: Checkpoint, folder: Path | None) -> AdapterFacts:
    """Of a folder, or of the heads in the model's own files."""
    if folder is not None:
        return adapter_facts(folder, checkpoint.config)
    metadata = decode_metadata(checkpoint.folder, checkpoint.metadata) if checkpoint.heads else {}
    return facts_of(checkpoint.folder, checkpoint.heads, metadata, checkpoint.config)


def checkpoint_load(checkpoint: Checkpoint, top_k: int | None, adapters: AdapterFacts | None = None) -> Load:
    adapters = adapters or AdapterFacts()
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    layer, moe = next(iter(checkpoint.config.moe_layers.items()))
    layout, _ = find_experts(checkpoint, layer, moe)
    top_k = top_k or adapters.top_k or checkpoint.config.top_k
    return load_of(str(checkpoint.folder), checkpoint.config, sizes, layout, top_k, adapters)


def preset_load(name: str, preset: Preset, top_k: int | None) -> Load:
    """The same of a published model that is not here."""
    config = model_of(make_config(preset), name)
    sizes = {tensor.name: tensor.nbytes for module in model_files(preset, config) for tensor in module}
    layout = expert_layout(config, next(iter(config.moe_layers)))
    published = adapter_files(preset, config, seed=0)
    owners = owners_of(tensor.name for file in published for tensor in file.tensors)
    adapters = AdapterFacts(preset.adapter_top_k, owners, sum(file.nbytes for file in published))
    return load_of(name, config, sizes, layout, top_k or preset.adapter_top_k, adapters)


def load_of(
    model: str,
    config: ModelConfig,
    sizes: Mapping[str, int],
    layout: ExpertLayout,
    top_k: int,
    adapters: AdapterFacts,
) -> Load:
    """sizes: tensor -> bytes. An embedding that is not the head too is looked up: a row of it is nothing."""
    paths = tuple(f"{path}." for candidates in config.tensors.experts.values() for path in candidates)
    looked_up = (f"{config.embedding}.",) if config.embedding != config.head else ()
    experts = sum(size for name, size in sizes.items() if name.startswith(paths))
    resident = sum(size for name, size in sizes.items() if not name.startswith((*paths, *looked_up)))
    a_token = {layer: layout.nbytes * min(top_k, moe.num_experts) for layer, moe in config.moe_layers.items()}
    unpredicted = sum(nbytes for layer, nbytes in a_token.items() if layer - 1 not in adapters.owners)
    return Load(model, top_k, layout, sum(a_token.values()), resident, experts, adapters.nbytes, unpredicted)


def figure(value: float) -> float:
    """Three digits: more would be noise.

    >>> figure(1234.5), figure(0.0123456)
    (1230.0, 0.0123)
    """
    return float(f"{value:.3g}")


def rate_in_gb(rate: float | str) -> float | str:
    return rate if isinstance(rate, str) else figure(rate / 1e9)


def machine_facts(machine: Machine) -> dict[str, Any]:
    rates = {
        mode: rates if isinstance(rates, str) else {depth: rate_in_gb(rate) for depth, rate in rates.items()}
        for mode, rates in machine.disk.items()
    }
    return {
        "memory_gb_s": figure(machine.memory / 1e9),
        "experts_gb_s": {backend: rate_in_gb(rate) for backend, rate in machine.experts.items()},
        "disk_gb_s": rates,
        "raw_disk_gb_s": figure(machine.disk_rate / 1e9),
        "read_mode": machine.mode,
        "file_system": machine.file_system,
        "measured_on": machine.measured_on,
        "memory_bytes": machine_bytes(),
    }


def expectation(load: Load, machine: Machine) -> dict[str, Any]:
    """What one decoded token costs, the limits, and which of them binds."""
    backend, rate = machine.fastest
    seconds = {
        "disk": load.experts / machine.disk_rate,
        "disk_with_reuse": load.experts * (1 - REUSE) / machine.disk_rate,
        "memory": load.touched / machine.memory,
        "kernels": load.touched / rate,
    }
    waited = load.unpredicted / machine.disk_rate
    step, step_with_reuse = (
        max(seconds["kernels"], seconds[disk] - share * waited) + share * waited
        for disk, share in (("disk", 1), ("disk_with_reuse", 1 - REUSE))
    )
    facts = {
        "model": load.model,
        "k": load.top_k,
        "backend": backend,
        "bytes_per_expert": load.layout.nbytes,
        "bytes_per_token": load.experts,
        "bytes_touched_per_token": load.touched,
        "bytes_of_all_experts": load.all_experts,
        "bytes_resident": load.resident,
        "bytes_of_adapters": load.adapters,
        "bytes_unpredicted_per_token": load.unpredicted,
        **{f"limit_{name}_tok_s": figure(1 / value) for name, value in seconds.items()},
        "predicted_tok_s": figure(EXPECTED / step),
        "predicted_with_reuse_tok_s": figure(EXPECTED / step_with_reuse),
    }
    return {**facts, "verdict": verdict(load, seconds)}


def verdict(load: Load, seconds: Mapping[str, float]) -> str:
    if load.all_experts + load.resident < machine_bytes() // 2:
        return "all of it fits in memory: after a while the disk no longer matters, and kernels are the limit"
    if load.unpredicted == load.experts:
        return "no layer's experts are predicted, so every read is waited for: adapters with prerouter heads help most"
    if seconds["disk"] > 1.1 * seconds["kernels"]:
        factor = seconds["disk"] / seconds["kernels"]
        return f"the disk is the limit, {factor:.1f} times as slow as compute: fewer experts a token or more slots help"
    if seconds["kernels"] > 1.1 * seconds["disk"]:
        return "compute is the limit: reads hide behind it"
    return "disk and compute are about equal: reading ahead helps most here"


def remember(cache: Path | None, machine: Machine) -> str | None:
    """[STO-046] The file the mode was written to, or None where there is no place for it."""
    if cache is None:
        return None
    entry = {"mode": machine.mode, "gb_s": figure(machine.disk_rate / 1e9)}
    try:
        return str(write_measured(cache, machine.file_system, entry))
    except OSError:
        return None


def show(told: Mapping[str, Any]) -> None:
    from edge0_ref.app.report import print_table

    machine = told["machine"]
    rows = [("memory, two threads", f"{machine['memory_gb_s']} GB/s")]
    for backend, rate in machine["experts_gb_s"].items():
        text = rate if isinstance(rate, str) else f"{rate} GB/s"
        rows.append((f"experts of one token, by {backend}", text))
    for mode, rates in machine["disk_gb_s"].items():
        text = rates if isinstance(rates, str) else ", ".join(f"{rate} ({depth})" for depth, rate in rates.items())
        rows.append((f"disk, {mode}, GB/s (threads)", text))
    rows += [("file system", machine["file_system"]), ("read mode", machine["read_mode"])]
    print_table("this machine", rows)
    for model in told["models"]:
        expected = f"{model['predicted_tok_s']} to {model['predicted_with_reuse_tok_s']}"
        print_table(
            f"{model['model']}, K = {model['k']}",
            [
                ("an expert", model["bytes_per_expert"]),
                ("a token reads", model["bytes_per_token"]),
                ("of it, without predictions", model["bytes_unpredicted_per_token"]),
                ("a token meets in memory", model["bytes_touched_per_token"]),
                ("limit from the disk", f"{model['limit_disk_tok_s']} tok/s"),
                (f"the same if {REUSE:.0%} stay in slots", f"{model['limit_disk_with_reuse_tok_s']} tok/s"),
                ("limit from memory", f"{model['limit_memory_tok_s']} tok/s"),
                (f"limit from kernels, {model['backend']}", f"{model['limit_kernels_tok_s']} tok/s"),
                (f"expected with --backend {model['backend']}", f"{expected} tok/s"),
                ("verdict", model["verdict"]),
            ],
        )
