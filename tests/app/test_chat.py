"""`edge0 chat` and `edge0 sessions`: a conversation in a terminal, and what is kept of it."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from edge0_ref.app import embedded_model, open_model
from edge0_ref.app.chat import prompt_of, without_thought
from edge0_ref.engine.prefixes import PrefixBudget
from tests.app.command import TIMEOUT, edge0_here, refusal, start
from tests.app.terminal import read_until
from tests.app.test_generate import GENESIS, TOKENIZER

ANSWER = TOKENIZER.decode(GENESIS[:8])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edge0"


def talk(capsys, monkeypatch, *lines: str, options=()):
    """The finished command after these lines of input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return edge0_here(capsys, "chat", "--max-tokens", 8, "--no-adapters", *options)


def saved(path: Path) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in json.loads(path.read_text("utf-8"))["messages"]]


@pytest.mark.spec("ENG-083")
def test_a_conversation_is_the_texts_of_its_prompts(capsys, monkeypatch, home, tmp_path) -> None:
    file = tmp_path / "said.json"
    done = talk(capsys, monkeypatch, "Genesis 1\\", "", "And it came to pass", f"/save {file}")
    (_, first), (_, answer), (_, second), (_, last) = saved(file)
    assert (done.returncode, first, answer) == (0, "Genesis 1\n", ANSWER)
    with open_model(use_adapters=False) as model:
        text = model.generate(TOKENIZER.encode(first + answer + second, special=False), 8)
        assert "".join(piece.text for piece in text) == last
    assert done.stdout == f"{answer}\n{last}\n"


@pytest.mark.spec("ENG-083")
def test_commands_begin_anew_and_take_back(capsys, monkeypatch, home, tmp_path) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    lines = ["And", f"/save {files[0]}", "/undo", "/undo", f"/save {files[1]}", "Or", "/reset", "", f"/save {files[2]}"]
    done = talk(capsys, monkeypatch, *lines, "/help", options=("--system", "Genesis"))
    opening = ("system", "Genesis")
    assert [saved(file)[:2] for file in files] == [[opening, ("user", "And")], [opening], [opening]]
    assert "/undo" in done.stdout


@pytest.mark.spec("ENG-083")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/dance", "/dance"),
        ("/save", "/save"),
        ("/save /no/such/folder/x", "/no/such/folder/x"),
        ("/save ~nobody of this name/x", "~nobody of this name/x"),
        ("/save of\0no file", "embedded null"),
        ("And God said " * 40, "room for 64"),
    ],
)
def test_an_error_ends_a_turn_and_not_the_conversation(capsys, monkeypatch, home, tmp_path, line, says) -> None:
    done = talk(capsys, monkeypatch, line, "Genesis 1", f"/save {tmp_path / 'x'}", options=("--context", 64))
    assert done.returncode == 0
    assert done.stderr.startswith("edge0: error: ")
    assert says in done.stderr.splitlines()[0]
    assert [role for role, _ in saved(tmp_path / "x")] == ["user", "assistant"]


