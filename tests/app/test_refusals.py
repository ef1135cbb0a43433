"""Bad input on the command line: a named error in one line, exit code 2, nothing half-written."""

import json
import os
from io import StringIO

import pytest

from edge0_ref.app.locate import embedded_model
from edge0_ref.packed import SIDECAR
from tests.app.command import ROOT, edge0_here, refusal, refused
from tests.ref.builders import (
    Recipe,
    Tensor,
    adapter_tensors,
    build,
    build_adapters,
    make_config,
    make_tensors,
    write_model,
    write_safetensors,
)

pytestmark = pytest.mark.spec("ENG-065")
RECIPE = Recipe(layers=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate"], "--prompt"),
        (["generate", "--prompt", "a", "--prompt-ids", "5"], "one prompt"),
        (["generate", "--prompt", ""], "empty prompt"),
        (["generate", "--prompt-ids", ""], "empty prompt"),
        (["generate", "--prompt-ids", "5,x"], "'x'"),
        (["generate", "--prompt-ids", "5,99999"], "99999"),
        (["generate", "--prompt-ids", f"5,{'9' * 5000}"], "is not a token id"),
        (["generate", "--prompt", "a", "--memory", "9" * 310], "less than 2**63 bytes"),
        (["bench", "--k", "9" * 5000], "is not a whole number above 0"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "a", "--memory", "1MiB"], "MiB work"),
        (["generate", "--prompt", "a", "--memory", "plenty"], "'plenty'"),
        (["generate", "--prompt", "a", "--slots", "0"], "slots is 0"),
        (["generate", "--prompt", "a", "--executor", "magic"], "whole_layer"),
        (["generate", "--prompt", "a", "--read-mode", "osmosis"], "direct"),
        (["generate", "--prompt", "a", "--backend", "abacus"], "reference"),
        (["generate", "--prompt", "a", "--backend", "no.such:thing"], "no.such:thing"),
        (["generate", "--prompt", "a", "--adapters", "nowhere"], "nowhere"),
        (["generate", "--no-such-option"], "--no-such-option"),
        (["generate", "nowhere", "--prompt", "a"], "nowhere"),
        (["generate", "tests/data/qwen_mlx4", "--prompt", "a"], "tokenizer.json"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", ""], "MODEL is ''"),
        (["step", "--prompt", "a", "--layer", "8"], "0 to 7"),
        (["logits", "--prompt-ids", "5"], "--out"),
        (["logits", "--prompt-ids", "5", "--out", "no/such/folder/x.safetensors"], "no/such/folder"),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(capsys, monkeypatch, arguments, says) -> None:
    monkeypatch.chdir(ROOT)
    assert says in refusal(edge0_here(capsys, *arguments))


@pytest.mark.parametrize(
    "arguments", [["--prompt", ""], ["--prompt", "a", "--max-tokens", "0"], ["nowhere", "--prompt", "a"], ["--what"]]
)
def test_so_it_is_in_a_process_of_its_own(arguments) -> None:
    refused("generate", *arguments)


LONG = "x" * 300  # no file system takes it


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", LONG, "--prompt-ids", "5"],
        ["generate", "--prompt-ids", "5", "--adapters", LONG],
        ["generate", "--prompt-ids", "5", "--packed", LONG],
        ["logits", "--prompt-ids", "5", "--out", LONG],
        ["pack", "--out", LONG],
        ["synth", "ling-3.0-tiny", "--layers", "2", "--out", LONG],
        ["sessions"],
        ["chat"],
    ],
)
def test_what_the_operating_system_refuses_is_told_with_its_file(capsys, monkeypatch, arguments) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"/{LONG}")
    monkeypatch.setattr("sys.stdin", StringIO("hi"))
    said = refusal(edge0_here(capsys, *arguments))
    assert LONG in said
    assert "File name too long" in said


def test_a_file_s_name_tells_a_terminal_nothing(capsys) -> None:
    said = refusal(edge0_here(capsys, "inspect", "Ä\x1b[2J\u202e"))
    assert "Ä\\x1b[2J\\u202e: no such folder" in said


def test_brackets_and_colons_of_a_file_s_name_are_shown_as_they_are(capsys, tmp_path) -> None:
    name = "m[red]:smile:[/bold]"
    (tmp_path / name).mkdir(parents=True)
    build(tmp_path / name, RECIPE)
    few = ("--scenario", "on-demand", "--tokens", 1, "--prompt-tokens", 2)
    for command in (["trace", "--out", tmp_path / "trace.json"], ["bench"]):
        done = edge0_here(capsys, *command, tmp_path / name, *few)
        assert (done.returncode, name in "".join(done.stderr.split())) == (0, True), done.stderr


