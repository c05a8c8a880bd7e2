"""A drafter for every family: a step of training lowers its loss, what it drafts leaves the text as it is, and where it may start from."""

from __future__ import annotations

import pytest
import torch
import transformers
from target_families import FAMILIES, SIZES, check_close, family
from target_training import learns_and_changes_no_text, new_drafter
from torch import Tensor, nn

from firesteel.drafters.init import init_from_target
from firesteel.errors import RecipeError
from firesteel.target.head import make_head
from firesteel.target.local import LocalTarget
from firesteel.target.spec import read_spec


@pytest.mark.lossless
@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_lowers_the_loss_and_the_drafter_changes_no_text(name, tmp_path):
    learns_and_changes_no_text(family(name), tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_starting_from_the_targets_layer(name):
    """Copied where a layer is of the drafter's kind; elsewhere refused by name, with the drafter left as it was."""
    tiny = family(name)
    drafter = new_drafter(tiny.local)
    before = {n: t.clone() for n, t in drafter.state_dict().items()}
    refusal = FAMILIES[name].copies
    layers = tiny.local.layer_weights(2, 1)
    if refusal is not None:
        with pytest.raises(RecipeError, match=refusal) as caught:
            init_from_target(drafter, layers, tiny.local.norm_weight, feature=1)
        assert "drafter.init=random" in str(caught.value)
        assert all(torch.equal(t, before[n]) for n, t in drafter.state_dict().items())
        return
    init_from_target(drafter, layers, tiny.local.norm_weight, feature=1)
    own = tiny.local.layers[2].state_dict()
    for n, t in own.items():
        assert torch.equal(drafter.state_dict()[f"layers.0.{n}"], t), n


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_the_recipe_names_the_activation_that_forbids_it(name):
    with pytest.raises(RecipeError, match="gelu_pytorch_tanh"):
        new_drafter(family(name).local, init="target")


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5_moe", "llama"])
def test_copied_norms_do_what_the_targets_norms_do(name):
    """`layer_weights` says what a plain RMSNorm must multiply by, whether or not the target adds 1 to it."""
    tiny = family(name)
    (weights,) = tiny.local.layer_weights(3, 1)
    layer, x = tiny.local.layers[3], torch.randn(5, SIZES["hidden_size"])
    plain = nn.RMSNorm(SIZES["hidden_size"], eps=tiny.spec.rms_norm_eps)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        plain.weight.data.copy_(weights[f"{norm}.weight"])
        check_close(plain(x), getattr(layer, norm)(x))
    head = nn.RMSNorm(8, eps=tiny.spec.rms_norm_eps)
    if name != "llama":
        head.weight.data.copy_(weights["self_attn.q_norm.weight"])
        y = torch.randn(3, 8)
        check_close(head(y), layer.self_attn.q_norm(y))
    assert torch.equal(weights["self_attn.v_proj.weight"], layer.self_attn.v_proj.weight)


def test_targets_whose_norms_are_no_rms_norms_cannot_be_copied():
    model = transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES)).eval()
    spec = read_spec(model, "cohere", ())
    assert spec.norm_offset is None
    target = LocalTarget(spec, model, None, make_head(model, spec.logit_scale, spec.softcap))
    for refused in (lambda: target.layer_weights(0, 1), lambda: target.norm_weight):
        with pytest.raises(RecipeError, match=r"not the RMSNorm.*"):
            refused()


def test_biases_of_projections_are_left_out_and_other_parts_refused():
    tiny = family("qwen3").local
    (weights,) = tiny.layer_weights(0, 1)

    def start(more: dict[str, Tensor]) -> None:
        init_from_target(new_drafter(tiny), [weights | more])

    start({"self_attn.q_proj.bias": torch.zeros(32)})
    for part in ("self_attn.sinks", "post_feedforward_layernorm.weight", "self_attn.g_proj.weight", "input_layernorm.bias"):
        with pytest.raises(RecipeError, match=part):
            start({part: torch.zeros(4)})
