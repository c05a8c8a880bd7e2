"""A session on latents computes what training computes with keys and values written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import make_batch, make_tables
from latent_cases import TINY, VARIANTS, make_drafter

from firesteel.drafters.latent_session import LatentSession
from firesteel.drafters.registry import get_spec
from firesteel.errors import RecipeError, ResourceError


@pytest.mark.parametrize("name", VARIANTS)
def test_session_equals_training_at_every_anchor(name: str) -> None:
    config, count = VARIANTS[name], 14
    drafter, (embed, head, _) = make_drafter(config), make_tables(config, dtype=torch.float64)
    batch = make_batch(config, [count], list(range(count)), dtype=torch.float64)
    session = get_spec("dspark").session(drafter, embed, head, draft_to_target=None, max_length=64, confidence_temperatures=[1.0, 2.0, 0.5, 1.0])
    assert isinstance(session, LatentSession)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        trained = drafter.states(batch, embed)
    for anchor in range(count):
        token = int(batch.token_ids[anchor])
        torch.testing.assert_close(session.states(token), trained[anchor])
        for temperature in (0.0, 0.7):
            draft = session.draft(token, 4, temperature=temperature, generator=generator)
            ids = torch.cat([batch.token_ids[: anchor + 1], torch.tensor(draft.tokens)])
            text = torch.full((ids.shape[0], batch.context.shape[1]), 7.0, dtype=torch.float64)  # states from the anchor on must not matter
            text[:anchor] = batch.context[:anchor]
            with torch.no_grad():
                forced = replace(make_batch(config, [ids.shape[0]], [anchor], dtype=torch.float64), token_ids=ids, context=text)
                rows = drafter.training_rows(forced, embed, head, attention="dense")
            logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0)
            if draft.probs is None:
                assert draft.tokens == logits.argmax(-1).tolist()
            else:
                torch.testing.assert_close(draft.probs, (logits / temperature).softmax(-1))
                assert session.expand(draft.probs) is draft.probs
            if rows.confidence_logits is None:
                assert draft.confidences is None
            else:
                wanted = (rows.confidence_logits[0] / torch.tensor([1.0, 2.0, 0.5, 1.0])).sigmoid()
                torch.testing.assert_close(torch.tensor(draft.confidences, dtype=torch.float64), wanted)
        session.observe((), batch.context[anchor : anchor + 1])


def test_rewinding_and_chunks_do_not_matter() -> None:
    drafter, (embed, head, _) = make_drafter(TINY), make_tables(TINY, dtype=torch.float64)
    context = make_batch(TINY, [12], [0], dtype=torch.float64).context
    plain, wild = (LatentSession(drafter, embed, head, draft_to_target=None, max_length=12) for _ in range(2))
    plain.observe((), context[:9])
    wild.observe((), context[3:11])
    wild.rewind(0)
    wild.observe((), context[:5])
    wild.observe((), context[10:12])
    wild.draft(8, 3)
    wild.rewind(5)
    wild.observe((), context[5:9])
    torch.testing.assert_close(wild.states(7), plain.states(7))
    assert wild.draft(7, 4).tokens[:2] == plain.draft(7, 2).tokens
    with pytest.raises(RecipeError, match="rewind"):
        plain.rewind(10)
    with pytest.raises(RecipeError, match="cannot draft 5"):
        plain.draft(7, 5)
    with pytest.raises(ResourceError, match="12 positions"):
        plain.observe((), context[:4])
    with pytest.raises(RecipeError, match="whole vocabulary"):
        LatentSession(drafter, embed, head, draft_to_target=torch.arange(50), max_length=12)
    with pytest.raises(RecipeError, match="calibrate"):
        LatentSession(drafter, embed, head, draft_to_target=None, max_length=12, confidence_temperatures=[1.0])
