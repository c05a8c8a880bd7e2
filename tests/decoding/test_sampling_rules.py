"""Distributions of sampling, and the draws from them."""

from __future__ import annotations

import pytest
import torch

from firesteel.decoding.sampling import RandomChance, Sampling, distributions
from firesteel.decoding.verify import verified_length
from firesteel.errors import RecipeError

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]])


def test_temperature():
    got = distributions(PROBS.log(), Sampling(0.5))
    torch.testing.assert_close(got, PROBS**2 / (PROBS**2).sum())


def test_greedy_is_one_hot():
    assert distributions(PROBS.log(), Sampling(0.0)).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=2), [0, 0.4, 0, 0.3]),
        (Sampling(1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(1.0, top_p=0.4 - 1e-4), [0, 0.4, 0, 0]),
        (Sampling(1.0, top_p=0.65), [0, 0.4, 0, 0.3]),
        (Sampling(1.0, top_p=0.75), [0, 0.4, 0.2, 0.3]),
        (Sampling(1.0, top_p=1e-6), [0, 0.4, 0, 0]),
        (Sampling(1.0, top_k=2, top_p=0.5), [0, 0.4, 0, 0]),  # 0.4 / 0.7 reaches 0.5 alone
        (Sampling(1.0, min_p=0.5 - 1e-4), [0, 0.4, 0.2, 0.3]),
        (Sampling(1.0, min_p=0.5 + 1e-4), [0, 0.4, 0, 0.3]),
        (Sampling(1.0, min_p=1.0), [0, 0.4, 0, 0]),
        (Sampling(1.0, min_p=0.6, top_p=0.5), [0, 0.4, 0, 0]),  # min_p comes first: 0.4 / 0.7 reaches 0.5 alone
        (Sampling(1.0, min_p=1e-6, top_k=3), [0, 0.4, 0.2, 0.3]),
    ],
)
def test_cuts(sampling, kept):
    want = torch.tensor([kept])
    torch.testing.assert_close(distributions(PROBS.log(), sampling), want / want.sum())


def test_ties_at_the_cut_keep_the_lower_ids():
    assert distributions(torch.zeros(1, 4), Sampling(1.0, top_k=2)).tolist() == [[0.5, 0.5, 0, 0]]


def test_min_p_is_taken_after_the_temperature():
    # At temperature 0.5 the ratios to the likeliest are squared: 1/16, 1, 1/4, 9/16.
    want = torch.tensor([[0, 16.0, 0, 9.0]]) / 25
    torch.testing.assert_close(distributions(PROBS.log(), Sampling(0.5, min_p=0.3)), want)
    assert distributions(PROBS.log(), Sampling(0.0, min_p=0.3)).tolist() == [[0, 1, 0, 0]]


def test_draws_have_their_probabilities_and_repeat_with_the_seed():
    def draw(seed: int) -> list[int]:
        chance = RandomChance(torch.Generator().manual_seed(seed))
        return [chance.pick(torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])) for _ in range(4000)]

    first = draw(0)
    assert first == draw(0)
    assert first != draw(1)
    shares = torch.tensor(first).bincount(minlength=6) / 4000
    # 5 standard deviations of a share of 4,000 draws are 0.04.
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0]), atol=0.04, rtol=0)
    assert shares[[0, 2, 5]].sum() == 0


class _Fixed(RandomChance):
    def __init__(self, value: float) -> None:
        super().__init__(None)
        self.value = value

    def _uniform(self) -> float:
        return self.value


@pytest.mark.parametrize(("value", "token"), [(0.0, 1), (0.49, 1), (0.51, 3), (1 - 2**-53, 3), (1.0, 3)])
def test_edges_of_a_draw_never_give_an_impossible_token(value, token):
    assert _Fixed(value).pick(torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])) == token


def test_accept_is_certain_at_one_and_never_at_zero():
    chance = RandomChance(torch.Generator().manual_seed(0))
    assert all(chance.accept(1.0) and not chance.accept(0.0) for _ in range(100))
    assert not _Fixed(0.0).accept(0.0)


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 3), (0.71, 2), (0.72, 2), (0.73, 1), (0.95, 0)])
def test_verified_length_follows_the_product(threshold, length):
    assert verified_length([0.9, 0.8001, 0.5], threshold) == length


def test_verified_length_stops_at_the_first_that_falls_short():
    assert verified_length([0.9, 0.1, 1.0], 0.5) == 1


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 1.1}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(RecipeError, match=next(iter(bad))):
        Sampling(**bad)
