"""Garbage of every kind: whatever the bytes are, a folder opens or an Edge0Error says why not."""

import copy
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge0_ref.adapters import open_adapters
from edge0_ref.errors import Edge0Error
from edge0_ref.inventory import open_checkpoint
from edge0_ref.tokens import open_tokenizer
from tests.ref.builders import adapter_metadata, adapter_tensors, make_header, write_model, write_raw, write_safetensors
from tests.ref.sound import CONFIG, RECIPE, TENSORS

MANY = settings(max_examples=3 * settings.default.max_examples)
MOST_BYTES = 16 * 2**20  # opening reads headers only; Python objects for them are far below this

NUMBERS = st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 10**400, -(10**400), -0.5, 1e308, float("nan"), float("inf")])
OTHERS = st.sampled_from([None, True, False, "", "4", "\ud800", "a\nb", [], [[]], [None], {}, {"bits": -4}, [4] * 3])
ABSURD = NUMBERS | OTHERS
VALUES = ABSURD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return changed


def said_by(call: Callable[[], object]) -> str | None:
    """The message of the Edge0Error that a call raises, None if it raises none; anything else is a bug."""
    try:
        call()
    except Edge0Error as error:
        return str(error)
    return None


def opens_or_says_why(folder: Path, open_folder: Callable[[Path], object] = open_checkpoint) -> None:
    """A message is one line of a length that a person reads."""
    said = said_by(lambda: open_folder(folder))
    assert said is None or (0 < len(said) < 2000 and "\n" not in said)


CONFIG_PLACES = sorted(places(CONFIG), key=str)


@pytest.mark.spec("STO-003")
@MANY
@given(path=st.sampled_from(CONFIG_PLACES), value=VALUES)
@example(path=("text_config", "rope_parameters", "partial_rotary_factor"), value=1e308)
@example(path=("text_config", "layer_types"), value=[{}, []])
@example(path=("quantization", "group_size"), value=10**400)
def test_any_value_in_any_field_of_a_config(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    opens_or_says_why(write_model(tmp_path, replaced(CONFIG, path, value), TENSORS))


@pytest.mark.spec("STO-003")
@given(path=st.sampled_from(CONFIG_PLACES), absurd=ABSURD)
@example(path=("text_config", "num_hidden_layers"), absurd=2**31 - 1)
@example(path=("text_config", "num_experts"), absurd=2**31 - 1)
@example(path=("text_config", "vocab_size"), absurd=2**31 - 1)
def test_an_absurd_size_allocates_nothing(tmp_path: Path, path: tuple[Any, ...], absurd: Any) -> None:
    folder = write_model(tmp_path, replaced(CONFIG, path, absurd), TENSORS)
    tracemalloc.start()
    try:
        opens_or_says_why(folder)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.spec("STO-003")
@given(text=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="replace")))
@example(text=b"[" * 100_000)
@example(text=b'{"model_type": ' + b"9" * 10_000 + b"}")
@example(text=b"\xff\xfe")
@example(text=b"[]")
@example(text=b"")
def test_any_bytes_for_a_config(tmp_path: Path, text: bytes) -> None:
    (write_model(tmp_path, CONFIG, TENSORS) / "config.json").write_bytes(text)
    opens_or_says_why(tmp_path)


@given(text=VALUES)
def test_any_generation_config(tmp_path: Path, text: Any) -> None:
    folder = write_model(tmp_path, CONFIG, TENSORS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": text}))
    opens_or_says_why(folder)


HEADER = make_header(TENSORS, list(TENSORS), {"format": "mlx"})
DATA = b"".join(held.data for held in TENSORS.values())


@pytest.mark.spec("STO-001", "STO-002")
@MANY
@given(path=st.sampled_from(sorted(places(HEADER), key=str)), value=VALUES)
def test_any_value_anywhere_in_a_header(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    folder = write_model(tmp_path, CONFIG, {})
    write_raw(folder / "model.safetensors", replaced(HEADER, path, value), DATA)
    opens_or_says_why(folder)


@pytest.mark.spec("STO-001")
@given(header=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()), data=st.binary(max_size=8))
@example(header=b"[" * 100_000, data=b"")
@example(header=b'{"a\\nb": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', data=b"x")
def test_any_header(tmp_path: Path, header: bytes, data: bytes) -> None:
    folder = write_model(tmp_path, CONFIG, {})
    write_raw(folder / "model.safetensors", header, data)
    opens_or_says_why(folder)


@pytest.mark.spec("STO-001")
@given(name=st.text(max_size=8))
@example(name="a\nb")
@example(name="\ud800")
def test_any_name_of_a_tensor(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, CONFIG, {})
    renamed = {f"{name}{old}": place for old, place in HEADER.items() if old != "__metadata__"}
    write_raw(folder / "model.safetensors", renamed, DATA)
    opens_or_says_why(folder)
    extra = {"dtype": "U8", "shape": [1], "data_offsets": [len(DATA), len(DATA) + 1]}
    write_raw(folder / "model.safetensors", {**HEADER, name: extra}, DATA + b"x")
    opens_or_says_why(folder)


@pytest.mark.spec("STO-001")
@given(length=st.integers(0, 2**64 - 1))
def test_any_header_length(tmp_path: Path, length: int) -> None:
    folder = write_model(tmp_path, CONFIG, {})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + json.dumps(HEADER).encode())
    opens_or_says_why(folder)


