"""A DFlash2 session computes what training computes; and training's second choice against a reference written out slot by slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import make_batch, make_tables
from dflash2_cases import OWN, TINY2, VARIANTS2, make_drafter2
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.dflash2 import DFlash2Drafter
from firesteel.drafters.dflash2_session import DFlash2Session

TOKENS = 14


def open_session(config: DraftConfig, drafter: DFlash2Drafter) -> DFlash2Session:
    embed, head, _ = make_tables(config)
    return DFlash2Session(drafter, embed, head, draft_to_target=None, max_length=32)


def forced(config: DraftConfig, drafter: DFlash2Drafter, batch: Batch, anchor: int, tokens: list[int]) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """Training's view of the block at `anchor` whose true tokens are `tokens`: batch, states `[1, g, h]`, candidates `[1, g, K]`, logits `[1, g, V]`."""
    embed, head, _ = make_tables(config)
    ids = torch.cat([batch.token_ids[: anchor + 1], torch.tensor(tokens)])
    context = batch.context.new_full((ids.shape[0], batch.context.shape[1]), 7.0)  # states from the anchor on must not matter
    context[:anchor] = batch.context[:anchor]
    made = make_batch(config, [ids.shape[0]], [anchor])
    one = replace(made, token_ids=ids, context=context, draft_labels=torch.where(made.slots >= 0, ids[made.slots.clamp(min=0)], -1))
    z = drafter.states(one, embed, "dense")
    logits = z @ head.T
    return one, z, logits.topk(drafter.candidate_selector.top_k).indices, logits


@pytest.mark.parametrize("name", VARIANTS2)
@torch.no_grad()
def test_session_equals_training_at_every_anchor(name: str) -> None:
    """Whatever is drafted, training scores it alike when it is the teacher-forced text."""
    config = VARIANTS2[name]
    drafter, head = make_drafter2(config), make_tables(config)[1]
    batch, session = make_batch(config, [TOKENS], [0]), open_session(config, drafter)
    first, generator, second_choices = 0 if config.sample_from_anchor else 1, torch.Generator().manual_seed(0), 0
    for anchor in range(TOKENS):
        token = int(batch.token_ids[anchor])
        for temperature in (0.0, 0.7):
            draft = session.draft(token, config.num_drafts, temperature=temperature, generator=generator)
            one, z, candidates, logits = forced(config, drafter, batch, anchor, draft.tokens)
            previous = one.previous_tokens(config.sample_from_anchor)[0, first:]
            tokens = candidates[0, first:]
            scores = logits[0, first:].gather(1, tokens) + drafter.candidate_selector.bonus(z[0, first:], previous, tokens)
            if draft.probs is None:
                judged = drafter.rerank(one, z, head, candidates, torch.ones_like(candidates, dtype=torch.float32))
                assert bool(judged.correct[0, first:].all())
                second_choices += int((scores.argmax(-1) > 0).sum())
            else:
                wanted = torch.zeros_like(draft.probs).scatter_(1, tokens, (scores / temperature).softmax(-1))
                torch.testing.assert_close(draft.probs, wanted, rtol=1e-3, atol=1e-5)
            assert draft.confidences is None
        session.observe((), batch.context[anchor : anchor + 1])
    assert second_choices > 3 or drafter.candidate_selector.top_k == 1  # the selector does change what is drafted


@torch.no_grad()
def test_fewer_tokens_and_rewinding() -> None:
    session, batch = open_session(TINY2, make_drafter2(TINY2)), make_batch(TINY2, [TOKENS], [0])
    session.observe((), batch.context[:9])
    whole = session.draft(3, 3)
    assert session.draft(3, 2).tokens == whole.tokens[:2]
    session.observe((), batch.context[9:12])
    session.rewind(9)
    assert session.draft(3, 3).tokens == whole.tokens


@pytest.mark.parametrize("anchor", [False, True])
def test_second_choice_is_its_definition(anchor: bool) -> None:
    """Loss, judgement and gradients against loops over slots and candidates, in float64."""
    config = replace(TINY2, vocab_size=12, draft_vocab_size=12, mask_token_id=11, sample_from_anchor=anchor, extra=OWN | {"selector_loss": 0.7})
    drafter = make_drafter2(config, dtype=torch.float64)
    embed, head, _ = make_tables(config, dtype=torch.float64)
    batch = make_batch(config, [11, 9], [0, 4, 8, 12, 17], seed=5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    teacher = torch.rand(5, 4, 5, generator=generator, dtype=torch.float64)
    factor = torch.rand(5, 4, generator=generator, dtype=torch.float64)

    rows = drafter.training_rows(batch, embed, head, attention="dense")
    assert rows.rerank is not None
    assert rows.confidence_logits is None
    candidates = (rows.z @ head.T).topk(rows.candidates).indices
    found = rows.rerank(candidates, teacher)
    (found.loss * factor).sum().backward()
    gradients = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}

    drafter.zero_grad()
    chooser, z = drafter.candidate_selector, drafter.states(batch, embed, "dense")
    total, missing, right = torch.zeros((), dtype=torch.float64), 0, 0
    for n, k in torch.nonzero(batch.slots >= 0).tolist():
        true, before = int(batch.token_ids[batch.slots[n, k]]), int(batch.token_ids[batch.slots[n, k] - 1])

        def score(token: int, n: int = n, k: int = k, before: int = before) -> Tensor:
            gate = chooser.predecessor_codebook[before] * (chooser.hidden_projection.weight @ z[n, k])
            return head[token] @ z[n, k] + gate @ chooser.successor_codebook[token]

        ids: list[int] = candidates[n, k].tolist()
        served = torch.stack([score(token) for token in ids])
        trained = ids if true in ids else [*ids[:-1], true]
        missing += true not in ids
        loss = -torch.stack([score(token) for token in trained]).log_softmax(0)[trained.index(true)]
        total = total + 0.7 * factor[n, k] * loss
        torch.testing.assert_close(found.loss[n, k], 0.7 * loss)
        assert bool(found.correct[n, k]) == (ids[int(served.argmax())] == true)
        right += int(found.correct[n, k])
        expected = sum(min(p, t) for p, t in zip(served.softmax(0).tolist(), teacher[n, k].tolist(), strict=True))
        assert float(found.accept[n, k]) == pytest.approx(expected, rel=1e-9)
    total.backward()
    assert not bool(found.loss[batch.slots < 0].any())
    assert missing > 3
    assert right > 0
    assert {n for n, p in drafter.named_parameters() if p.grad is not None} == set(gradients)
    for name, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
