"""`edge0 synth`: names, shapes and dtypes of published checkpoints, sane activations, and nothing half-made."""

import errno
import json
import os
import shutil
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from edge0_ref.app import open_model, synth
from edge0_ref.app.presets import PRESETS, Preset, make_config, model_of
from edge0_ref.app.random_blocks import NewTensor, RandomBlocks, Values
from edge0_ref.app.synth import ASIDE, adapter_files, model_files, run_synth, shards_of
from edge0_ref.errors import CheckpointError, UsageError
from edge0_ref.inventory import open_checkpoint
from edge0_ref.tokens import open_tokenizer
from tests.app.command import ROOT, edge0, edge0_here, refusal, start
from tests.ref.builders import Tensor, expert_bytes
from tests.ref.ling import tensors_of

DATA = ROOT / "tests" / "data"
FIXTURES = {"qwen3.6-35b-a3b": "qwen_mlx4_bf16", "ling-3.0-tiny": "ling_edge0"}
NAMES = list(FIXTURES)


def small(name: str, **more: int) -> dict[str, int]:
    """Whole numbers of a preset's config.json that make it as small as the fixture of its family."""
    fixture = json.loads((DATA / FIXTURES[name] / "config.json").read_text("utf-8"))
    fixture |= fixture.get("text_config", {})
    config = dict(PRESETS[name].config)
    config |= config.get("text_config", {})
    numbers = [field for field, value in config.items() if type(value) is int and type(fixture.get(field)) is int]
    return {field: fixture[field] for field in numbers if not field.endswith("token_id")} | more


def make(
    folder: Path, name: str, *, seed: int = 0, tokenizer: bool = False, adapters: bool = True, **more: int
) -> Path:
    run_synth(name, str(folder), small(name, **more), seed, tokenizer=tokenizer, adapters=adapters)
    return folder


def planned(name: str) -> tuple[Preset, dict[str, NewTensor]]:
    """All tensors of a published model, none of which is written."""
    preset = PRESETS[name]
    modules = model_files(preset, model_of(make_config(preset), name))
    return preset, {tensor.name: tensor for module in modules for tensor in module}


@pytest.mark.spec("STO-047")
@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_are_those_that_converters_write(tmp_path: Path, name: str) -> None:
    """At the fixture's size: names and shapes made by others. A_log is bfloat16 in the published 4-bit file."""
    made = open_checkpoint(make(tmp_path / "made", name)).tensors
    fixture = tensors_of(FIXTURES[name])
    assert made.keys() == fixture.keys()
    assert {key: info.shape for key, info in made.items()} == {key: held.shape for key, held in fixture.items()}
    differs = {key for key, info in made.items() if info.dtype != fixture[key].dtype}
    assert all(key.endswith("A_log") for key in differs)


@pytest.mark.parametrize(
    ("name", "expert", "everything", "others", "owners", "features", "targets"),
    [
        ("qwen3.6-35b-a3b", 1_769_472, 18_119_393_280, 1.39e9, range(6, 39), 2560, 310),
        ("ling-3.0-tiny", 1_327_104, 23 * 128 * 1_327_104, None, range(7, 23), 1792, None),
    ],
)
def test_the_published_sizes_follow_from_config_json(
    name: str, expert: int, everything: int, others: float | None, owners: range, features: int, targets: int | None
) -> None:
    preset, tensors = planned(name)
    model = model_of(make_config(preset), name)
    paths = tuple(f"{path}." for candidates in model.tensors.experts.values() for path in candidates)
    experts = sum(tensor.nbytes for tensor in tensors.values() if tensor.name.startswith(paths))
    assert experts == everything
    assert experts // sum(moe.num_experts for moe in model.moe_layers.values()) == expert
    rest = sum(tensor.nbytes for tensor in tensors.values()) - experts
    assert others is None or abs(rest / others - 1) < 0.01
    heads, loras = adapter_files(preset, model, seed=0)
    shapes = {tensor.name: tensor.shape for tensor in heads.tensors}
    experts_a_layer = next(iter(model.moe_layers.values())).num_experts
    for owner in owners:
        assert shapes.pop(f"layers.{owner}.fc1.weight") == (512, features)
        assert shapes.pop(f"layers.{owner}.fc2.weight") == (experts_a_layer, 512)
        assert shapes.pop(f"layers.{owner}.linear_init.weight") == (experts_a_layer, features)
    assert not shapes
    assert targets is None or len(loras.tensors) == 2 * targets


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(50, 120))
def test_a_shard_ends_before_the_tensor_that_would_make_it_too_large(sizes: list[int], limit: int) -> None:
    tensors = [NewTensor(f"t{n}", "U8", (size,), Values("codes"), "") for n, size in enumerate(sizes)]
    shards = list(shards_of([tensors[:3], tensors[3:]], limit))
    assert [tensor for shard in shards for tensor in shard.tensors] == tensors
    assert all(0 < shard.nbytes <= limit for shard in shards)
    following = [shard.tensors[0].nbytes for shard in shards[1:]]
    assert all(shard.nbytes + first > limit for shard, first in zip(shards, following, strict=False))