@pytest.mark.spec("STO-006")
@given(index=VALUES | st.fixed_dictionaries({"weight_map": st.dictionaries(st.sampled_from(list(TENSORS)), VALUES)}))
def test_any_index(tmp_path: Path, index: Any) -> None:
    folder = write_model(tmp_path, CONFIG, TENSORS)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opens_or_says_why(folder)


ADAPTERS = adapter_tensors(RECIPE, [0], {"language_model.lm_head": (RECIPE.vocab, RECIPE.hidden)})
METADATA = json.loads(adapter_metadata(RECIPE, [0])["__metadata__"])


@pytest.mark.spec("PRE-010", "PRE-011")
@MANY
@given(key=st.sampled_from(["K", "r", "alpha", "owners", "other"]), value=VALUES, nested=st.booleans())
@example(key="K", value=float("nan"), nested=True)
@example(key="alpha", value=10**400, nested=True)
@example(key="owners", value=[0, -3, 0.5, float("inf")], nested=True)
def test_any_metadata_of_an_adapter(tmp_path: Path, key: str, value: Any, nested: bool) -> None:
    config = open_checkpoint(write_model(tmp_path / "model", CONFIG, TENSORS)).config
    text = json.dumps({**METADATA, key: value} if nested else METADATA)
    metadata = {"__metadata__": text} if nested else {"__metadata__": text, key: json.dumps(value)}
    (tmp_path / "adapters").mkdir(exist_ok=True)
    write_safetensors(tmp_path / "adapters" / "a.safetensors", ADAPTERS, metadata=metadata)
    opens_or_says_why(tmp_path / "adapters", lambda folder: open_adapters(folder, config))


@pytest.mark.spec("PRE-010")
@given(path=st.sampled_from(sorted(places(make_header(ADAPTERS, list(ADAPTERS), {})), key=str)), value=VALUES)
def test_any_value_anywhere_in_the_header_of_an_adapter(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    config = open_checkpoint(write_model(tmp_path / "model", CONFIG, TENSORS)).config
    header = make_header(ADAPTERS, list(ADAPTERS), adapter_metadata(RECIPE, [0]))
    (tmp_path / "adapters").mkdir(exist_ok=True)
    data = b"".join(held.data for held in ADAPTERS.values())
    write_raw(tmp_path / "adapters" / "a.safetensors", replaced(header, path, value), data)
    opens_or_says_why(tmp_path / "adapters", lambda folder: open_adapters(folder, config))


TOKENIZER = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": {"direction": "Left", "pad_id": 0, "pad_token": "<s>", "pad_type_id": 0, "strategy": {"Fixed": 8}},
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "a"}]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "b+"}, "behavior": "Isolated", "invert": False},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteFallback"},
    "model": {"type": "BPE", "unk_token": "<s>", "continuing_subword_prefix": "", "byte_fallback": True,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": ["a b"]},
}  # fmt: skip


@pytest.mark.spec("ENG-001")
@MANY
@given(path=st.sampled_from(sorted(places(TOKENIZER), key=str)), value=VALUES)
@example(path=("post_processor", "special_tokens"), value={})
@example(path=("model", "continuing_subword_prefix"), value="long")
@example(path=("model", "unk_token"), value="?")
@example(path=("padding", "direction"), value="a\nb")
def test_any_value_anywhere_in_a_tokenizer(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    """What opens encodes, and decodes what it gave, or says why not."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(replaced(TOKENIZER, path, value)))

    def use(folder: Path) -> None:
        tokenizer = open_tokenizer(folder)
        tokenizer.decode(tokenizer.encode("ab <s> cab"))

    opens_or_says_why(tmp_path, use)
