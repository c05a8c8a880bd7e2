"""The parts of DFlash2 against their definitions: convolution, selector, walk, draws; and what a fresh one computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_cases import DFLASH, make_batch, make_drafter, make_tables
from dflash2_cases import OWN, TINY2, make_drafter2
from test_draft_build import FACTS
from torch import Tensor

from firesteel.drafters.build import make_config
from firesteel.drafters.dflash2 import CandidateSelector, DFlash2Drafter, DynamicConv, convolve
from firesteel.drafters.dflash2_session import CandidatePicker, draw
from firesteel.drafters.registry import get_spec
from firesteel.drafters.token_logits import token_logits
from firesteel.errors import FiresteelError, RecipeError
from firesteel.kernels.packed import PackedLinear
from firesteel.recipe import Drafter
from firesteel.training.optimizer import split_parameters


def reference(x: Tensor, base: Tensor, delta: Tensor, group: int) -> Tensor:
    """`out[i, c] = sum_t (base[t, c] + delta[i, t, c // group]) * x[i - t, c]`, number by number, for one block `[g, h]`."""
    out = torch.zeros_like(x)
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            for t in range(base.shape[0]):
                if i - t >= 0:
                    out[i, c] += (base[t, c] + delta[i, t, c // group]) * x[i - t, c]
    return out


@pytest.mark.parametrize(("taps", "group"), [(1, 3), (2, 2), (3, 6), (4, 1)])
def test_convolution_is_its_definition(taps: int, group: int) -> None:
    torch.manual_seed(0)
    x, base, delta = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(taps, 6).double(), torch.randn(3, 4, taps, 6 // group).double()
    found = convolve(x, base, delta)
    for n in range(3):  # each block alone: nothing crosses
        torch.testing.assert_close(found[n], reference(x[n], base, delta[n], group))
    torch.testing.assert_close(convolve(x[0], base, delta[0]), found[0])
    assert torch.autograd.gradcheck(convolve, (x.requires_grad_(), base.requires_grad_(), delta.requires_grad_()))


def test_convolutions_around_a_sublayer() -> None:
    """Both kernels come from the sublayer's input; the first acts on it, the second on the output."""
    conv = DynamicConv(TINY2)
    with torch.no_grad():
        for p in conv.parameters():
            p.normal_()
        y, out = torch.randn(4, 24), torch.randn(4, 24)
        kernels = (y @ conv.kernel_projection.weight.T).view(4, 2, 2, 3)
        prepared, kept = conv.before(y)
        torch.testing.assert_close(prepared, reference(y, conv.base_kernel[0], kernels[:, 0], 8))
        torch.testing.assert_close(conv.after(out, kept), reference(out, conv.base_kernel[1], kernels[:, 1], 8))


def test_fresh_tensors_on_a_dflash_are_that_dflash() -> None:
    """The same states and choices bit for bit, in training and in decoding."""
    trained, (embed, head, _) = make_drafter(DFLASH), make_tables(DFLASH)
    fresh = DFlash2Drafter(TINY2)
    lacking = fresh.load_state_dict(trained.state_dict(), strict=False)
    assert not lacking.unexpected_keys
    assert all("_conv." in k or k.startswith("candidate_selector.") for k in lacking.missing_keys)
    batch = make_batch(DFLASH, [24], list(range(0, 24, 3)))
    z = trained.states(batch, embed)
    assert torch.equal(fresh.states(batch, embed), z)
    logits = z @ head.T
    candidates = logits.topk(5).indices
    chosen = fresh.rerank(batch, z, head, candidates, torch.ones_like(candidates, dtype=torch.float32))
    assert torch.equal(chosen.correct, (logits.argmax(-1) == batch.draft_labels) & (batch.slots >= 0))
    one, two = (get_spec(a).session(d.eval(), embed, head, draft_to_target=None, max_length=32) for a, d in (("dflash", trained), ("dflash2", fresh)))
    for session in (one, two):
        session.observe((), batch.context[:9])
    for token in range(30):
        assert one.draft(token, 3).tokens == two.draft(token, 3).tokens