def damaged(folder, how: str) -> str:
    """A model folder with one thing wrong; the word an error must say."""
    build(folder, RECIPE, shards=2)
    shard = sorted(folder.glob("*.safetensors"))[0]
    index = folder / "model.safetensors.index.json"
    match how:
        case "missing shard":
            shard.unlink()
        case "truncated shard":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "garbage shard":
            shard.write_bytes(b"\xff" * 200)
        case "index of a missing tensor":
            weight_map = json.loads(index.read_text())
            weight_map["weight_map"]["extra.weight"] = shard.name
            index.write_text(json.dumps(weight_map))
            return "extra.weight"
        case "other architecture":
            config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
            (folder / "config.json").write_text(json.dumps(config))
            return "MambaForCausalLM"
        case "wrong number of experts":
            config = make_config(RECIPE)
            config["text_config"]["num_experts"] = RECIPE.experts + 1
            (folder / "config.json").write_text(json.dumps(config))
            return "experts"
    return shard.name


@pytest.mark.parametrize(
    "how",
    [
        "missing shard",
        "truncated shard",
        "garbage shard",
        "index of a missing tensor",
        "other architecture",
        "wrong number of experts",
    ],
)
def test_a_damaged_model_is_refused_in_one_line(tmp_path, capsys, how) -> None:
    says = damaged(tmp_path, how)
    assert says in refusal(edge0_here(capsys, "generate", tmp_path, "--prompt-ids", "5,6"))


def test_scales_that_are_no_numbers_are_found_and_leave_no_file(tmp_path) -> None:
    tensors = make_tensors(RECIPE)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.switch_mlp.up_proj.scales"))
    held = tensors[name]
    tensors[name] = Tensor(held.dtype, held.shape, b"\xc0\x7f" * (len(held.data) // 2))  # NaN in bfloat16
    write_model(tmp_path / "model", make_config(RECIPE), tensors)
    out = tmp_path / "out.safetensors"
    line = refused("logits", tmp_path / "model", "--prompt-ids", "5,6", "--out", out)
    assert "layer 1 expert" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.spec("STO-042")
@pytest.mark.parametrize("kind", ["pipe", "link to nothing", "looping link"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "adapters",
        SIDECAR,
    ],
)
def test_what_is_there_and_is_no_file_is_not_taken_as_absent(tmp_path, capsys, name, kind) -> None:
    for path in embedded_model().iterdir():
        (tmp_path / path.name).symlink_to(path)
    odd = tmp_path / name
    odd.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(odd if kind == "looping link" else tmp_path / "nothing")
    assert f"{odd}: " in refusal(edge0_here(capsys, "generate", tmp_path, "--prompt-ids", "5", "--max-tokens", "1"))


@pytest.mark.spec("STO-042")
def test_a_pipe_in_place_of_a_sidecar_is_not_waited_for_where_a_read_mode_is_looked_for(tmp_path, capsys) -> None:
    os.mkfifo(build(tmp_path, RECIPE) / SIDECAR)
    done = edge0_here(capsys, "generate", tmp_path, "--prompt-ids", "5", "--memory", "1TiB")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"{tmp_path / SIDECAR}: not a regular file")


def test_a_folder_in_place_of_a_shard_is_not_missing(tmp_path, capsys) -> None:
    build(tmp_path, RECIPE, shards=2)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    shard.mkdir()
    assert f"{shard}: not a regular file" in refusal(edge0_here(capsys, "inspect", tmp_path))


def test_adapters_of_another_model_are_refused(tmp_path, capsys) -> None:
    build(tmp_path / "model", RECIPE)
    build_adapters(tmp_path / "adapters", Recipe(layers=3, hidden=128), [0], {})
    options = ("--prompt-ids", "5", "--adapters", tmp_path / "adapters")
    assert "head of layer 0" in refusal(edge0_here(capsys, "generate", tmp_path / "model", *options))


def test_adapters_beside_the_model_are_used_unless_told_otherwise(tmp_path, capsys) -> None:
    """Broken ones show it: they are an error until `--no-adapters`."""
    build(tmp_path, RECIPE)
    (tmp_path / "adapters").mkdir()
    write_safetensors(tmp_path / "adapters" / "a.safetensors", adapter_tensors(RECIPE, [2], {}))
    command = ("generate", tmp_path, "--prompt-ids", "5", "--max-tokens", "1")
    assert "head of layer 2" in refusal(edge0_here(capsys, *command))
    assert edge0_here(capsys, *command, "--no-adapters").returncode == 0
