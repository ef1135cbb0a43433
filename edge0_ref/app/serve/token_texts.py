"""The text of single tokens, for log probabilities. A token may be part of a character: its bytes are exact."""

import re

from edge0_ref.tokens import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """Texts and bytes of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._alphabet = tokenizer, byte_alphabet()

    def bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; of a special token, its name."""
        name = self._tokenizer.token(token_id)
        if single := BYTE.fullmatch(name):
            return bytes([int(single[1], 16)])
        if all(character in self._alphabet for character in name):
            return bytes(self._alphabet[character] for character in name)
        return self._tokenizer.decode([token_id]).encode() or name.encode()

    def text(self, token_id: int) -> str:
        """The token's text; if that is no text, its bytes by number, so that no two tokens look alike."""
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
