"""The bytes that a token stands for: a character may be spread over several tokens, none of which has a text of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from firesteel.prompts.template import decode_ids

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # what SentencePiece calls a byte that no piece has


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Token id -> its bytes: of byte-level BPE and of SentencePiece's bytes exactly, else those of its text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
    kinds = set(_kinds(decoder))
    table = _byte_of_character() if "ByteLevel" in kinds or hasattr(tokenizer, "byte_decoder") else None
    added = set(tokenizer.get_added_vocab().values())

    def found(token: int) -> bytes:
        piece = tokenizer.convert_ids_to_tokens(token)
        if token in added:
            return str(piece).encode()
        if piece is not None and table is not None and all(c in table for c in piece):
            return bytes(table[c] for c in piece)
        if piece is not None and table is None and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return decode_ids(tokenizer, [token]).encode()

    return found


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes every byte as a character that can be seen: itself where it can, else the next one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + i): b for i, b in enumerate(hidden)}
