"""MTP heads against speculators 0.9.0: the peer's own converter reads our native tensors, and its model says the same of a document.

Two things differ on purpose, since ours trains what vLLM serves:
- From step 2 on the peer is a plain causal pass over its own step (the keys of earlier positions are those of the same step, and positions do
  not move on); ours sees the earlier positions as step 1 made them, and its own chain. Step 1 is the same. The peer's rule, written
  out densely over our parts, agrees in all steps: nothing else differs.
- The peer's data hands over the target's states before the final norm, vLLM those after it. Here both get the states after it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config

from firesteel.batches.batch import Batch
from firesteel.batches.packing import BlockLayout, pack
from firesteel.drafters.config import FULL, DraftConfig
from firesteel.drafters.mtp_format import adapt_to_target, mtp_decay, native_names, native_tensor
from firesteel.drafters.registry import get_spec
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import Head, LossWeights, Teacher
from firesteel.losses.weights import exponential_weights

ROOT = Path(__file__).resolve().parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PEER_PYTHON.is_file(), reason="the peer's environment .venv-peers is not there: build it with `make bench-peers`"),
]

VOCAB, WIDTH, LENGTH, LAYERS, BETA = 61, 32, 21, 4, 0.6
ROPE = {"rope_type": "default", "rope_theta": 2e4}
MROPE = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
TARGETS = {
    "qwen3": Qwen3Config(**SIZES, intermediate_size=48, rope_parameters=ROPE),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, intermediate_size=48, rope_parameters=MROPE),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, rope_parameters=MROPE),
}
CASES = [(name, steps) for name in TARGETS for steps in (1, 3)]
ONE_STEP = [case for case in CASES if case[1] == 1]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Tensor]]:
    work = tmp_path_factory.mktemp("mtp")
    folders = {case: work / f"{case[0]}-{case[1]}" for case in CASES}
    for (name, steps), folder in folders.items():
        drafter, batch, embed, head = made(name, steps)
        TARGETS[name].save_pretrained(folder)
        state = drafter.state_dict()
        native = {n: found[1].clone().contiguous() for n in native_names(state) if (found := native_tensor(n, state)) is not None}
        save_file(native, folder / "model.safetensors")
        data = {"token_ids": batch.token_ids, "states": drafter.features(batch.context).detach(), "embed": embed, "head": head}
        save_file(data, folder / "data.safetensors")
        (folder / "setting.json").write_text(json.dumps({"steps": steps, "beta": BETA}))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    script = Path(__file__).with_name("peer_mtp.py")
    done = subprocess.run([str(PEER_PYTHON), str(script), *map(str, folders.values())], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: load_file(folder / "peer.safetensors") for case, folder in folders.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_one_agrees(peer: dict[tuple[str, int], dict[str, Tensor]], case: tuple[str, int]) -> None:
    drafter, batch, embed, head = made(*case)
    z = drafter.training_rows(batch, embed, head).z[:, 0].detach()
    close(z, peer[case]["hidden"][0])
    close(z @ head.T, peer[case]["logits"][0])


@pytest.mark.parametrize("case", ONE_STEP, ids=str)
def test_loss_and_gradients_of_one_step_agree(peer: dict[tuple[str, int], dict[str, Tensor]], case: tuple[str, int]) -> None:
    drafter, batch, embed, head = made(*case)
    rows = drafter.training_rows(batch, embed, head)
    teacher = Teacher(batch.target_last, head, Head(), batch.target_lognorm)
    weights = LossWeights(ce=1.0, tv=0.0, kl=0.0, reverse_kl=0.0, jsd=0.0, confidence=0.0)
    result = fused_loss(rows.pieces, Head(), teacher, batch.draft_labels, batch.weights, batch.slot_target, weights, None)
    result.loss.backward()
    same_loss_and_gradients(drafter, result.loss, peer[case])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peers_rule_over_our_parts_agrees_in_all_steps(peer: dict[tuple[str, int], dict[str, Tensor]], case: tuple[str, int]) -> None:
    drafter, batch, embed, head = made(*case)
    states = plain_causal(drafter, batch, embed)
    close(states.detach(), peer[case]["hidden"])
    steps, width = states.shape[:2]
    shares = exponential_weights(steps, True, mtp_decay(drafter.config))
    tokens = batch.token_ids
    losses = torch.stack([F.cross_entropy(states[k] @ head.T, tokens[k + 2 : k + 2 + width]) for k in range(steps)])
    loss = (losses * shares / shares.sum()).sum()
    loss.backward()
    same_loss_and_gradients(drafter, loss, peer[case])
    if steps > 1:
        ours = drafter.training_rows(batch, embed, head).z.transpose(0, 1).detach()
        off = [float((ours[k] - states[k].detach()).abs().max() / states[k].detach().abs().max()) for k in range(steps)]
        assert off[0] < 1e-5
        assert min(off[1:]) > 0.05, "the two rules would be one"


def made(name: str, steps: int) -> tuple[Any, Batch, Tensor, Tensor]:
    """A head in which every parameter matters, and one document with every position an anchor that the peer trains on."""
    torch.manual_seed(3)
    plain = DraftConfig(
        algorithm="mtp",
        hidden_size=WIDTH,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        target_hidden_size=WIDTH,
        layer_ids=(LAYERS,),
        block_size=steps,
        mask_token_id=None,
        sample_from_anchor=True,
        layer_types=(FULL,),
        causal=True,
        extra={"beta": BETA, "norm_output": True},
    )
    config = adapt_to_target(plain, TARGETS[name].to_dict(), LAYERS)
    drafter: Any = get_spec("mtp").build(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim < 2 else 0.2))
    tokens, last = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, WIDTH)
    mask = torch.ones(LENGTH, dtype=torch.bool)
    positions = predictable_positions(mask)
    sample = HiddenSample("d", tokens, mask, last[:, None], last[positions], positions, (LAYERS,), "tiny")
    layout = BlockLayout(steps, True, exponential_weights(steps, True, mtp_decay(config)), None)
    batch = pack([sample], [torch.arange(1, LENGTH - steps)], layout)
    return drafter, batch, torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH) * 0.4


def plain_causal(drafter: Any, batch: Batch, embed: Tensor) -> Tensor:
    """The peer's rule: each step is a causal pass over the whole document, states `[K, P, h]`."""
    layer, steps = drafter.layer, drafter.config.block_size
    width = LENGTH - steps - 1
    table = drafter.rope.table(torch.arange(width) + 1, torch.float32)
    current, found = drafter.features(batch.context), []
    for step in range(steps):
        x = drafter.join(embed[batch.token_ids[step + 1 : step + 1 + width]], current[:width])
        y = layer.enter(x)
        q, gate = layer.queries(y, table)
        k, v = layer.keys_values(y, table)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        current = layer.norm(drafter.mtp.norm, layer.leave(x, mixed, gate))
        found.append(current)
    return torch.stack(found)


def same_loss_and_gradients(drafter: Any, loss: Tensor, theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(loss.detach().reshape(1), theirs["loss"], rtol=1e-5, atol=0)
    names = {"fc": "input_proj", "norm": "final_layernorm", "pre_fc_norm_hidden": "hidden_layernorm", "pre_fc_norm_embedding": "token_layernorm"}
    ours = {}
    for name, p in drafter.mtp.named_parameters():
        first, _, rest = name.partition(".")
        ours[f"grad.mtp_layers.0.{names[first]}.{rest}" if first in names else f"grad.mtp_{name}"] = p.grad
    assert ours.keys() == {n for n in theirs if n.startswith("grad.")}
    for name, gradient in ours.items():
        assert float(theirs[name].abs().max()) > 0, f"{name}: the case does not reach this parameter"
        close(gradient, theirs[name], name)


def close(found: Tensor, wanted: Tensor, what: str = "") -> None:
    """Equal up to 1e-5 of the largest value."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()), msg=lambda m: f"{what}: {m}")
