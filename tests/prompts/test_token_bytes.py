"""Bytes of tokens, for the tokenizers that there are: byte-level BPE, SentencePiece with bytes, and words."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from firesteel.prompts.template import decode_ids
from firesteel.prompts.token_bytes import token_bytes

TEXT = "né 日本 ø\n\t~¡­ÿ"


def wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<é>")


def byte_level(inside: Any) -> Any:
    vocabulary = {c: i for i, c in enumerate(["<unk>", "<é>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE({**vocabulary, "Ġn": len(vocabulary)}, [("Ġ", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = inside
    return wrapped(tokenizer)


@pytest.mark.parametrize("inside", [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])], ids=["alone", "within a sequence"])
def test_byte_level_tokens_are_their_bytes(inside: Any) -> None:
    tokenizer = byte_level(inside)
    found = token_bytes(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert b"".join(map(found, ids)) == TEXT.encode()
    assert any("\ufffd" in decode_ids(tokenizer, [i]) for i in ids), "some are parts of characters"
    assert {found(i) for i in range(2, 258)} == {bytes([b]) for b in range(256)}
    assert found(258) == b" n"
    assert found(1) == "<é>".encode(), "an added token is its text, though its letters stand for bytes, too"


def test_sentencepiece_bytes() -> None:
    pieces = ["<unk>", "<é>", "▁a", "b", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = token_bytes(wrapped(tokenizer))
    assert [found(4 + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert (found(2), found(3), found(1)) == (b" a", b"b", "<é>".encode())


def test_words_are_their_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<é>": 1, "été": 2, "Ġa": 3}, unk_token="<unk>"))
    found = token_bytes(wrapped(tokenizer))
    assert [found(i) for i in (1, 2, 3)] == ["<é>".encode(), "été".encode(), "Ġa".encode()]
