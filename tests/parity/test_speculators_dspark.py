"""Firesteel's drafters and losses against those of speculators 0.9.0, for the same weights and batches.

The peer runs in an environment of its own (`make bench-peers` builds it): a process gets weights and batches as files and
answers with hidden states, logits, loss and gradients.
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
from parity_target import HIDDEN, facts, same_checkpoint, save_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout, pack
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.build import make_config
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import exponential_weights, uniform_weights
from firesteel.package.load import load
from firesteel.target.head import TargetHead
from firesteel.training.data import BatchSource
from firesteel.training.schedule import loss_weights
from firesteel.training.step import TrainJob, compute_loss
from firesteel.training.tables import make_tables

ROOT = Path(__file__).resolve().parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PEER_PYTHON.is_file(), reason="the peer's environment .venv-peers is not there: build it with `make bench-peers`"),
]

LAYERS, MASK_TOKEN = (1, 3, 4), 90
LENGTHS = (23, 27)


@dataclass
class Case:
    """A drafter and a loss, said to both sides.

    `flags` are options of the peer's trainer; `supervised` is how many tokens of each document are supervised, from the start.
    """

    algorithm: str
    loss: dict[str, float]
    drafter: dict[str, Any] = field(default_factory=dict)
    position_weights: str = "exponential"
    flags: dict[str, list[Any]] = field(default_factory=dict)
    supervised: tuple[int, int] = LENGTHS
    anchors: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 3, 4, 11, 14), (1, 2, 9, 18))


# A DSpark block of the peer counts slot k where token k of the block is supervised, though it predicts token k + 1: at the
# end of supervised text it trains on one token too many, ours does not. So DSpark's cases supervise everything and keep their
# blocks inside a document; DFlash's slots predict their own token, and one case ends in the middle of blocks.
# A sliding window of the peer reaches back from the anchor for all slots of a block, ours from each slot, as vLLM serves it. So the
# window of the sliding case is longer than the documents: what is compared is that its layers are causal within a block.
CASES = {
    "dspark": Case("dspark", {"ce": 0.1, "tv": 0.9, "confidence": 1.0}),
    "dspark-gated": Case(
        "dspark",
        {"ce": 0.0, "tv": 0.0, "kl": 0.5, "reverse_kl": 0.3, "jsd": 0.2, "confidence": 0.7},
        {"markov_head": "gated"},
        flags={"--loss-fn": ['{"kl_div": 0.5, "rkl": 0.3, "jsd": 0.2}'], "--markov-head-type": ["gated"]},
    ),
    "dspark-rnn": Case("dspark", {"ce": 0.1, "tv": 0.9, "confidence": 1.0}, {"markov_head": "rnn"}, flags={"--markov-head-type": ["rnn"]}),
    "dspark-sliding": Case(
        "dspark",
        {"ce": 0.1, "tv": 0.9, "confidence": 1.0},
        {"attention": "sliding", "sliding_window": 64, "causal": True},
        flags={"--sliding-window": [64], "--full-attention-indices": []},
    ),
    "dflash": Case("dflash", {"ce": 0.4, "tv": 0.6, "confidence": 0.0}, supervised=(16, 22), anchors=((0, 3, 11, 14), (1, 9, 17, 18))),
    "dflash-dpace": Case(
        "dflash", {"ce": 1.0, "tv": 0.0, "confidence": 0.0}, position_weights="dpace", flags={"--loss-fn": ["ce"], "--per-position-loss-weight": ["dpace"]}
    ),
}


@dataclass
class Both:
    """What the two sides say about a case, our drafter, and the checkpoint that the peer wrote of it."""

    peer: dict[str, Tensor]
    ours: dict[str, Tensor]
    drafter: BlockDrafter
    their_checkpoint: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetHead]:
    folder = tmp_path_factory.mktemp("target")
    return folder, save_target(folder)


@pytest.fixture(scope="module")
def both(target: tuple[Path, TargetHead], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    folder, head = target
    work = tmp_path_factory.mktemp("cases")
    ours = {name: _ours(case, work / name, folder, head) for name, case in CASES.items()}
    paths = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("peer_forward.py")
    done = subprocess.run([str(PEER_PYTHON), str(script), *(str(work / name) for name in CASES)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Both(load_file(work / name / "peer.safetensors"), found, drafter, work / name / "theirs") for name, (drafter, found) in ours.items()}


@pytest.mark.parametrize("name", CASES)
def test_slots_that_count_are_the_same(both: dict[str, Both], name: str) -> None:
    peer, ours = both[name].peer["mask"].bool(), both[name].ours["mask"].bool()
    assert torch.equal(peer, ours)
    assert 20 < int(ours.sum()) <= ours.numel()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["hidden", "logits", "targets", "confidence", "loss"])
def test_forward_agrees(both: dict[str, Both], name: str, what: str) -> None:
    peer, ours = both[name].peer, both[name].ours
    if what == "confidence" and CASES[name].algorithm == "dflash":
        assert what not in peer
        assert what not in ours
        return
    valid = ours["mask"].bool() if what in ("targets", "confidence") else slice(None)
    expected, found = peer[what][valid], ours[what][valid]
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * scale)


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
    same_checkpoint(load(case.their_checkpoint), case.drafter)


def _ours(case: Case, folder: Path, target: Path, head: TargetHead) -> tuple[BlockDrafter, dict[str, Tensor]]:
    """Our side of a case; leaves the batch, the setting and the weights in `folder` for the peer."""
    folder.mkdir()
    torch.manual_seed(7)
    block = 8
    wanted = recipes.Drafter(algorithm=case.algorithm, num_layers=2, block_size=block, markov_rank=6, **{"attention": "full", **case.drafter})
    drafter = BlockDrafter(make_config(wanted, facts(), LAYERS, MASK_TOKEN))
    with torch.no_grad():
        for parameter in drafter.parameters():  # no parameter may hide behind an initial 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    config = drafter.config
    samples = [_sample(length, supervised, head) for length, supervised in zip(LENGTHS, case.supervised, strict=True)]
    loss = recipes.Loss(**case.loss, position_weights=case.position_weights)
    anchored = config.sample_from_anchor
    weights = uniform_weights(block, anchored) if case.position_weights == "dpace" else exponential_weights(block, anchored, loss.decay)
    layout = BlockLayout(block, anchored, weights, None)
    batch = pack([s for s, _ in samples], [torch.tensor(a) for a in case.anchors], layout)
    _write(case, folder, target, drafter, samples, batch.anchors)

    tables = make_tables(head, None)
    store = MemoryStore("fp32")
    for sample, _ in samples:
        store.put(sample)
    source = BatchSource(store, store.keys(), list(LENGTHS), layout, batch_tokens=64, anchors=8, seed=0)
    job = TrainJob(drafter, tables, source, [], recipes.Train(max_steps=1, compile=False), loss, folder, (), lambda _: None)
    # The peer divides by the number of slots that count, we by the sum of their weights.
    result, confidence = compute_loss(job, batch, loss_weights(loss, 1.0), denominator=float((batch.slots >= 0).sum()))
    result.loss.backward()
    rows = drafter.training_rows(batch, tables.embed, tables.head)
    shape = (len(batch.anchors), block)
    logits = torch.stack([r @ w.T for r, w in rows.pieces]).sum(0)
    found = {
        "hidden": rows.pieces[0][0].reshape(*shape, -1),
        "logits": logits.reshape(*shape, -1),
        "targets": head.logits(batch.target_last)[batch.slot_target.clamp(min=0)],
        "mask": batch.slots >= 0,
        "loss": result.loss.reshape(1),
        **{f"grad.{n}": p.grad for n, p in drafter.named_parameters() if p.grad is not None},
    }
    if confidence is not None:
        found["confidence"] = confidence
    return drafter, {name: value.detach() for name, value in found.items()}


def _sample(length: int, supervised: int, head: TargetHead) -> tuple[HiddenSample, Tensor]:
    """A document whose every token is the target's first choice (the peer's cross entropy knows no other), and its last states `[T, d]`."""
    last = torch.randn(length, HIDDEN) * 2
    token_ids = torch.cat([torch.tensor([3]), head.logits(last).argmax(-1)[:-1]])
    mask = torch.arange(length) < supervised
    positions = predictable_positions(mask)
    sample = HiddenSample(f"d{length}", token_ids, mask, torch.randn(length, len(LAYERS), HIDDEN), last[positions], positions, LAYERS, "tiny")
    return sample, last


def _write(case: Case, folder: Path, target: Path, drafter: BlockDrafter, samples: list[tuple[HiddenSample, Tensor]], anchors: Tensor) -> None:
    setting = {
        "algorithm": case.algorithm,
        "target": str(target),
        "tokens": sum(LENGTHS),
        "anchors": len(anchors),
        "num_layers": 2,
        "block_size": 8,
        "layer_ids": list(LAYERS),
        "markov_rank": 6,
        "mask_token_id": MASK_TOKEN,
        "loss": case.loss,
        "seed": 0,
        "flags": case.flags,
    }
    batch = {
        "token_ids": torch.cat([s.token_ids for s, _ in samples]),
        "loss_mask": torch.cat([s.loss_mask for s, _ in samples]),
        "aux": torch.cat([s.aux for s, _ in samples]),
        "last": torch.cat([last for _, last in samples]),
        "lengths": torch.tensor(LENGTHS),
        "anchors": anchors,
    }
    (folder / "setting.json").write_text(json.dumps(setting))
    save_file(batch, folder / "batch.safetensors")
    save_file({k: v.clone().contiguous() for k, v in drafter.state_dict().items()}, folder / "weights.safetensors")
