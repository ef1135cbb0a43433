"""Texts through a session: over a scripted decoder where every failure can be had, and over the embedded model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge0_ref.app import embedded_model, open_model
from edge0_ref.config import ModelConfig, read_config
from edge0_ref.contract import Array, Counters
from edge0_ref.engine.sampling import SamplingSettings
from edge0_ref.engine.session import Session
from edge0_ref.errors import ReadError, UsageError
from edge0_ref.tokens import open_tokenizer

CONFIG: ModelConfig = read_config(embedded_model())
TOKENIZER = open_tokenizer(embedded_model())
IDS = st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=12)
END = CONFIG.eos_token_ids[0]


@dataclass
class ScriptedDecoder:
    """Greedy choices follow a script; `fail_at` lets one step fail as a disk would, half-way."""

    script: Sequence[int]
    fail_at: int = -1
    position: int = 0
    counters: Counters = field(default_factory=Counters)
    broken: bool = False
    seen: list[int] = field(default_factory=list)

    def _advance(self, tokens: Sequence[int], steps: int) -> Array:
        assert not self.broken, "not reset after an error"
        self.counters.reads += 3
        self.counters.hits += 1
        self.counters.on_demand += 3
        self.counters.wait_seconds += 0.5
        if steps == self.fail_at:
            self.broken, self.fail_at = True, -1
            raise ReadError("layer 2 expert 3: the disk failed")
        self.seen += tokens
        self.position += len(tokens)
        logits = np.zeros(CONFIG.vocab_size, np.float32)
        logits[self.script[steps]] = 9
        return logits

    def prefill(self, tokens: Sequence[int]) -> Array:
        self.prompt = len(tokens)
        return self._advance(tokens, 0)

    def step(self, token: int) -> Array:
        return self._advance([token], self.position - self.prompt + 1)

    def reset(self) -> None:
        self.position, self.broken, self.seen = 0, False, []

    def all_logits(self, tokens: Sequence[int]) -> Array:
        raise NotImplementedError

    snapshot = restore = close = all_logits


def session_of(script: Sequence[int], context: int = 4096, **options: int) -> Session:
    return Session(ScriptedDecoder(script, **options), CONFIG, context, TOKENIZER)


@pytest.mark.spec("ENG-044")
@given(script=IDS, end=st.booleans(), max_tokens=st.integers(1, 14), room=st.integers(0, 14))
def test_a_text_ends_at_an_end_id_at_max_tokens_or_with_the_context(script, end, max_tokens, room) -> None:
    script = [token or 1 for token in script] + [END if end else 1, *[1] * 20]
    text = session_of(script, context=3 + room).generate([5, 6, 7], max_tokens)
    pieces = list(text)
    limit = min(max_tokens, room + 1)  # the last token is chosen by a full context, and stays outside
    until_end = script.index(END) if end else len(script)
    assert text.result.token_ids == tuple(script[: min(limit, until_end)])
    assert text.result.finish_reason == ("stop" if until_end < limit else "length")
    assert "".join(piece.text for piece in pieces) == text.result.text == TOKENIZER.decode(text.result.token_ids)


@pytest.mark.spec("ENG-020", "ENG-044")
@given(script=IDS, data=st.data())
def test_a_stop_string_ends_a_text_before_itself(script, data) -> None:
    script = [token or 1 for token in script]
    whole = TOKENIZER.decode(script)
    first = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[first : first + data.draw(st.integers(1, 5))] or "x"
    text = session_of([*script, END]).generate([5], len(script) + 1, stop=[stop])
    passed = "".join(piece.text for piece in text)
    assert passed == text.result.text == whole.split(stop)[0]
    assert text.result.finish_reason == "stop"


@pytest.mark.spec("ENG-040")
@given(script=IDS)
def test_every_token_has_its_piece_and_only_a_last_piece_has_none(script) -> None:
    script = [token or 1 for token in script]
    ids = [piece.token_id for piece in session_of([*script, END]).generate([5], 99)]
    assert ids in (script, [*script, None])


@pytest.mark.spec("ENG-041")
@given(script=IDS, before=IDS)
def test_a_result_counts_its_own_text(script, before) -> None:
    session = session_of([token or 1 for token in script] + [END])
    list(session.generate(before, 99))
    text = session.generate([5], 99)
    list(text)
    calls = len(script) + 1
    assert (text.result.reads, text.result.hits, text.result.on_demand) == (3 * calls, calls, 3 * calls)
    assert text.result.wait_seconds == 0.5 * calls
    assert text.result.hit_rate == 0.25
    assert text.result.prompt_tokens == 1


@pytest.mark.spec("ENG-042")
@given(script=IDS, fail_at=st.integers(0, 12))
def test_after_an_error_the_next_text_is_as_if_nothing_had_been(script, fail_at) -> None:
    script = [*(token or 1 for token in script), END]
    session = session_of(script, fail_at=fail_at)
    text = session.generate([5, 6], 99)
    if fail_at < len(script):
        with pytest.raises(ReadError):
            list(text)
        assert list(text) == []  # an error ends a text
    again = session.generate([7], 99)
    assert list(again) == list(session_of(script).generate([7], 99))
    assert session.decoder.seen == [7, *script[:-1]]


@pytest.mark.spec("ENG-042")
def test_a_text_that_another_one_replaced_cannot_go_on() -> None:
    session = session_of([1] * 9)
    first, second = session.generate([5], 9), session.generate([6], 9)
    next(first)
    next(second)
    with pytest.raises(UsageError, match="another text"):
        next(first)
    assert next(second).token_id == 1


@pytest.mark.spec("ENG-043", "ENG-045")
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("", {}),
        ([], {}),
        ([CONFIG.vocab_size], {}),
        ([-1], {}),
        ([5] * 20, {}),
        ([5], {"max_tokens": 0}),
        ([5], {"max_tokens": -3}),
        ([5], {"stop": ["a", ""]}),
    ],
)
def test_an_impossible_request_is_refused_before_any_work(prompt, options) -> None:
    session = session_of([1], context=19)
    with pytest.raises(UsageError):
        session.generate(prompt, **options)
    assert session.decoder.counters == Counters()


def test_a_seed_is_made_up_only_for_sampled_texts_and_reported() -> None:
    session = session_of([1] * 9)
    assert session.generate([5], 1).result.seed is None
    seeds = {session.generate([5], 1, SamplingSettings(temperature=1.0)).result.seed for _ in range(8)}
    assert len(seeds) > 1
    assert session.generate([5], 1, SamplingSettings(temperature=1.0, seed=3)).result.seed == 3


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with open_model(context=200) as model:
        next(model.generate([5], 1))
        yield model._session


@pytest.mark.spec("ENG-011", "ENG-042")
def test_a_seed_gives_the_same_text_again_and_another_seed_another(session) -> None:
    def ids(seed: int) -> tuple[int, ...]:
        text = session.generate("In the beginning", 6, SamplingSettings(temperature=3.0, seed=seed))
        list(text)
        return text.result.token_ids

    assert ids(1) == ids(1)
    assert len({ids(seed) for seed in range(3)}) == 3


@pytest.mark.spec("ENG-041")
def test_the_counters_of_a_text_add_up(session) -> None:
    before = asdict(session.decoder.counters)
    text = session.generate("In the beginning", 4)
    list(text)
    result, after = text.result, asdict(session.decoder.counters)
    assert {name: getattr(result, name) for name in after if name != "wait_seconds"} == {
        name: after[name] - before[name] for name in after if name != "wait_seconds"
    }
    expert = 20_736  # bytes: 3 matrices of 64 x 192, 4 bits, and two bfloat16 for every 64
    assert result.bytes_read == result.reads * expert
    assert result.drops == 0


@pytest.mark.spec("ENG-041")
@pytest.mark.parametrize("read_to_the_end", [True, False])
def test_what_a_text_cost_is_not_changed_by_the_texts_after_it(read_to_the_end: bool) -> None:
    session = session_of([5] * 40)
    never_begun, text = session.generate([1], 4), session.generate([1, 2], 4)
    for _ in text if read_to_the_end else [next(text)]:
        pass
    cost = {name: value for name, value in asdict(text.result).items() if name != "peak_bytes"}
    list(session.generate([3], 9))
    session.begin(None)
    session.decoder.prefill([1, 2, 3])
    assert {name: value for name, value in asdict(text.result).items() if name != "peak_bytes"} == cost
    assert never_begun.result.reads == 0


@pytest.mark.spec("ENG-041")
@given(before=st.integers(0, 6))
def test_tokens_a_second_are_steps_a_second_however_a_text_ends(before: int) -> None:
    """The step that gives an end id is one."""
    ended = session_of([5] * before + [END]).generate([1], 40)
    list(ended)
    assert ended.result.tokens_per_second == pytest.approx(before / ended._decode_seconds if before else 0.0)
