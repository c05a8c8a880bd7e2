"""What is read off a target of each family, against numbers written here and against the target's own forward pass."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from target_families import FAMILIES, LAYERS, SIZES, VOCABULARY, WIDTH, check_close, family, own_states
from torch import nn

from firesteel.target.head import decoder, final_norm, make_head
from firesteel.target.local import capture
from firesteel.target.spec import fingerprint, norm_offset, read_spec, weights_checksum


@pytest.mark.parametrize("name", FAMILIES)
def test_facts(name):
    spec = family(name).spec
    wanted = {"num_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48}
    wanted |= {"embed_scale": 1.0, "norm_offset": 0.0, "softcap": None, "logit_scale": 1.0, "eos_ids": (5,)} | FAMILIES[name].facts
    assert {k: getattr(spec, k) for k in wanted} == wanted
    assert spec.architecture == type(family(name).model).__name__
    # What a drafter of the Qwen3 kind can be built with.
    assert spec.num_heads % spec.num_kv_heads == 0
    assert spec.head_dim % 2 == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_embedding_scale_is_what_enters_the_first_layer(name):
    tiny = family(name)
    states, _ = own_states(tiny.model, tiny.text)
    torch.testing.assert_close(states[0], tiny.head.embed[tiny.text] * tiny.spec.embed_scale, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_norm_offset_is_what_the_norms_multiply_by(name):
    tiny = family(name)
    assert tiny.spec.norm_offset is not None
    norm, x = final_norm(tiny.model), torch.randn(3, WIDTH)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + tiny.spec.rms_norm_eps) * tiny.local.norm_weight
    torch.testing.assert_close(norm(x), scaled, atol=1e-5, rtol=1e-4)


def test_norms_that_are_no_rms_norms_have_no_offset():
    torch.manual_seed(0)
    assert norm_offset(nn.LayerNorm(64)) is None
    assert norm_offset(nn.Identity()) is None
    assert norm_offset(nn.RMSNorm(64)) == 0.0
    assert norm_offset(nn.RMSNorm(64).to(torch.bfloat16)) == 0.0
    halved = nn.RMSNorm(64)
    halved.register_forward_hook(lambda _m, _a, out: out * 0.5)
    assert norm_offset(halved) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_fingerprint_sees_every_weight(name):
    """A change of any parameter or lasting buffer, of layer scales and routers' biases too, gives another target."""
    model = family(name).model
    before, sums = fingerprint(model), weights_checksum(model)
    lasting = set(model.state_dict())
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n in lasting)]:
        kept = tensor.flatten()[0].clone()
        tensor.view(-1)[0] += 1
        changed = fingerprint(model), weights_checksum(model)
        tensor.view(-1)[0] = kept
        assert changed[0] != before
        assert changed[1] != sums
    assert (fingerprint(model), weights_checksum(model)) == (before, sums)


@pytest.mark.parametrize(
    ("extra", "width"),
    [
        ({"moe_intermediate_size": 16}, 2 * 16 + 24),
        ({"moe_intermediate_size": 512}, 512),  # one expert alone is wider than 4 d
        ({"moe_intermediate_size": 60}, 4 * WIDTH),
    ],
)
def test_width_of_targets_with_experts_only(extra, width):
    model = FAMILIES["qwen3_5_moe"].make()
    del model.config.intermediate_size
    model.config.update(extra)
    assert read_spec(model, "t", ()).intermediate_size == width


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (64, 16), (96, 16), (128, 16)])
def test_latent_attention_gets_groups_of_key_heads(heads, kv_heads):
    model = FAMILIES["deepseek_v3"].make()
    model.config.update({"num_attention_heads": heads, "num_key_value_heads": heads})
    spec = read_spec(model, "t", ())
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (heads, kv_heads, 8)


def test_yarn_of_latent_attention_loses_what_corrects_its_softmax():
    scaling = family("deepseek_v3").spec.rope_scaling
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert "mscale" in family("deepseek_v3").model.config.rope_parameters


def test_rope_of_layers_that_differ_is_that_of_full_attention():
    assert (family("gemma3").spec.rope_theta, family("gemma3").spec.rope_scaling) == (1e6, {"rope_type": "linear", "factor": 8.0})
    assert family("gemma4").spec.rope_theta == 1e6
    assert (family("qwen3_5_moe").spec.rope_theta, family("qwen3_5_moe").spec.rope_scaling) == (5e5, None)


def test_layer_types():
    assert family("llama").spec.layer_types == ("full_attention",) * 4
    assert family("mistral").spec.layer_types == ("sliding_attention",) * 4
    assert family("gemma3").spec.layer_types == ("sliding_attention", "full_attention") * 2
    assert family("kimi_linear").spec.layer_types == ("linear_attention",) * 3 + ("full_attention",)


@pytest.mark.parametrize(
    ("name", "extra", "scales"), [("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 4.0}, (3.0, 0.25)), ("Cohere", {"logit_scale": 0.5}, (1.0, 0.5))]
)
def test_scales_after_the_embedding_and_on_logits(name, extra, scales):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**SIZES, **extra})).eval()
    spec = read_spec(model, name, ())
    assert (spec.embed_scale, spec.logit_scale) == scales
    head = make_head(model, spec.logit_scale, spec.softcap)
    states, logits = own_states(model, torch.arange(9))
    check_close(states[0], head.embed[:9] * spec.embed_scale)
    check_close(head.logits(states[LAYERS]), logits)


def test_half_precision_targets():
    """Scale, offset and logits in bfloat16, as targets are served."""
    model = family("gemma3").model
    half = transformers.Gemma3ForCausalLM(model.config).to(torch.bfloat16).eval()
    half.load_state_dict({n: t.to(torch.bfloat16) for n, t in model.state_dict().items()})
    spec = read_spec(half, "half", ())
    assert (spec.embed_scale, spec.norm_offset) == (pytest.approx(math.sqrt(WIDTH)), 1.0)
    ids = family("gemma3").text[None]
    with torch.no_grad(), capture(half, ()) as states:
        logits = half(ids).logits
    torch.testing.assert_close(make_head(half, spec.logit_scale, spec.softcap).logits(states["last"]), logits.float(), atol=2e-2, rtol=2e-2)


def test_decoder_is_the_text_model():
    assert type(decoder(family("gemma3_nested").model)).__name__ == "Gemma3TextModel"
    assert type(decoder(family("gemma4_nested").model)).__name__ == "Gemma4TextModel"
    assert type(decoder(family("qwen3_5_moe_nested").model)).__name__ == "Qwen3_5MoeTextModel"
