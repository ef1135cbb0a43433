"""Programs that people use: OpenAI's Python client, curl, lm-evaluation-harness."""

import json
import shutil
import subprocess
from importlib.util import find_spec

import openai
import pytest

from tests.app.serve.parrot import BROKEN, told
from tests.app.serve.servers import Server, chunks_of
from tests.app.serve.test_chat import ARGUMENTS, IN_JSON, IN_TAGS, WEATHER


@pytest.fixture(scope="module")
def client(parrot: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{parrot.url}/v1", api_key="none", max_retries=0)


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": told(text)}]


def test_openai_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=asked("Peace, é and 😀."), temperature=0.7)
    assert answer.choices[0].message.content == "Peace, é and 😀."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_streams(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="parrot", messages=asked("Peace, é and 😀."), stream=True, stream_options=options
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Peace, é and 😀."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


@pytest.mark.parametrize("call", [IN_TAGS, IN_JSON], ids=["tags", "json"])
def test_openai_calls_tools(client: openai.OpenAI, call) -> None:
    text = f"I will ask.\n<tool_call>{call}</tool_call>"
    answer = client.chat.completions.create(model="parrot", messages=asked(text), tools=[WEATHER])
    (whole,) = answer.choices[0].message.tool_calls
    assert (whole.function.name, json.loads(whole.function.arguments)) == ("weather", ARGUMENTS)
    with client.chat.completions.stream(model="parrot", messages=asked(text), tools=[WEATHER]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "I will ask."
    assert final.message.tool_calls[0].function.arguments == whole.function.arguments
    # and the answer goes back into the conversation as it came
    result = {"role": "tool", "tool_call_id": whole.id, "content": "dry"}
    history = [*asked(text), answer.choices[0].message, result, *asked("It is dry.")]
    assert client.chat.completions.create(model="parrot", messages=history).choices[0].message.content == "It is dry."


def test_openai_reads_chances(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=asked("Ur"), logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"Ur"
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_openai_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="parrot", prompt=[told("one"), told("two")], max_tokens=9)
    assert [choice.text for choice in answer.choices] == ["one", "two"]


def test_openai_understands_refusals(client: openai.OpenAI, strict: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="parrot", messages=asked("x"), temperature="hot")
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=asked("x"))
    with pytest.raises(openai.InternalServerError, match="the disk failed"):
        client.chat.completions.create(model="parrot", messages=asked(BROKEN))
    with pytest.raises(openai.APIError, match="the disk failed"):
        list(client.chat.completions.create(model="parrot", messages=asked(f"so far {BROKEN}"), stream=True))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["parrot"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_needs_no_headers(parrot: Server) -> None:
    body = json.dumps({"messages": asked("Peace."), "stream": True})
    command = ["curl", "--silent", "--no-buffer", f"{parrot.url}/v1/chat/completions", "--data", body]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    *chunks, done = chunks_of(iter(said.splitlines()))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Peace."
    assert done == "[DONE]"


@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed: pip install 'lm-eval[api]'"
)
def test_lm_evaluation_harness_scores(real: Server, tmp_path) -> None:
    """A task of two questions, whose right answers are how the book goes on."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    questions = [
        {
            "question": "In the beginning God created the heaven and the",
            "choices": [" earth", " telephone"],
            "answer": 0,
        },
        {"question": "And God said, Let there be", "choices": [" electricity", " light"], "answer": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)), "utf-8")
    task = {
        "task": "genesis",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    from edge0_ref.app import embedded_model

    arguments = {
        "model": "edge0",
        "base_url": f"{real.url}/v1/completions",
        "tokenizer": str(embedded_model()),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 1,
        "max_length": 500,
    }
    results = lm_eval.simple_evaluate(
        "local-completions", model_args=arguments, tasks=[task], task_manager=TaskManager(), bootstrap_iters=0
    )
    assert results["results"]["genesis"]["acc,none"] == 1.0
