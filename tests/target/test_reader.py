"""Texts read together leave the states that each leaves alone, whichever way they are read."""

from __future__ import annotations

import pytest
import torch
from small_sizes import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from firesteel.target.local import capture, stack_layers
from firesteel.target.reader import FlatReader


def make_texts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(60, (n,), generator=draw).tolist() for n in lengths]


def check(model: torch.nn.Module, reader: FlatReader, texts: list[list[int]], rtol: float = 1e-4) -> None:
    for text, (aux, last) in zip(texts, reader(texts), strict=True):
        with torch.no_grad(), capture(model, reader.layer_ids) as states:
            model(torch.tensor([text]))
        expected = stack_layers(states, reader.layer_ids)[0]
        scale = float(expected.abs().max())
        torch.testing.assert_close(aux, expected, rtol=rtol, atol=rtol * scale)
        torch.testing.assert_close(last, states["last"][0], rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("layer_ids", [(0, 2), (1, 3)], ids=["inner", "with-the-last"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_flat_reading(layer_ids: tuple[int, ...], half: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    reader = FlatReader(model, layer_ids, half=half)
    for lengths in ((5, 1, 40), (130,), (3, 3)):  # the second wants more room, the third less
        check(model, reader, make_texts(*lengths), rtol=0.05 if half else 1e-4)
    assert reader._paged is not None


def test_a_target_that_is_not_lean_in_a_detail_is_read_by_its_own_pass() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, layer_types=["full_attention"] * 3, rope_parameters=rope)).eval()
    reader = FlatReader(model, (1, 2))
    check(model, reader, make_texts(9, 20))
    assert reader._padded is not None


def test_a_sliding_window_shorter_than_a_text_is_read_by_its_own_pass() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval()
    reader = FlatReader(model, (1, 2))
    check(model, reader, make_texts(9, 12))
    assert reader._padded is None
    check(model, reader, make_texts(9, 40))
    assert reader._padded is not None
