"""A drafter for every family: a step of training lowers its loss, what it drafts leaves the text as it is, and where it may start from."""

from __future__ import annotations

import pytest
import torch
import transformers
from target_families import FAMILIES, LAYERS, PROMPT, SIZES, VOCABULARY, check_close, document, family
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout, eval_batches
from firesteel.decoding.decode import decode_speculative
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.build import make_config
from firesteel.drafters.init import init_from_target
from firesteel.drafters.session import BlockSession
from firesteel.errors import RecipeError
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import uniform_weights
from firesteel.stages.configure import target_facts
from firesteel.stages.extract import capture_documents
from firesteel.stages.runtime import FullVocabulary
from firesteel.target.head import make_head
from firesteel.target.local import LocalTarget
from firesteel.target.reader import PaddedReader
from firesteel.target.session import TargetSession
from firesteel.target.spec import read_spec, weights_checksum
from firesteel.training.data import BatchSource
from firesteel.training.optimizer import Optimizers
from firesteel.training.schedule import loss_weights
from firesteel.training.step import TrainJob, backward, compute_loss
from firesteel.training.tables import make_tables

IDS = (1, 2, LAYERS)
LOSS = recipes.Loss(ce=0.2, tv=0.8)


def new_drafter(target: LocalTarget, **settings: object) -> BlockDrafter:
    """As the train stage makes it: all sizes are the target's."""
    torch.manual_seed(0)
    wanted = recipes.Drafter(**{"num_layers": 1, "block_size": 4, "markov_rank": 4, **settings})
    return BlockDrafter(make_config(wanted, target_facts(target.spec), IDS, VOCABULARY - 1))


@pytest.mark.lossless
@pytest.mark.parametrize("name", FAMILIES)
def test_one_step_lowers_the_loss_and_the_drafter_changes_no_text(name, tmp_path):
    tiny = family(name)
    frozen = weights_checksum(tiny.model)
    layout = BlockLayout(4, True, uniform_weights(4, True), None)
    store = MemoryStore("fp32")
    for sample in capture_documents(tiny.local, PaddedReader(tiny.model, IDS), [document("a", tiny.text), document("b", tiny.text.flip(0))], IDS):
        store.put(sample)
    drafter = new_drafter(tiny.local)
    settings = recipes.Train(max_steps=1, lr=3e-3, precision="float32", compile=False)
    source = BatchSource(store, store.keys(), [len(tiny.text)] * 2, layout, batch_tokens=128, anchors=16, seed=0)
    job = TrainJob(drafter, make_tables(tiny.head, None), source, [], settings, LOSS, tmp_path, (), lambda _: None)
    (batch,) = eval_batches([store.get(k) for k in source.keys], 128, None, layout)
    weights, optimizers = loss_weights(LOSS, 1.0), Optimizers(drafter, settings)
    before = float(backward(job, batch, weights).loss.detach())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in drafter.parameters())
    optimizers.step()
    with torch.no_grad():
        after = float(compute_loss(job, batch, weights)[0].loss)
    assert after < before - 1e-3
    assert weights_checksum(tiny.model) == frozen

    text = tiny.text.tolist()
    session = FullVocabulary(BlockSession(drafter.eval(), tiny.head.embed, tiny.head.weight, draft_to_target=None, max_length=64))
    target = TargetSession(tiny.model, IDS, max_length=64)
    done = decode_speculative(target, session, text[:PROMPT], draft_tokens=4, max_new_tokens=len(text) - PROMPT, eos_ids=())
    assert done.tokens == text[PROMPT:]
    assert any(r.accepted < r.drafted for r in done.rounds), "no draft was ever rejected"


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
