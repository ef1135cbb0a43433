"""What a text starts from and how far it may go, checked before any work."""

from collections.abc import Sequence

from edge0_ref.config import ModelConfig
from edge0_ref.errors import UsageError
from edge0_ref.tokens import Tokenizer

Prompt = str | Sequence[int]  # text, or ids


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig) -> list[int]:
    """[ENG-043] The prompt as ids. Raises UsageError when it is empty, or is text and there is no tokenizer."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("this model has no tokenizer.json, so a prompt is given as ids (--prompt-ids 5,6,7)")
        ids = tokenizer.encode(prompt)
    else:
        ids = list(prompt)
    check_ids(ids, config.vocab_size)
    return ids


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """[ENG-043] Raises UsageError when there are none, and for one that the vocabulary does not have."""
    if not ids:
        raise UsageError("empty prompt: a text needs at least one token to start from")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise UsageError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")


def check_limits(max_tokens: int, stop: Sequence[str]) -> None:
    """[ENG-045] Raises UsageError for less than one token, and for a stop string that would stop every text."""
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, wanted at least 1")
    if not all(stop):
        raise UsageError("an empty stop string would stop every text at once")
