"""A tokenizer for a model without words: a token for each byte, and a name for every other id."""

import json
from collections.abc import Collection
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def write_tokenizer(folder: Path, vocab_size: int, end_ids: Collection[int]) -> None:
    """tokenizer.json and tokenizer_config.json: any text has ids, and any id has a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = [token for token in range(vocab_size) if token not in end_ids]
    vocab = {letters[n] if n < len(letters) else f"<{token}>": token for n, token in enumerate(ids)}
    ends = {token: f"<end {token}>" for token in sorted(end_ids) if token < vocab_size}
    tokenizer = Tokenizer(models.BPE({**vocab, **{name: token for token, name in ends.items()}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ends.values()])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"chat_template": TEMPLATE, "eos_token": next(iter(ends.values()), None)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
