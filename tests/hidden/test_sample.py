"""Samples on arrival: each check refuses the sample that one thing is wrong with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firesteel.errors import HiddenStateError
from firesteel.hidden.sample import HiddenSample, check_sample, predictable_positions

LAYERS, TARGET = (1, 4), "some-target"


def good(t: int = 7, d: int = 4) -> HiddenSample:
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(t) >= 2
    positions = predictable_positions(mask)
    states = torch.randn(t, len(LAYERS), d, generator=g), torch.randn(len(positions), d, generator=g)
    return HiddenSample("doc", torch.randint(0, 50, (t,), generator=g), mask, *states, positions, LAYERS, TARGET, torch.randn(len(positions), generator=g))


def with_value(states: torch.Tensor, place: object, value: object) -> torch.Tensor:
    states = states.clone()
    states[place] = value  # type: ignore[index]
    return states


GOOD = good()
NONE = torch.zeros(len(GOOD), dtype=torch.bool)
SPOILED = {
    "foreign target": (replace(GOOD, target="other"), "was captured from target other, this run trains for some-target"),
    "wrong layers": (replace(GOOD, layer_ids=(1, 3)), r"has layers \[1, 3\], the recipe wants \[1, 4\]"),
    "layers in another order": (replace(GOOD, layer_ids=(4, 1)), r"has layers \[4, 1\], the recipe wants \[1, 4\]"),
    "short mask": (replace(GOOD, loss_mask=GOOD.loss_mask[:-1]), "has 7 tokens, 6 mask entries and 7 states"),
    "short states": (replace(GOOD, aux=GOOD.aux[:-1]), "has 7 tokens, 7 mask entries and 6 states"),
    "a token too many": (replace(GOOD, token_ids=torch.cat([GOOD.token_ids, GOOD.token_ids[:1]])), "has 8 tokens, 7 mask entries and 7 states"),
    "a layer too few": (replace(GOOD, aux=GOOD.aux[:, :1]), r"has states of shape \[7, 1, 4\] for 2 layers"),
    "layers not apart": (replace(GOOD, aux=GOOD.aux.flatten(1)), r"has states of shape \[7, 8\] for 2 layers"),
    "a last state too few": (replace(GOOD, last=GOOD.last[:-1]), "has 4 last states for 5 positions"),
    "a normaliser too few": (replace(GOOD, last_lognorm=torch.zeros(4)), "has 4 normalisers for 5 positions"),
    "shifted positions": (replace(GOOD, last_positions=GOOD.last_positions + 1), "has last states at other positions than its loss mask needs"),
    "positions of another mask": (replace(GOOD, loss_mask=with_value(GOOD.loss_mask, 3, False)), "has last states at other positions"),
    "nothing supervised": (
        replace(GOOD, loss_mask=NONE, last=GOOD.last[:0], last_positions=GOOD.last_positions[:0], last_lognorm=None),
        "has no supervised token",
    ),
    "NaN": (replace(GOOD, aux=with_value(GOOD.aux, (3, 1, 2), torch.nan)), "has non-finite states in layer 4"),
    "infinity": (replace(GOOD, last=with_value(GOOD.last, (0, 0), torch.inf)), "has non-finite states in the last layer"),
    "zeros": (replace(GOOD, aux=with_value(GOOD.aux, (slice(None), 0), 0)), "has only zeros in layer 1"),
    "a zero token": (replace(GOOD, aux=with_value(GOOD.aux, (2, 1), 0)), "has an all-zero state in layer 4"),
    "a zero last state": (replace(GOOD, last=with_value(GOOD.last, 1, 0)), "has an all-zero state in the last layer"),
    "constant layer": (replace(GOOD, aux=with_value(GOOD.aux, (slice(None), 0), GOOD.aux[0, 0])), "has the same state at every position in layer 1"),
    "constant last layer": (replace(GOOD, last=GOOD.last[:1].expand(5, 4)), "has the same state at every position in the last layer"),
}


def test_a_good_sample_passes() -> None:
    check_sample(GOOD, layer_ids=LAYERS, target=TARGET)
    check_sample(replace(GOOD, last_lognorm=None), layer_ids=LAYERS, target=TARGET)


@pytest.mark.parametrize("name", SPOILED)
def test_a_sample_with_one_thing_wrong_is_refused_by_its_name(name: str) -> None:
    sample, words = SPOILED[name]
    with pytest.raises(HiddenStateError, match=f"sample doc {words}") as e:
        check_sample(sample, layer_ids=LAYERS, target=TARGET)
    assert e.value.mend is not None
    assert "firesteel extract" in e.value.mend