def test_fresh_tensors_learn() -> None:
    """Whatever starts at zero has a gradient where it must, so that the rest gets one later."""
    drafter, (embed, head, _) = DFlash2Drafter(TINY2), make_tables(TINY2)
    batch = make_batch(TINY2, [24], [0, 5, 9])
    rows = drafter.training_rows(batch, embed, head)
    assert rows.rerank is not None
    assert rows.candidates == 5
    candidates = (rows.z @ head.T).topk(5).indices
    rows.rerank(candidates, torch.ones(3, 4, 5)).loss.sum().backward()
    grown = {n for n, p in drafter.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    assert {n for n in dict(drafter.named_parameters()) if "_conv." in n} <= grown
    assert "candidate_selector.successor_codebook" in grown
    assert "candidate_selector.hidden_projection.weight" not in grown


def selector(*, top_k: int = 2) -> CandidateSelector:
    """Rank 1, width 24, five tokens: `<A[a] * (P z), B[b]> = A[a] B[b] z_0`."""
    made = CandidateSelector(replace(TINY2, vocab_size=5, draft_vocab_size=5, mask_token_id=4, extra=OWN | {"rank": 1, "top_k": top_k}))
    with torch.no_grad():
        made.predecessor_codebook.copy_(torch.tensor([[1.0], [-2.0], [3.0], [0.0], [0.5]]))
        made.successor_codebook.copy_(torch.tensor([[0.0], [1.0], [2.0], [-1.0], [4.0]]))
        made.hidden_projection.weight.zero_()
        made.hidden_projection.weight[0, 0] = 1
    return made


def by_hand() -> tuple[CandidatePicker, Tensor]:
    """A picker whose logits are the states' first five numbers, and the states of two slots."""
    z = torch.zeros(2, 24)
    z[0, :5] = torch.tensor([1.0, 2.0, 0.5, 3.0, -1.0])  # candidates 3 (3.0) and 1 (2.0)
    z[1, :5] = torch.tensor([0.5, 0.0, 1.0, -1.0, 1.1])  # candidates 4 (1.1) and 2 (1.0)
    return CandidatePicker(PackedLinear(torch.eye(24)[:5]), selector()), z


def test_selector_by_hand() -> None:
    z = torch.zeros(2, 24)
    z[:, 0] = torch.tensor([1.0, 0.5])
    found = selector().bonus(z, torch.tensor([2, 1]), torch.tensor([[1, 4], [2, 3]]))
    assert found.tolist() == [[3.0, 12.0], [-2.0, 1.0]]  # 3 * 1 * 1, 3 * 4 * 1; -2 * 2 * 0.5, -2 * -1 * 0.5


def test_greedy_walk_by_hand() -> None:
    picker, z = by_hand()
    # After 0: 3 + 1 * -1 = 2 against 2 + 1 * 1 = 3: token 1. After 1: 1.1 - 2 * 4 * 0.5 = -2.9 against 1 - 2 * 2 * 0.5 = -1: token 2.
    assert picker.pick(z, 0, 0.0, None).tokens == [1, 2]
    # After 1: 3 - 2 * -1 = 5 against 2 - 2 * 1 = 0: token 3. After 3 nothing is added: token 4.
    assert picker.pick(z, 1, 0.0, None).tokens == [3, 4]
    assert picker.pick(z[:1], 1, 0.0, None).tokens == [3]


def test_sampled_walk_by_hand() -> None:
    """The distribution of each slot is the softmax of S / T over its candidates, after the token that was drawn before."""
    picker, z = by_hand()
    first = torch.tensor([[0.0, 3.0, 0.0, 2.0, 0.0]])  # S of candidates 1 and 3 after token 0
    second = {1: (-1.0, -2.9), 3: (1.0, 1.1)}  # S of candidates 2 and 4
    seen = set()
    for seed in range(60):
        found = picker.pick(z, 0, 0.5, torch.Generator().manual_seed(seed))
        assert found.probs is not None
        wanted = torch.zeros(2, 5)
        wanted[0, [1, 3]] = (first[0, [1, 3]] / 0.5).softmax(0)
        wanted[1, [2, 4]] = (torch.tensor(second[found.tokens[0]]) / 0.5).softmax(0)
        torch.testing.assert_close(found.probs, wanted)
        seen.add(tuple(found.tokens))
    assert seen == {(1, 2), (1, 4), (3, 2), (3, 4)}


def test_draws_follow_their_row_and_never_hit_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    probs = torch.tensor([[[0.7, 0.2, 0.1, 0.0], [0.0, 0.0, 0.5, 0.5]], [[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]])
    rounds, counts = 4000, torch.zeros(2, 2, 4)
    for _ in range(rounds):
        for k, slot in enumerate(draw(probs, generator)):
            for i, place in enumerate(slot):
                counts[k, i, place] += 1
    assert bool(((counts / rounds - probs).abs() <= 4.5 * (probs * (1 - probs) / rounds).sqrt() + 1e-9).all())
    assert not bool(counts[probs == 0].any())


def test_logits_of_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firesteel.drafters.token_logits._GATHERED", 30)  # two rows at a time
    torch.manual_seed(0)
    states, head, tokens = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.randn(11, 5).double(), torch.randint(11, (7, 3))
    torch.testing.assert_close(token_logits(states, head, tokens), (states @ head.T).gather(1, tokens))
    assert torch.autograd.gradcheck(lambda s: token_logits(s, head, tokens), (states,))


def test_muon_gets_matrices_only() -> None:
    drafter = make_drafter2(TINY2)
    names = {id(p): n for n, p in drafter.named_parameters()}
    matrices, tables, rest = ({names[id(p)] for p in part} for part in split_parameters(drafter))
    assert tables == {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"}
    assert {n for n in rest if "conv" in n} == {f"layers.{i}.{part}_conv.base_kernel" for i in range(2) for part in ("attention", "mlp")}
    assert {"candidate_selector.hidden_projection.weight", "layers.0.mlp_conv.kernel_projection.weight"} <= matrices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": OWN | {"group": 16}}, r"dflash2\.group=16 does not divide the hidden size 24"),
        ({"extra": OWN | {"kernel": 5}}, r"dflash2\.kernel=5 is longer than drafter\.block_size=4"),
        ({"extra": OWN | {"top_k": 51}}, r"dflash2\.top_k=51 exceeds"),
        ({"extra": OWN | {"rank": 0}}, r"dflash2\.rank"),
        ({"extra": OWN | {"ranks": 3}}, r"dflash2\.ranks"),
        ({"markov_rank": 4}, "no heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FiresteelError, match=message):
        DFlash2Drafter(replace(TINY2, **changes))  # type: ignore[arg-type]


def test_settings_reach_the_drafter() -> None:
    settings = Drafter(algorithm="dflash2", dflash2={"kernel": 3, "rank": 12, "selector_loss": 0.5})  # type: ignore[arg-type]
    config = make_config(settings, FACTS, [1, 3], 99)
    assert config.extra == {"kernel": 3, "group": 16, "rank": 12, "top_k": 16, "selector_loss": 0.5}
    assert (config.sample_from_anchor, config.num_drafts, config.markov_rank, config.confidence_head) == (False, 7, 0, False)
    drafter = get_spec("dflash2").build(config)
    assert {k: tuple(v.shape) for k, v in drafter.state_dict().items()} == {k: key.shape for k, key in get_spec("dflash2").keys(config).items()}
    with pytest.raises(RecipeError, match="whole vocabulary"):
        make_config(Drafter(algorithm="dflash2", draft_vocab_size=50), FACTS, [1], 99)
