"""`edge0 generate`, the main job."""

import json
import os
import pty
import signal
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge0_ref.app import embedded_model, live
from edge0_ref.tokens import open_tokenizer
from tests.app.command import ROOT, TIMEOUT, edge0, edge0_here, start
from tests.app.terminal import read_all

# what mlx-lm 0.32.2 continues "Genesis 1\n" with, greedily
GENESIS = [449, 575, 269, 259, 337, 12, 540, 12, 199, 51, 80, 773, 318, 259, 457, 12, 540, 12, 199, 51, 80, 773]
GENESIS += [318, 259, 457, 12, 540, 12, 303, 392, 347, 452, 810, 318, 368, 12, 719, 392, 303, 656, 364, 12, 719, 392]
GENESIS += [303, 656, 364, 12, 655, 280, 522, 364, 290, 491, 290, 364, 14, 199, 296, 303, 392, 587, 364, 260]
TOKENIZER = open_tokenizer(embedded_model())


def result_of(done: subprocess.CompletedProcess[str]) -> dict:
    """The JSON object on the last line; above it stands the same text."""
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    result = json.loads(last)
    assert done.stdout == f"{result['text']}\n{last}\n" or not result["text"]
    return result


@pytest.mark.spec("ENG-041", "ENG-044", "ENG-061")
def test_the_embedded_model_goes_on_as_mlx_lm_does() -> None:
    result = result_of(edge0("generate", "--prompt", "Genesis 1\n", "--max-tokens", 64, "--no-adapters", "--json"))
    assert result["token_ids"] == GENESIS
    assert result["text"] == TOKENIZER.decode(GENESIS)
    assert (result["finish_reason"], result["drops"], result["seed"]) == ("length", 0, None)
    assert result["bytes_read"] == result["reads"] * 20_736
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 0


@pytest.mark.spec("ENG-061")
@pytest.mark.parametrize(
    "options",
    [
        ("--executor", "exact", "--read-mode", "mmap"),
        ("--executor", "hot", "--read-mode", "direct"),
        ("--executor", "whole_layer", "--backend", "edge0_ref.backend:create"),
        ("--slots", "1"),
    ],
)
def test_no_option_of_how_to_run_changes_the_text(capsys, options) -> None:
    ids = ",".join(map(str, TOKENIZER.encode("Genesis 1\n")))
    request = ("generate", "--prompt-ids", ids, "--max-tokens", 6, "--no-adapters", "--json")
    assert result_of(edge0_here(capsys, *request, *options))["token_ids"] == GENESIS[:6]


@pytest.mark.spec("ENG-011", "ENG-061")
def test_a_fresh_seed_is_reported_and_gives_the_text_again(capsys) -> None:
    sampled = ("generate", "--prompt", "And God said", "--max-tokens", 12, "--temperature", "1.5", "--top-p", "0.95")
    done = edge0_here(capsys, *sampled)
    seed = done.stderr.split()[-1]
    assert done.stderr == f"edge0: seed {seed}\n"
    again = result_of(edge0_here(capsys, *sampled, "--seed", seed, "--json"))
    assert again["text"] == done.stdout.removesuffix("\n")


@pytest.mark.spec("ENG-020", "ENG-061")
def test_a_stop_string_ends_the_text(capsys) -> None:
    request = ("generate", "--prompt", "Genesis 1\n", "--stop", "zzz", "--stop", "saying", "--no-adapters", "--json")
    result = result_of(edge0_here(capsys, *request))
    assert result["text"] == "The word of the LORD, "
    assert result["finish_reason"] == "stop"


@pytest.mark.spec("ENG-003", "ENG-061")
def test_chat_puts_the_prompt_into_the_template(capsys) -> None:
    """The embedded model's template is the message itself."""
    request = ("generate", "--chat", "--prompt", "Genesis 1\n", "--max-tokens", 4, "--no-adapters", "--json")
    result = result_of(edge0_here(capsys, *request))
    assert result["token_ids"] == GENESIS[:4]


