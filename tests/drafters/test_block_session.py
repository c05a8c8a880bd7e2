"""A session computes what training computes: for every anchor the same states, logits, tokens and confidences."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from block_cases import DFLASH, MIXED, REDUCED, TINY, VARIANTS, make_batch, make_drafter, make_tables
from torch import Tensor

from firesteel.batches.batch import Batch
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.session import BlockSession, Draft
from firesteel.errors import RecipeError, ResourceError
from firesteel.kernels.packed import PackedLinear

TOKENS = 24


def open_session(config: DraftConfig, drafter: BlockDrafter, *, max_length: int = 64, temperatures: list[float] | None = None) -> BlockSession:
    embed, head, ids = make_tables(config)
    return BlockSession(
        drafter, embed, head, draft_to_target=ids if config.reduced_vocab else None, max_length=max_length, confidence_temperatures=temperatures
    )


def teacher_forced(config: DraftConfig, drafter: BlockDrafter, batch: Batch, anchor: int, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
    """Training's logits `[n, V_d]` and confidence logits of one block whose true tokens are `tokens`."""
    embed, head, _ = make_tables(config)
    ids = torch.cat([batch.token_ids[: anchor + 1], torch.tensor(tokens)])
    padding = batch.context.new_full((ids.shape[0], batch.context.shape[1]), 7.0)  # states from the anchor on must not matter
    padding[:anchor] = batch.context[:anchor]
    one = replace(make_batch(config, [ids.shape[0]], [anchor]), token_ids=ids, context=padding)
    first = 0 if config.sample_from_anchor else 1
    with torch.no_grad():
        rows = drafter.training_rows(one, embed, head, attention="dense")
    logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0)
    return logits[first:], None if rows.confidence_logits is None else rows.confidence_logits[0, first:]


@pytest.mark.parametrize("name", VARIANTS)
def test_session_equals_training_at_every_anchor(name: str) -> None:
    """The test of the room: whatever is drafted, training scores it alike when it is the teacher-forced text."""
    config = VARIANTS[name]
    drafter = make_drafter(config)
    batch = make_batch(config, [TOKENS], [0])
    session = open_session(config, drafter)
    generator = torch.Generator().manual_seed(0)
    for anchor in range(TOKENS):
        token = int(batch.token_ids[anchor])
        draws = [session.draft(token, config.num_drafts, temperature=0.7, generator=generator), session.draft(token, config.num_drafts)]
        for temperature, draft in zip((0.7, 0.0), draws, strict=True):
            logits, confidence = teacher_forced(config, drafter, batch, anchor, draft.tokens)
            if draft.probs is not None:
                torch.testing.assert_close(draft.probs, (logits / temperature).softmax(-1), rtol=1e-3, atol=1e-5)
            else:
                picked = session.draft_to_target[logits.argmax(-1)] if config.reduced_vocab else logits.argmax(-1)
                assert draft.tokens == picked.tolist()
            if config.confidence_head:
                assert confidence is not None
                torch.testing.assert_close(torch.tensor(draft.confidences), confidence.sigmoid(), rtol=1e-3, atol=1e-5)
            else:
                assert draft.confidences is None
        session.observe((), batch.context[anchor : anchor + 1])


@pytest.mark.parametrize("name", ["dspark", "dflash", "mixed-causal"])
def test_states_equal_training_in_one_batch(name: str) -> None:
    config = VARIANTS[name]
    drafter, (embed, _, _) = make_drafter(config), make_tables(config)
    anchors = list(range(TOKENS))
    batch = make_batch(config, [TOKENS], anchors)
    with torch.no_grad():
        trained = drafter.states(batch, embed)
    session = open_session(config, drafter)
    for anchor in anchors:
        torch.testing.assert_close(session.states(int(batch.token_ids[anchor])), trained[anchor], rtol=1e-4, atol=1e-4)
        session.observe((), batch.context[anchor : anchor + 1])