@pytest.mark.spec("ENG-065", "ENG-083")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("nowhere",), "nowhere"),
        (("tests/data/qwen_mlx4",), "tokenizer.json"),
        (("--context", "99999"), "4096"),
        (("--keep", "plenty"), "'plenty'"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_line(capsys, monkeypatch, home, options, says) -> None:
    assert says in refusal(talk(capsys, monkeypatch, "Genesis", options=options))


@pytest.mark.spec("ENG-083")
def test_a_model_without_a_template_is_for_plain_text(capsys, monkeypatch, home, tmp_path) -> None:
    for path in embedded_model().iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    assert "--plain" in refusal(talk(capsys, monkeypatch, "Genesis", options=(tmp_path,)))
    done = talk(capsys, monkeypatch, "Genesis 1\\", "", options=(tmp_path, "--plain"))
    assert done.stdout == f"{ANSWER}\n"


@pytest.mark.spec("ENG-083")
@pytest.mark.parametrize("when", ["answer", "prompt"])
def test_ctrl_c_stops_an_answer_and_not_the_program(home, tmp_path, when) -> None:
    ours, theirs = pty.openpty()
    with start("chat", "--no-adapters", "--max-tokens", 4000, stdin=theirs, stdout=theirs) as process:
        os.close(theirs)
        read_until(ours, "> ")
        os.write(ours, b"Genesis 1\\\n\n" if when == "answer" else b"half a line")
        read_until(ours, "The word" if when == "answer" else "half a line")
        interrupt(process, ours)
        os.write(ours, f"/save {tmp_path / 'x'}\n".encode() + b"\x04")
        _, stderr = process.communicate(timeout=TIMEOUT)
    os.close(ours)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    said = saved(tmp_path / "x")
    assert [role for role, _ in said] == (["user", "assistant"] if when == "answer" else [])
    assert when == "prompt" or TOKENIZER.decode(GENESIS).startswith(said[1][1][:20])
    assert (home / "chat-history").stat().st_mode & 0o777 == 0o600


def interrupt(process: subprocess.Popen[str], terminal: int) -> None:
    """Ctrl-C, until the next prompt: readline sees no signal that comes between its last key and its wait for one."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            read_until(terminal, "> ", 2.0)
            return
    raise TimeoutError("no prompt after Ctrl-C")


def test_the_next_prompt_begins_where_the_answer_was_to_begin(tmp_path) -> None:
    """A template that opens the answer with a thought, as published ones do, and shows no thoughts of earlier turns."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    for path in embedded_model().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(template, "utf-8")
    with open_model(tmp_path, context=200, reuse=PrefixBudget(2**24)) as model:
        talked = [{"role": "user", "content": "And God said"}]
        ids, turn = prompt_of(model.tokenizer, talked, plain=False)
        list(model.generate(ids, 2, turn=turn))
        talked += [{"role": "assistant", "content": "Let"}, {"role": "user", "content": "And then"}]
        text = model.generate(prompt_of(model.tokenizer, talked, plain=False)[0], 2)
        list(text)
        assert 0 < text.result.cached_tokens == turn < len(ids)


def test_thoughts_are_no_part_of_later_turns() -> None:
    assert without_thought("because</think>\n\nYes.") == "Yes."


@pytest.mark.spec("ENG-084")
def test_sessions_lists_what_a_conversation_left_and_clears_it(capsys, monkeypatch, home) -> None:
    talk(capsys, monkeypatch, "Genesis 1\\", "")
    listed = json.loads(edge0_here(capsys, "sessions", "--json").stdout)["prefixes"]
    prompt = len(TOKENIZER.encode("Genesis 1\n", special=False))
    assert sorted(kept["tokens"] for kept in listed) == [prompt, prompt + 7]
    assert {(kept["model"], kept["backend"], kept["top_k"]) for kept in listed} == {
        ("kjv-moe", "reference float32", "4")
    }
    lines = edge0_here(capsys, "sessions").stdout.splitlines()
    assert len(lines) == 3
    assert f"{prompt} tokens" in lines[0] + lines[1]
    (home / "prefixes" / "half.prefix.123").write_text("an interrupted write")
    (home / "prefixes" / "bad.prefix.safetensors").write_text("no header")
    assert "damaged" in edge0_here(capsys, "sessions").stdout
    assert "3 kept prefixes removed" in edge0_here(capsys, "sessions", "--clear").stdout
    assert [*(home / "prefixes").iterdir()] == []
    assert json.loads(edge0_here(capsys, "sessions", "--json").stdout)["prefixes"] == []
    (home / "prefixes" / "bad.prefix.safetensors").write_text("no header")
    removed = json.loads(edge0_here(capsys, "sessions", "--clear", "--json").stdout)["removed"]
    assert [kept["file"] for kept in removed] == ["bad.prefix.safetensors"]
    assert [*(home / "prefixes").iterdir()] == []


@pytest.mark.spec("ENG-065", "ENG-084")
def test_clearing_goes_on_past_what_cannot_be_removed(capsys, home) -> None:
    for name in ("a", "b", "c", "d"):
        path = home / "prefixes" / f"{name}.prefix.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name in "bd" else path.write_text("no header")
    done = edge0_here(capsys, "sessions", "--clear")
    assert (done.returncode, "2 kept prefixes removed" in done.stdout) == (2, True)
    (line,) = done.stderr.splitlines()
    assert re.search(r"/[bd]\.prefix\.safetensors: cannot be removed: .*, and 1 more$", line)
    assert sorted(path.name[0] for path in (home / "prefixes").iterdir()) == ["b", "d"]


@pytest.mark.spec("ENG-084")
def test_nothing_is_kept_by_those_who_want_nothing_kept(capsys, monkeypatch, home) -> None:
    talk(capsys, monkeypatch, "Genesis", options=("--keep", "0"))
    talk(capsys, monkeypatch, "Genesis", options=("--keep-disk", "0"))
    assert not (home / "prefixes").exists()
