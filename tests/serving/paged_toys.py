"""A tiny Llama and a DSpark behind the compiled engine, over the toy server's forty words: blocks are shared, drafting comes and goes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from server_toys import LONGEST, WORDS
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.decode import decode_plain
from firesteel.decoding.policies import Drafted, Hearing, Request
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.paged import PagedBlockDrafter
from firesteel.kernels.paged import BLOCK
from firesteel.target.paged import PagedTarget
from firesteel.target.session import TargetSession

WIDTH, LAYERS, DRAFTS = 32, (1, 3), 4
CONFIG = DraftConfig(
    algorithm="dspark",
    hidden_size=WIDTH,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=len(WORDS),
    draft_vocab_size=len(WORDS),
    target_hidden_size=WIDTH,
    layer_ids=LAYERS,
    block_size=DRAFTS,
    mask_token_id=1,
    sample_from_anchor=True,
    layer_types=(FULL,),
    markov_rank=len(WORDS),
    confidence_head=True,
)


@functools.cache
def model() -> Any:
    torch.manual_seed(0)
    shapes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    made = LlamaForCausalLM(LlamaConfig(**shapes, vocab_size=len(WORDS), max_position_embeddings=LONGEST)).eval()
    with torch.no_grad():
        for parameter in made.model.layers.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return made


class Moody:
    """Drafts in some steps and rests in others, and wants prompts observed at once, later, or not at all, in turn."""

    step = 0

    @property
    def hearing(self) -> Hearing:
        moods: tuple[Hearing, ...] = ("at once", "when drafted for", "at once", "not")
        return moods[self.step // 50 % 4]

    def charge(self, seconds: float, reading: float) -> None:
        pass

    def plan(self, requests: Sequence[Request]) -> list[int]:
        self.step += 1
        return [r.room if (self.step // 10 + i) % 4 else 0 for i, r in enumerate(requests)]

    def admit(self, requests: Sequence[Request], drafts: Sequence[Drafted]) -> list[int]:
        return [max(0, d.count - i % 2) for i, d in enumerate(drafts)]

    def learn(self, requests: Sequence[Request], drafts: Sequence[Drafted], submitted: Sequence[int], accepted: Sequence[int], seconds: float | None) -> None:
        for r, d in zip(requests, drafts, strict=True):
            r.silent = 0 if d.count else r.silent + 1


def paged_engine(*, requests: int, blocks: int) -> Engine:
    """Its drafter knows what the target writes after single words, which is right now and then."""
    torch.manual_seed(1)
    target = PagedTarget(model(), LAYERS, max_length=LONGEST, blocks=blocks)
    embed, head = model().get_input_embeddings().weight.detach(), model().get_output_embeddings().weight.detach()
    module = BlockDrafter(CONFIG).eval()
    assert module.markov_head is not None
    with torch.no_grad():
        module.markov_head.markov_w1.weight.copy_(torch.eye(len(WORDS)))
        module.markov_head.markov_w2.weight.copy_(20 * model()(torch.arange(len(WORDS))[:, None]).logits[:, 0].T)
    drafter = PagedBlockDrafter(module, embed, head, draft_to_target=None, max_length=LONGEST, blocks=blocks)
    return Engine(target, drafter, BlockPool(blocks, BLOCK), draft_tokens=DRAFTS, policy=Moody(), max_requests=requests, max_tokens=64)


@functools.cache
def _written(prompt: tuple[int, ...]) -> list[int]:
    session = TargetSession(model(), LAYERS, max_length=LONGEST)
    return decode_plain(session, prompt, max_new_tokens=60, eos_ids=()).tokens


def paged_alone(prompt: Sequence[int], count: int, *, eos: bool = True) -> list[int]:
    """What the target writes greedily, 60 tokens at most; no token ends it."""
    assert not eos
    return _written(tuple(prompt))[:count]
