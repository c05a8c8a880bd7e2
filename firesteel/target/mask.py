"""The mask token: what fills the slots of a block whose tokens are not known yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_UNUSED = re.compile(r"mask|unused|reserved|placeholder|extra_id|file_sep|dummy", re.IGNORECASE)


def pick_mask_token(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> int:
    """A token that no text holds: the mask token, else a row of the embedding that the tokenizer never gives, else a special token that ends no text.

    Only its embedding matters, and that the prompt does not mean something by it; the id travels in the checkpoint.
    """
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask is not None:
        return int(mask)
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special and i not in eos_ids and i != tokenizer.bos_token_id}
    named = [i for i, content in special.items() if _UNUSED.search(content)]
    if named:
        return named[-1]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in eos_ids:
        return int(tokenizer.unk_token_id)
    return max(special) if special else 0
