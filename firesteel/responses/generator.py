"""Generator: the target answers any number of prompts, as many at a time as asked for, each told as soon as it is finished.

Llama-like float32 targets on a CPU run over blocks (`PagedTarget`): a prompt takes the place of whichever ended, its tokens go through the
products together with the next tokens of all others, and nothing is padded. Every other target runs its own forward pass over padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from firesteel.kernels.linear import wants_half
from firesteel.kernels.memory import free_memory
from firesteel.kernels.paged import blocks_for
from firesteel.kernels.spans import Span
from firesteel.responses.generate import Answer, Ask, Row, Sampling, choose, generate_batch
from firesteel.target.batch import TransformersBatch
from firesteel.target.lean import lean_refusal
from firesteel.target.paged import PagedTarget, block_bytes, open_paged

Done = Callable[[int, Answer], None]

_PROMPT_TOKENS = 512  # of new prompts in one step: enough to fill the products, few enough that nobody's next token waits for long
_MEMORY_SHARE = 0.5  # of free memory, at most, for keys and values


class Generator:
    """
    Args:
        model: a Transformers causal model.
        size: prompts at a time.
        precision: of products of a float32 target on a CPU (`auto`, `float32`, `bfloat16`; the head's stay float32). Not of targets that are
            stored in another type.
    """

    def __init__(self, model: Any, size: int, precision: str = "auto") -> None:
        self.model, self.size = model, size
        self._flat = lean_refusal(model, 1) is None
        self._half = self._flat and wants_half(precision, model.device)
        self._paged: PagedTarget | None = None

    @property
    def half(self) -> bool:
        """Whether answers may come from rounded products: true once they have."""
        return self._flat and self._paged is not None and self._paged.half

    def run(self, asks: Sequence[Ask], sampling: Sampling, eos_ids: Sequence[int], done: Done) -> None:
        """Answer every prompt; `done(i, answer)` is called for each as it ends, in any order."""
        if not asks:
            return
        longest = max(len(a.token_ids) for a in asks) + sampling.max_new_tokens
        target = self._over_blocks(longest) if self._flat else None
        if target is not None:
            _Flat(target, self.size, sampling, set(eos_ids), done).run(asks)
            return
        session = TransformersBatch(self.model)
        order = sorted(range(len(asks)), key=lambda i: len(asks[i].token_ids))  # prompts of like length share a batch: little padding
        for at in range(0, len(order), self.size):
            group = order[at : at + self.size]
            for i, answer in zip(group, generate_batch(session, [asks[i] for i in group], sampling, eos_ids), strict=True):
                done(i, answer)

    def answers(self, asks: Sequence[Ask], sampling: Sampling, eos_ids: Sequence[int]) -> list[Answer]:
        """The answers in the order of their prompts."""
        found: dict[int, Answer] = {}
        self.run(asks, sampling, eos_ids, found.__setitem__)
        return [found[i] for i in range(len(asks))]

    def _over_blocks(self, longest: int) -> PagedTarget | None:
        if lean_refusal(self.model, longest) is not None:
            return None
        each = max(2, blocks_for(longest))
        if self._paged is None:
            self._paged = open_paged(self.model, (), max_length=longest, blocks=2 * each, half=self._half)
            self._flat = self._paged is not None
        if self._paged is not None:
            free = free_memory()
            affordable = self.size * each if free is None else self._paged.blocks + int(_MEMORY_SHARE * free / block_bytes(self.model))
            self._paged.make_room(longest, max(2 * each, min(self.size * each, affordable)))
        return self._paged


class _Flat:
    """One run over blocks: every step reads the next token of all that are being answered, and the prompts of those that join."""

    def __init__(self, target: PagedTarget, size: int, sampling: Sampling, ends: set[int], done: Done) -> None:
        self.target, self.size, self.sampling, self.ends, self.done = target, size, sampling, ends, done
        self.free = list(range(target.blocks))
        self.live: list[tuple[Row, list[int], int]] = []  # whose, in which blocks, tokens read

    def run(self, asks: Sequence[Ask]) -> None:
        waiting = list(reversed(list(enumerate(asks))))
        while waiting or self.live:
            spans = [Span(row.index, blocks, read, 1) for row, blocks, read in self.live]
            tokens = [row.tokens[-1] for row, _, _ in self.live]
            going = [(row, blocks, read + 1) for row, blocks, read in self.live]
            room = _PROMPT_TOKENS
            while waiting and len(going) < self.size and room > 0:
                index, ask = waiting[-1]
                needed = blocks_for(len(ask.token_ids) + self.sampling.max_new_tokens)
                if needed > len(self.free):
                    break
                waiting.pop()
                blocks = [self.free.pop() for _ in range(needed)]
                spans.append(Span(index, blocks, 0, len(ask.token_ids)))
                tokens += ask.token_ids
                going.append((Row(index, ask, self.sampling), blocks, len(ask.token_ids)))
                room -= len(ask.token_ids)
            logits, _ = self.target.forward(torch.tensor(tokens), spans, [1] * len(spans))
            chosen = choose(logits, self.sampling, [row.generator for row, _, _ in going])
            self.live = []
            for (row, blocks, read), token in zip(going, chosen.tolist(), strict=True):
                answer = row.add(token, self.ends)
                if answer is None:
                    self.live.append((row, blocks, read))
                else:
                    self.free += blocks
                    self.done(row.index, answer)
