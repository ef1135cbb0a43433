"""Text, ids and pieces of text; chat templates in their sandbox."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from edge0_ref.app import embedded_model
from edge0_ref.errors import CheckpointError, UsageError
from edge0_ref.tokens import Tokenizer, compile_template, open_tokenizer

EMBEDDED = open_tokenizer(embedded_model())


def byte_fallback() -> Tokenizer:
    """Words with a space mark, single bytes for all else, one leading space stripped: the other common kind."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁in",
        "▁the",
        "a",
        "b",
        "é",
        "\N{REPLACEMENT CHARACTER}",
    ]
    inner = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner, None, {})


KINDS = {"byte-level": EMBEDDED, "byte-fallback": byte_fallback()}


@pytest.mark.spec("ENG-001")
@given(st.text())
def test_decoding_undoes_encoding(text) -> None:
    assert EMBEDDED.decode(EMBEDDED.encode(text)) == text


@pytest.mark.spec("ENG-001")
def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(UsageError):
        EMBEDDED.encode("half a pair: \ud83d")


def rewritten(folder: Path, **fields: object) -> Tokenizer:
    """The embedded model's tokenizer with fields of its file changed."""
    held = json.loads((embedded_model() / "tokenizer.json").read_text("utf-8"))
    return open_tokenizer(write(folder, tokenizer__json=held | fields))


CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDED = {"direction": "Left", "pad_id": 0, "pad_token": "<|end|>", "pad_type_id": 0, "strategy": {"Fixed": 32}}


@pytest.mark.spec("ENG-001")
@pytest.mark.parametrize("left_from_training", [{"truncation": CUT}, {"padding": PADDED}])
def test_a_length_that_texts_were_trained_at_neither_cuts_nor_pads_a_prompt(tmp_path, left_from_training) -> None:
    text = "In the beginning God created the heaven"
    assert rewritten(tmp_path, **left_from_training).encode(text) == EMBEDDED.encode(text)


@pytest.mark.spec("ENG-001")
@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"type": "WordLevel", "vocab": {"In": 0}, "unk_token": "?"}},
        {"model": {"type": "Unigram", "vocab": [["In", 0.0]], "unk_id": None}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
         "pair": [], "special_tokens": {}}},  # the library panics
    ],
)  # fmt: skip
def test_text_that_the_tokenizer_has_no_ids_for_is_refused(tmp_path, fields) -> None:
    tokenizer = rewritten(tmp_path, added_tokens=[], **fields)
    with pytest.raises(UsageError, match="the model's tokenizer cannot encode this text"):
        tokenizer.encode("In the beginning")


@pytest.mark.spec("ENG-002")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_of_any_ids_are_the_whole_text(kind, data) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = tokenizer.stream()
    given_out = ""
    for token_id in ids:
        given_out += stream.push(token_id)
        assert tokenizer.decode(ids).startswith(given_out)
    assert given_out + stream.finish() == tokenizer.decode(ids)


@pytest.mark.spec("ENG-002")
@given(st.text("añ€😀\n ", min_size=1))
def test_no_piece_ends_inside_a_character(text) -> None:
    stream = EMBEDDED.stream()
    given_out = ""
    for token_id in EMBEDDED.encode(text):
        given_out += stream.push(token_id)
        assert text.startswith(given_out)
    assert given_out == text  # nothing is held back once the last character is whole


@pytest.mark.spec("ENG-002")
def test_every_byte_of_a_character_but_the_last_gives_nothing() -> None:
    stream = EMBEDDED.stream()
    *begin, end = EMBEDDED.encode("😀")
    assert [stream.push(token_id) for token_id in begin] == [""] * len(begin)
    assert len(begin) >= 1
    assert stream.push(end) == "😀"


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return folder


PANICS = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "##"}
}


@pytest.mark.parametrize("content", [None, "", "{}", "not JSON", PANICS])
def test_a_missing_or_damaged_tokenizer_is_an_error_that_names_the_file(tmp_path, content) -> None:
    if content is not None:
        write(tmp_path, tokenizer__json=content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_tokenizer(tmp_path)


@pytest.mark.spec("ENG-003")
def test_a_template_file_goes_before_the_one_in_the_settings(tmp_path) -> None:
    write(tmp_path, tokenizer__json=(embedded_model() / "tokenizer.json").read_text("utf-8"))
    messages = [{"role": "user", "content": "<b>&"}]
    settings = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}"}]}
    write(tmp_path, tokenizer_config__json=settings)
    assert open_tokenizer(tmp_path).chat(messages) == "<s>"
    settings["chat_template"].insert(0, {"name": ["default"], "template": "no name of a template"})
    write(tmp_path, tokenizer_config__json=settings)
    assert open_tokenizer(tmp_path).chat(messages) == "<s>"
    write(tmp_path, chat_template__jinja="{{ messages[0] | tojson }}{% if add_generation_prompt %}>{% endif %}")
    assert open_tokenizer(tmp_path).chat(messages) == json.dumps(messages[0]) + ">"


@pytest.mark.spec("ENG-003")
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{% for %}",
    ],
)
def test_a_template_that_reaches_out_or_fails_is_a_usage_error(template) -> None:
    with pytest.raises(UsageError, match="template"):
        compile_template(template)({"messages": [{"role": "user", "content": "hi"}]})


@pytest.mark.spec("ENG-003")
def test_templates_have_what_published_ones_use() -> None:
    template = "{% for m in messages %}\n  {% if m == 2 %}\n    {% break %}\n  {% endif %}\n{{ m }},{% endfor %}"
    assert compile_template(template)({"messages": [0, 1, 2, 3]}) == "0,1,"
    assert len(compile_template("{{ strftime_now('%Y-%m-%d') }}")({})) == len("2000-01-01")


@pytest.mark.spec("ENG-003")
def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        KINDS["byte-fallback"].chat([{"role": "user", "content": "hi"}])
