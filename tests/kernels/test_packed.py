"""PackedLinear against F.linear."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.kernels.packed import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (8, 5), (33, 5), (2, 3, 5), (0, 5), (1, 0, 5)])
def test_equals_linear(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(7, 5, dtype=dtype), torch.randn(7, dtype=dtype) if bias else None
    layer, x = PackedLinear(weight, offset), torch.randn(shape, dtype=dtype)
    y, other = F.linear(x, weight, offset), torch.randn(*shape[:-1], 7, dtype=dtype)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(layer(x), y, **tolerance)
    torch.testing.assert_close(layer.silu(x), F.silu(y), **tolerance)
    torch.testing.assert_close(layer.times(x, other), y * other, **tolerance)
    torch.testing.assert_close(layer.plus(x, other), y + other, **tolerance)


def test_strided_inputs() -> None:
    weight = torch.randn(7, 5)
    x = torch.randn(4, 3, 10).transpose(0, 1)[..., ::2]
    torch.testing.assert_close(PackedLinear(weight)(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(PackedLinear(torch.randn(5, 7).T)(x).shape, torch.Size([3, 4, 7]))


def test_a_packed_layer_refuses_another_dtype() -> None:
    layer = PackedLinear(torch.randn(7, 5))
    assert layer.packed == can_pack(torch.randn(7, 5))
    if layer.packed:
        with pytest.raises(TypeError, match="float64"):
            layer(torch.randn(2, 5, dtype=torch.float64))


def test_a_transformers_model_with_tied_head() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 40, (2, 9))
    with torch.no_grad():
        before = model(ids).logits
        assert pack_linears(model, rows=4) is model
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert isinstance(model.lm_head, PackedLinear)
    assert not model.lm_head.training
    assert model.get_input_embeddings().weight.shape == (40, 16)


def test_shared_layers_stay_shared_and_other_layers_stay() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.LayerNorm(4)), nn.Linear(4, 4).double())
    pack_linears(model)
    assert model[0] is model[1][0]
    assert isinstance(model[0], PackedLinear)
    assert isinstance(model[1][1], nn.LayerNorm)
    assert isinstance(model[2], nn.Linear)


def test_half_products_are_close_and_the_rest_stays_float32():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 64, bias=False))
    x = torch.randn(5, 17, 96)
    want = model(x).detach()
    pack_linears(model, 64, half=True)
    with torch.inference_mode():
        got = model(x)
        assert model(x[:0]).shape == (0, 17, 64)
    assert got.dtype == torch.float32
    if model[0].in_half:  # this build of oneDNN multiplies bfloat16 here
        assert not torch.equal(got, want)
    assert float((got - want).norm() / want.norm()) < 0.01