def test_many_shards_open_and_hold_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3.6-35b-a3b"
    whole = open_checkpoint(make(tmp_path / "whole", name))
    cut = [*shards_of(sorted(planned_small(name), key=synth.layer_of), 300_000)]
    monkeypatch.setattr(synth, "shards_of", lambda modules, shard_bytes: cut)
    sharded = open_checkpoint(make(tmp_path / "cut", name))
    assert len(cut) > 3
    assert {info.path.name for info in sharded.tensors.values()} == {shard.name for shard in cut}
    assert all(sharded.read(tensor).tobytes() == whole.read(tensor).tobytes() for tensor in whole.tensors)


def planned_small(name: str) -> list[list[NewTensor]]:
    preset = PRESETS[name]
    return list(model_files(preset, model_of(make_config(preset, small(name)), name)))


@pytest.mark.parametrize("name", NAMES)
def test_headers_are_compact_and_unpadded(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "made", name)
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            text = file.read(struct.unpack("<Q", file.read(8))[0])
        entries = json.loads(text)
        assert text == json.dumps(entries, separators=(",", ":")).encode()
        assert list(entries) == ["__metadata__", *sorted(entries.keys() - {"__metadata__"})]
        assert load_file(path) if path.parent.name == "adapters" else True


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_writes_the_same_bytes_and_no_two_experts_are_alike(tmp_path: Path, name: str) -> None:
    folders = [make(tmp_path / str(n), name, seed=seed) for n, seed in enumerate((3, 3, 4))]
    one, same, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert one == same != other
    if name == "qwen3.6-35b-a3b":
        tensors = {
            key: Tensor(info.dtype, info.shape, one[info.offset : info.offset + info.nbytes])
            for key, info in open_checkpoint(folders[0]).tensors.items()
        }
        experts = [expert_bytes(tensors, layer, expert) for layer in range(8) for expert in range(16)]
        assert len(set(experts)) == len(experts)


@pytest.mark.parametrize("experts", [16, 32])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_finite_and_of_the_size_of_one(tmp_path: Path, unchecked: None, name: str, experts: int) -> None:
    """Unit inputs and rows of unit length give logits of spread 1; what a norm's weights and a LoRA add is a factor."""
    folder = make(tmp_path / "made", name, num_experts=experts)
    routed = set()

    def watch(point: str, layer: int, value: object) -> None:
        if point == "routing":
            routed.update((layer, expert) for expert in value.experts.ravel().tolist())  # type: ignore[attr-defined]

    with open_model(folder, observe=watch) as model:
        assert model.adapters.heads
        logits = model.logits(list(range(5, 29)))
        list(model.generate([5, 6, 7], 8))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3
    moe_layers = len({layer for layer, _ in routed})
    assert len(routed) > moe_layers * experts // 2  # tokens differ in the experts they choose


