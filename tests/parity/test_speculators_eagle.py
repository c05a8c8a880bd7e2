"""EAGLE-3 and P-EAGLE against speculators 0.9.0: the same weights and document give the same states, logits, loss and gradients.

The peer trains on every position of a document, so all of ours are anchors here. Its losses are means over the positions of a step
(EAGLE-3, times a decay) or over all elements (P-EAGLE), ours a sum with weights: the weights say the same. It lets chains of one document
run on into the next, which ours do not, so the comparison has one document.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_target import HIDDEN, VOCAB, facts, same_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.batches.batch import Batch
from firesteel.batches.packing import BlockLayout, pack
from firesteel.batches.vocab import DraftVocab
from firesteel.drafters.build import make_config
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.peagle import PEagleDrafter, chain_lengths
from firesteel.drafters.registry import get_spec
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import Head, LossWeights, Teacher
from firesteel.package.load import load
from firesteel.target.head import TargetHead
from firesteel.training.tables import make_tables

ROOT = Path(__file__).resolve().parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PEER_PYTHON.is_file(), reason="the peer's environment .venv-peers is not there: build it with `make bench-peers`"),
]

LAYERS, LENGTH, DECAY = (1, 3, 4), 23, 0.8


@dataclass
class Case:
    """A drafter and its loss (the peer's name -> weight)."""

    algorithm: str
    loss: dict[str, float] = field(default_factory=lambda: {"kl_div": 1.0})
    drafter: dict[str, Any] = field(default_factory=dict)
    eagle: dict[str, Any] = field(default_factory=dict)


CASES = {
    "eagle3": Case("eagle3"),
    "eagle3-qwen3": Case("eagle3", {"kl_div": 0.5, "tv": 0.5}, {"draft_vocab_size": 60}, {"layer_style": "qwen3", "fc_norm": True, "norm_output": True}),
    "eagle3-two-layers": Case("eagle3", {"tv": 1.0}, {"num_layers": 2}, {"norm_before_residual": False, "norm_before_fc": True}),
    "peagle": Case("peagle", eagle={"drop_ratio": 1.0}),
    "peagle-dropping": Case(
        "peagle", {"kl_div": 0.7, "rkl": 0.3}, {"num_layers": 2, "draft_vocab_size": 60}, {"layer_style": "qwen3", "drop_ratio": 0.7, "drop_floor": 0.2}
    ),
}


@dataclass
class Both:
    """What the two sides say about a case, our drafter and its vocabulary, and the checkpoint that the peer wrote of it."""

    peer: dict[str, Tensor]
    ours: dict[str, Tensor]
    drafter: nn.Module
    vocab: DraftVocab | None
    their_checkpoint: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    work = tmp_path_factory.mktemp("eagles")
    ours = {name: _ours(case, work / name) for name, case in CASES.items()}
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("peer_eagle.py")
    done = subprocess.run([str(PEER_PYTHON), str(script), *(str(work / n) for n in CASES)], env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Both(load_file(work / name / "peer.safetensors"), found, *rest, work / name / "theirs") for name, (found, *rest) in ours.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["hidden", "logits", "loss"])
def test_forward_agrees(both: dict[str, Both], name: str, what: str) -> None:
    peer, ours = both[name].peer[what], both[name].ours[what]
    torch.testing.assert_close(ours, peer, rtol=1e-5, atol=1e-5 * float(peer.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree(both: dict[str, Both], name: str) -> None:
    peer, ours = both[name].peer, both[name].ours
    names = {n for n in peer if n.startswith("grad.")}
    assert names == {n for n in ours if n.startswith("grad.")}
    for n in sorted(names):
        scale = float(peer[n].abs().max())
        assert scale > 0, f"{n}: the case does not reach this parameter"
        torch.testing.assert_close(ours[n], peer[n], rtol=1e-5, atol=1e-5 * scale, msg=lambda text, n=n: f"{n}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_we_open_the_peers_checkpoint(both: dict[str, Both], name: str) -> None:
    case = both[name]
    same_checkpoint(load(case.their_checkpoint), case.drafter, case.vocab)


def _ours(case: Case, folder: Path) -> tuple[dict[str, Tensor], nn.Module, DraftVocab | None]:
    """Our side of a case; leaves document, setting and weights in `folder` for the peer."""
    folder.mkdir()
    torch.manual_seed(7)
    steps = 4
    settings = recipes.Drafter(
        algorithm=case.algorithm, **{"num_layers": 1, "block_size": steps, **case.drafter}, eagle=recipes.Eagle.model_validate(case.eagle)
    )
    config = make_config(settings, facts(), LAYERS, 90)
    drafter: Any = get_spec(case.algorithm).build(config)
    with torch.no_grad():
        for parameter in drafter.parameters():  # no parameter may hide behind an initial 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    vocab = DraftVocab(torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values, VOCAB) if config.reduced_vocab else None
    norm = nn.RMSNorm(HIDDEN, eps=1e-5).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    head = TargetHead(norm, torch.randn(VOCAB, HIDDEN) * 0.4, 1.0, None, torch.randn(VOCAB, HIDDEN))
    tables = make_tables(head, vocab)
    last = torch.randn(LENGTH, HIDDEN) * 2
    mask = torch.ones(LENGTH, dtype=torch.bool)
    positions = predictable_positions(mask)
    sample = HiddenSample("d", torch.randint(0, VOCAB, (LENGTH,)), mask, torch.randn(LENGTH, len(LAYERS), HIDDEN), last[positions], positions, LAYERS, "tiny")
    batch = pack([sample], [torch.arange(1, LENGTH - 1)], BlockLayout(steps, True, torch.ones(steps), vocab))

    rows = drafter.training_rows(batch, tables.embed, tables.head)
    alive = (batch.slots >= 0) if rows.kept is None else (batch.slots >= 0) & rows.kept
    if case.algorithm == "eagle3":  # a mean for each step, times its decay
        weights, denominator = alive * DECAY ** torch.arange(steps) / alive.sum(0), 1.0
    else:
        weights, denominator = alive.float(), float(alive.sum())
    teacher = Teacher(tables.teacher_states(batch.target_last), tables.teacher_weight, tables.teacher_head)
    mix = LossWeights(kl=case.loss.get("kl_div", 0.0), tv=case.loss.get("tv", 0.0), reverse_kl=case.loss.get("rkl", 0.0))
    result = fused_loss(rows.pieces, Head(), teacher, batch.draft_labels, weights, batch.slot_target, mix, denominator=denominator)
    result.loss.backward()
    elements = _write(case, folder, drafter, config, batch, sample, last, tables, norm.weight, vocab)
    logits = (rows.pieces[0][0] @ rows.pieces[0][1].T).view(*batch.slots.shape, -1)
    chosen = (elements[:, 0], elements[:, 1])
    found = {"hidden": rows.z[chosen], "logits": logits[chosen], "loss": result.loss.reshape(1)}
    found |= {f"grad.{n}": p.grad for n, p in drafter.named_parameters() if p.grad is not None}
    return {name: value.detach() for name, value in found.items()}, drafter, vocab


def _write(
    case: Case,
    folder: Path,
    drafter: nn.Module,
    config: DraftConfig,
    batch: Batch,
    sample: HiddenSample,
    last: Tensor,
    tables: Any,
    norm: Tensor,
    vocab: DraftVocab | None,
) -> Tensor:
    """The peer's input; returns the elements `[E, 2]` (chain, depth) that both sides report. Chain n begins at pair n + 1, the peer's index n."""
    steps = config.block_size
    inside = batch.slots >= 0
    if isinstance(drafter, PEagleDrafter):
        lengths = chain_lengths(batch, float(config.extra["drop_ratio"]), float(config.extra["drop_floor"]))
        inside &= torch.arange(steps) < lengths[:, None]
    by_depth = inside.T.nonzero()  # the peer lists depth after depth
    elements = torch.stack([by_depth[:, 1], by_depth[:, 0]], dim=1)
    flags = {name: config.extra[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    layers = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    }
    setting = {
        "algorithm": case.algorithm,
        "layer_style": config.extra["layer_style"],
        "layers": layers,
        "flags": flags,
        "layer_ids": list(LAYERS),
        "steps": steps,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "loss": case.loss,
        "decay": DECAY,
    }
    (folder / "setting.json").write_text(json.dumps(setting))
    counted = torch.ones(LENGTH)
    counted[-1] = 0  # the peer counts a step by the state that the target's distribution comes from; the last one predicts nothing here
    data = {
        "token_ids": sample.token_ids,
        "loss_mask": counted,
        "aux": sample.aux.flatten(1),
        "last": last,
        "elements": elements,
        "embed": tables.embed,
        "head": tables.head,
        "norm": norm,
    }
    if vocab is not None:
        data |= {"t2d": vocab.t2d, "d2t": vocab.d2t}
    save_file({name: value.detach().clone().contiguous() for name, value in data.items()}, folder / "data.safetensors")
    save_file({name: value.clone().contiguous() for name, value in drafter.state_dict().items()}, folder / "weights.safetensors")
    return elements
