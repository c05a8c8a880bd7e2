"""The mask token: what fills the slots of a block whose tokens are not known yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from firesteel.errors import TargetError

_UNUSED = re.compile(r"mask|unused|reserved|place.?holder|extra_id|file_sep|dummy", re.IGNORECASE)


def pick_mask_token(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> int:
    """A token that no text holds: the mask token, else a row of the embedding that the tokenizer never gives, else a special token.

    Of special tokens that end no text the first choice is one named as unused, then padding, the unknown token, and the last one. Only its
    embedding matters, and that the prompt does not mean something by it; the id travels in the checkpoint.

    Raises:
        TargetError: every token is an ordinary one.
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
    for spare in (tokenizer.pad_token_id, tokenizer.unk_token_id):
        if spare is not None and spare not in eos_ids:
            return int(spare)
    if not special:
        raise TargetError(
            "no token of the target's vocabulary is free to mask the slots of a block", mend="set drafter.mask_token_id to a token that texts rarely hold"
        )
    return max(special)