def test_a_tensor_is_made_of_pieces_of_bounded_size() -> None:
    """However large: what is written, not what is held, grows with the model."""
    _, tensors = planned("qwen3.6-35b-a3b")
    largest = max(tensors.values(), key=lambda tensor: tensor.nbytes)
    blocks = RandomBlocks(0)
    sizes = [len(chunk) for chunk in blocks.chunks(largest)]
    assert sum(sizes) == largest.nbytes > 2**27
    assert max(sizes) <= 2**25


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_has_ids_for_any_text_and_a_text_for_any_id(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "made", name, tokenizer=True, vocab_size=1000)
    tokenizer = open_tokenizer(folder)
    for text in ("In the beginning", "naïve Ω\n\t\0", "\N{GRINNING FACE}<300>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len({tokenizer.token(token) for token in range(1000)}) == 1000
    assert all(0 <= token < 1000 for token in tokenizer.encode("any text"))
    assert tokenizer.chat([{"role": "user", "content": "hello"}]) == "hello\n"


@pytest.mark.spec("STO-047")
@pytest.mark.parametrize("calls", range(0, 60, 7))
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_run_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, failure: BaseException
) -> None:
    left = iter(range(calls))

    def failing(descriptor: int, data: memoryview) -> int:
        if next(left, None) is None:
            raise failure
        return write(descriptor, data)

    write = os.write
    monkeypatch.setattr(os, "write", failing)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else UsageError
    with pytest.raises(expected):
        make(tmp_path / "made", "ling-3.0-tiny")
    assert not list(tmp_path.iterdir())
    (tmp_path / "made").mkdir()  # and a folder that was there stays
    with pytest.raises(expected):
        make(tmp_path / "made", "ling-3.0-tiny")
    assert [*tmp_path.rglob("*")] == [tmp_path / "made"]


@pytest.mark.spec("STO-047")
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_nothing_that_opens_and_the_next_one_works(tmp_path: Path, kind: signal.Signals) -> None:
    folder, options = tmp_path / "made", ["--layers", 2, "--set", "vocab_size=2000", "--experts", 64]
    for _ in range(10):
        with start("synth", "qwen3.6-35b-a3b", "--out", folder, *options) as process:
            while not (folder / ASIDE).exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(kind)
            process.wait(timeout=300)
        if process.returncode:
            break
        shutil.rmtree(folder)  # it was done before the signal came, which shows nothing
    assert process.returncode == (130 if kind == signal.SIGINT else -kind)
    assert folder.exists() == (kind == signal.SIGKILL)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)
    made = edge0("synth", "qwen3.6-35b-a3b", "--out", folder, *options, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["bytes"] > 10**8
    open_checkpoint(folder)
    assert not (folder / ASIDE).exists()


@pytest.mark.spec("ENG-065")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt-5", "--out", "x"], "qwen3.6-35b-a3b, ling-3.0-tiny"),
        (["ling-3.0-tiny"], "--out"),
        (["ling-3.0-tiny", "--out", "no/such/parent"], "no/such/parent"),
        (["ling-3.0-tiny", "--out", "spec"], "exists already"),
        (["ling-3.0-tiny", "--out", "LICENSE"], "exists already"),
        (["ling-3.0-tiny", "--out", "x", "--set", "wings=2"], "hidden_size"),
        (["ling-3.0-tiny", "--out", "x", "--set", "model_type=2"], "'model_type'"),
        (["ling-3.0-tiny", "--out", "x", "--set", "num_experts"], "num_experts=512"),
        (["ling-3.0-tiny", "--out", "x", "--set", f"hidden_size={'9' * 5000}"], "num_experts=512"),
        (["qwen3.6-35b-a3b", "--out", "x", "--set", "hidden_size=100"], "100 weights per row, wanted groups of 64"),
        (["ling-3.0-tiny", "--out", "x", "--seed", "-1"], "seed is -1, wanted 0 to 2**64 - 1"),
        (["ling-3.0-tiny", "--out", "x", "--seed", 2**64], "wanted 0 to 2**64 - 1"),
        (["ling-3.0-tiny", "--out", "x", "--experts", "12"], "groups of 12 experts"),
        (["ling-3.0-tiny", "--out", "x", "--layers", "0"], "num_hidden_layers is 0"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_made(capsys, arguments: list[str], says: str) -> None:
    assert says in refusal(edge0_here(capsys, "synth", *arguments))
    assert not (ROOT / "x").exists()


def test_a_disk_that_is_too_small_is_refused_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(UsageError, match=r"needs 18\.4 GiB \(19\d{9} bytes\), the disk has 977 KiB free"):
        run_synth("qwen3.6-35b-a3b", str(tmp_path / "made"), {}, 0, tokenizer=False, adapters=True)
    assert not list(tmp_path.iterdir())