@pytest.mark.parametrize("name", ["dspark", "gated-reduced", "rnn", "rnn-fill-in"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_picking_equals_one_token_at_a_time(name: str, temperature: float) -> None:
    """Pruned greedy and fixed-point sampling give the tokens of the plain left-to-right loop with the same random numbers."""
    config = replace(VARIANTS[name], block_size=6)
    drafter = make_drafter(config)
    assert drafter.markov_head is not None
    embed, head, ids = make_tables(config)
    with torch.no_grad():  # predecessors matter as much as states: several passes are needed
        drafter.markov_head.markov_w2.weight.mul_(6)
        head *= 0.2
    session = BlockSession(drafter, embed, head, draft_to_target=ids if config.reduced_vocab else None, max_length=16)
    session.observe((), make_batch(config, [12], [0]).context)
    mapped = ids if config.reduced_vocab else torch.arange(config.vocab_size)
    changed = 0
    for token in range(40):
        draft = session.draft(token, config.num_drafts, temperature=temperature, generator=torch.Generator().manual_seed(token))
        noise = torch.empty(config.num_drafts, config.draft_vocab_size).exponential_(generator=torch.Generator().manual_seed(token))
        with torch.no_grad():
            z = session.states(token)[config.block_size - config.num_drafts :]
            state, previous, tokens = None, token, []
            for k in range(config.num_drafts):
                row, state = drafter.markov_head.step(z[k], drafter.markov_head.embed(torch.tensor(previous)), state)
                logits = head @ z[k] + drafter.markov_head.markov_w2.weight @ row
                pick = (logits.softmax(-1) / noise[k]).argmax() if temperature else logits.argmax()
                previous = int(mapped[pick])
                tokens.append(previous)
            changed += tokens != mapped[((head @ z.T).T).argmax(-1)].tolist()
        assert draft.tokens == tokens
    assert changed > 20  # the head does change what is drafted


def test_pruning_reads_few_rows_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, vocab_size=4000, draft_vocab_size=4000, block_size=8)
    drafter = make_drafter(config)
    session = open_session(config, drafter)
    session.observe((), make_batch(config, [12], [0]).context)
    picker = session._picker
    pruned = [session.draft(t, 8).tokens for t in range(60)]
    full: list[int] = []
    addmv = torch.addmv
    monkeypatch.setattr(torch, "addmv", lambda base, table, row: (full.append(table.shape[0]), addmv(base, table, row))[1])
    session.draft(3, 8)
    assert max(full) < 4000 // 8 * 8
    monkeypatch.setattr(picker, "norms", picker.norms * 1e6)  # nothing can be ruled out
    full.clear()
    assert [session.draft(t, 8).tokens for t in range(60)] == pruned
    assert min(full) == 4000


def test_sampling_follows_the_distribution() -> None:
    """First token against its probabilities, and second given the first."""
    config = replace(REDUCED, draft_vocab_size=5)
    session = open_session(config, make_drafter(config))
    session.observe((), make_batch(config, [6], [0]).context)
    generator = torch.Generator().manual_seed(5)
    draws, rounds = [session.draft(11, 2, temperature=2.5, generator=generator) for _ in range(1500)], 1500
    expected = session.expand(draws[0].probs)[0]  # type: ignore[arg-type]
    first = Counter(d.tokens[0] for d in draws)
    for token in range(config.vocab_size):
        p = float(expected[token])
        assert abs(first[token] / rounds - p) <= 4.5 * (p * (1 - p) / rounds) ** 0.5 + 1e-9
    likely = first.most_common(1)[0][0]
    seconds = [d for d in draws if d.tokens[0] == likely]
    second = Counter(d.tokens[1] for d in seconds)
    expected = session.expand(seconds[0].probs)[1]  # type: ignore[arg-type]
    for token, count in second.items():
        p = float(expected[token])
        assert abs(count / len(seconds) - p) <= 4.5 * (p * (1 - p) / len(seconds)) ** 0.5


def same(a: Draft, b: Draft) -> None:
    assert a.tokens == b.tokens
    assert a.confidences == b.confidences or torch.allclose(torch.tensor(a.confidences), torch.tensor(b.confidences), atol=1e-5)


def test_rewind_and_chunks_do_not_matter() -> None:
    drafter = make_drafter(MIXED)
    batch = make_batch(MIXED, [TOKENS], [0])
    plain, wild = open_session(MIXED, drafter), open_session(MIXED, drafter)
    plain.observe((), batch.context[:15])
    wild.observe((), batch.context[3:10])  # another text first
    wild.draft(5, 4)
    wild.rewind(0)
    wild.observe((), batch.context[:9])
    wild.observe((), batch.context[20:23])
    wild.draft(8, 3)
    wild.rewind(9)
    wild.observe((), batch.context[9:9])
    for i in range(9, 15):
        wild.observe((), batch.context[i : i + 1])
        wild.draft(int(batch.token_ids[i + 1]), 2)
    same(plain.draft(7, 4), wild.draft(7, 4))
    with pytest.raises(RecipeError, match="rewind"):
        plain.rewind(16)


def test_fewer_tokens_are_a_prefix() -> None:
    session = open_session(TINY, make_drafter(TINY))
    session.observe((), make_batch(TINY, [6], [0]).context)
    whole, part = session.draft(3, 4), session.draft(3, 2)
    assert whole.tokens[:2] == part.tokens
    assert torch.allclose(torch.tensor(whole.confidences)[:2], torch.tensor(part.confidences))
    for count in (0, 5):
        with pytest.raises(RecipeError, match="cannot draft"):
            session.draft(3, count)


def test_context_grows_to_the_limit_and_no_further() -> None:
    drafter = make_drafter(DFLASH)
    session = open_session(DFLASH, drafter, max_length=1300)
    context = make_batch(DFLASH, [1300], [0]).context
    for start in range(0, 1300, 130):
        session.observe((), context[start : start + 130])
    embed, _, _ = make_tables(DFLASH)
    batch = make_batch(DFLASH, [1301], [1300])
    batch = replace(batch, context=torch.cat([context, context[:1]]))
    torch.testing.assert_close(session.states(int(batch.token_ids[1300])), drafter.states(batch, embed)[0].detach(), rtol=1e-3, atol=1e-4)
    with pytest.raises(ResourceError, match="1300 positions"):
        session.observe((), context[:1])


def test_expand_puts_probabilities_at_target_ids() -> None:
    session = open_session(REDUCED, make_drafter(REDUCED))
    session.observe((), make_batch(REDUCED, [6], [0]).context)
    draft = session.draft(3, 4, temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert draft.probs is not None
    assert draft.probs.shape == (4, 17)
    wide = session.expand(draft.probs)
    ids = make_tables(REDUCED)[2]
    assert wide.shape == (4, 50)
    assert torch.equal(wide[:, ids], draft.probs)
    assert torch.allclose(wide.sum(-1), torch.ones(4))
    assert set(draft.tokens) <= set(ids.tolist())


def test_confidence_temperatures_scale_each_position() -> None:
    drafter = make_drafter(TINY)
    plain, scaled = open_session(TINY, drafter), open_session(TINY, drafter, temperatures=[1.0, 2.0, 0.5, 4.0])
    context = make_batch(TINY, [6], [0]).context
    plain.observe((), context)
    scaled.observe((), context)
    logits = torch.tensor(plain.draft(3, 3).confidences).logit()
    torch.testing.assert_close(torch.tensor(scaled.draft(3, 3).confidences), (logits / torch.tensor([1.0, 2.0, 0.5])).sigmoid(), rtol=1e-3, atol=1e-5)


def test_tables_that_do_not_fit_are_refused() -> None:
    drafter = make_drafter(REDUCED)
    embed, head, ids = make_tables(REDUCED)
    with pytest.raises(RecipeError, match="draft_to_target"):
        BlockSession(drafter, embed, head, draft_to_target=None, max_length=8)
    with pytest.raises(RecipeError, match="16"):
        BlockSession(drafter, embed, head, draft_to_target=ids[:16], max_length=8)
    with pytest.raises(RecipeError, match="temperatures"):
        BlockSession(drafter, embed, head, draft_to_target=ids, max_length=8, confidence_temperatures=[1.0])


def test_packed_head_and_other_dtypes() -> None:
    drafter, (embed, head, _) = make_drafter(TINY), make_tables(TINY)
    context = make_batch(TINY, [6], [0]).context
    packed = BlockSession(drafter, embed, PackedLinear(head), draft_to_target=None, max_length=8)
    plain = open_session(TINY, drafter)
    double = BlockSession(make_drafter(TINY, dtype=torch.float64), embed, head, draft_to_target=None, max_length=8)
    for session in (packed, plain, double):
        session.observe((), context)
    same(packed.draft(3, 4), plain.draft(3, 4))
    assert double.draft(3, 4).tokens == plain.draft(3, 4).tokens


@pytest.mark.parametrize("pieces", [(700, 1, 3, 5), (3,) * 300, (40, 900, 2, 1, 1)])
def test_a_windowed_session_keeps_a_constant_number_of_positions(pieces: tuple[int, ...]) -> None:
    """It drafts what a session that was shown the window alone, at the same positions, drafts; and rewinds by what a round can add."""
    config = replace(TINY, layer_types=(SLIDING, SLIDING), sliding_window=20, max_position_embeddings=2048)
    drafter = make_drafter(config)
    session, whole = (open_session(config, drafter, max_length=1200) for _ in range(2))
    whole._window = None
    generator = torch.Generator().manual_seed(1)
    rooms = set()
    for n in pieces:
        aux = torch.randn(n, 2 * 24, generator=generator)
        for one in (session, whole):
            one.observe((), aux)
        rooms.add(session._keys.shape[2])
        assert session.length == whole.length
        torch.testing.assert_close(session.states(7), whole.states(7), rtol=1e-4, atol=1e-5)
        if session.length > 40:
            session.observe((), aux[:1])
            session.rewind(session.length - 1)
    assert max(rooms) <= 512
    assert whole._keys.shape[2] > 512
    torch.testing.assert_close(session.states(7), whole.states(7), rtol=1e-4, atol=1e-5)
    with pytest.raises(RecipeError, match="is kept up to position"):
        session.rewind(100)
    session.rewind(0)
    whole.rewind(0)
    for one in (session, whole):
        one.observe((), aux)
    torch.testing.assert_close(session.states(7), whole.states(7), rtol=1e-4, atol=1e-5)