@pytest.mark.spec("ENG-061")
def test_a_model_without_a_tokenizer_gives_ids(capsys) -> None:
    folder = ROOT / "tests" / "data" / "qwen_mlx4"
    expected = load_file(folder / "expected.safetensors")
    prompt = ",".join(map(str, expected["token_ids"].tolist()))
    done = edge0_here(capsys, "generate", folder, "--prompt-ids", prompt, "--max-tokens", 1)
    assert done.stdout.split() == [str(np.argmax(expected["logits_full"][-1]))]


@pytest.mark.spec("ENG-030", "ENG-031")
def test_a_budget_prints_its_plan_and_the_process_stays_within_it() -> None:
    request = ("--prompt", "Genesis 1\n", "--max-tokens", 3, "--no-adapters")
    done = edge0("generate", *request, "--memory", "400MiB", "--json")
    assert "resident weights" in done.stderr
    assert "together, of 400 MiB" in done.stderr
    result = result_of(done)
    assert result["token_ids"] == GENESIS[:3]
    assert result["peak_bytes"] <= 400 * 2**20


@pytest.mark.spec("ENG-061")
def test_the_table_of_costs_goes_to_stderr(capsys) -> None:
    done = edge0_here(capsys, "generate", "--prompt", "Genesis 1\n", "--max-tokens", 3, "--stats", "--no-adapters")
    assert done.stdout == TOKENIZER.decode(GENESIS[:3]) + "\n"
    assert all(word in done.stderr for word in ("bytes read", "in a slot", "dropped", "memory plan"))


@pytest.mark.spec("ENG-002", "ENG-060")
def test_a_terminal_shows_the_text_and_not_what_it_could_be_taken_for(capsys, monkeypatch) -> None:
    monkeypatch.setattr(live, "status_line", lambda result: "")
    screen = live.LiveScreen(lambda: None, text_on_terminal=True)
    for piece in ("[bold]:smile:\n", ":heart:[/]"):
        screen.write(piece)
    screen.close()
    assert "[bold]:smile:\n:heart:[/]" in capsys.readouterr().out


@pytest.mark.spec("ENG-060")
@pytest.mark.parametrize("text_on_terminal", [False, True])
def test_a_terminal_has_a_live_line_and_the_whole_text(text_on_terminal) -> None:
    ours, theirs = pty.openpty()
    pipes = {"stderr": theirs} | ({"stdout": theirs} if text_on_terminal else {})
    with start("generate", "--prompt", "Genesis 1\n", "--max-tokens", 40, "--no-adapters", **pipes) as process:
        os.close(theirs)
        stdout = "" if text_on_terminal else process.stdout.read()
        shown = read_all(ours)
    assert process.returncode == 0
    assert all(word in shown for word in ("tokens/s", "read", "hit rate", "waited"))
    text = TOKENIZER.decode(GENESIS[:40])
    if text_on_terminal:
        assert all(line in shown for line in text.splitlines())
    else:
        assert stdout == text + "\n"


@pytest.mark.spec("ENG-065")
def test_ctrl_c_ends_a_text_quietly_with_130() -> None:
    process = start("generate", "--prompt", "Genesis 1\n", "--max-tokens", 4000)
    assert process.stdout.read(1) == "T"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stderr) == (130, "")


@pytest.mark.spec("ENG-065")
def test_a_closed_pipe_ends_a_text_quietly() -> None:
    process = start("generate", "--prompt", "Genesis 1\n", "--max-tokens", 4000)
    assert process.stdout.read(1) == "T"
    process.stdout.close()
    assert process.wait(timeout=TIMEOUT) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.spec("BCK-011")
def test_the_run_that_compiles_says_so_before(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ours, theirs = os.pipe()  # one pipe for both, so that the order shows
    with start("generate", "--prompt", "Genesis 1\n", "--max-tokens", 1, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = read_all(ours)
    assert process.returncode == 0
    notice, text = shown.splitlines()
    assert "compiling" in notice
    assert text == TOKENIZER.decode(GENESIS[:1])
