"""DFlash2 against speculators 0.9.0: same weights and batch, same states, logits, candidates, scores, loss and gradients; checkpoints both ways."""

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
from firesteel.drafters.build import make_config
from firesteel.drafters.dflash2 import DFlash2Drafter
from firesteel.hidden.sample import HiddenSample, predictable_positions
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import exponential_weights
from firesteel.package.contract import make_contract
from firesteel.package.export import export
from firesteel.package.load import load
from firesteel.target.head import TargetHead
from firesteel.target.spec import TargetSpec
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

LAYERS, MASK_TOKEN, BLOCK = (1, 3, 4), 90, 8
LENGTHS = (23, 27)


@dataclass
class Case:
    """A drafter and a loss, said to both sides; `flags` are words for the peer's trainer, `supervised` tokens of each document from the start."""

    loss: dict[str, float]
    own: dict[str, Any]
    drafter: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, list[Any]] = field(default_factory=dict)
    supervised: tuple[int, int] = LENGTHS
    anchors: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 3, 4, 11, 14), (1, 2, 9, 18))


# With D-PACE the peer weighs the selector's loss by the selector's own probabilities, ours takes the slots' one weight for both: not compared.
# About sampling from the anchor and sliding windows see test_speculators_dspark.py: the same holds here.
CASES = {
    "plain": Case({"ce": 0.4, "tv": 0.6}, {"kernel": 2, "group": 8, "rank": 6, "top_k": 5}, supervised=(16, 22), anchors=((0, 3, 11, 14), (1, 9, 17, 18))),
    "anchor-three-taps": Case(
        {"ce": 0.0, "tv": 0.0, "kl": 1.0},
        {"kernel": 3, "group": 16, "rank": 9, "top_k": 3, "selector_loss": 0.5},
        {"sample_from_anchor": True},
        {"--loss-fn": ['{"kl_div": 1.0}'], "--selector-loss-alpha": [0.5, "--sample-from-anchor"]},
    ),
    "sliding": Case(
        {"ce": 1.0, "tv": 0.0},
        {"kernel": 2, "group": 1, "rank": 4, "top_k": 16},
        {"attention": "sliding", "sliding_window": 64},
        {"--loss-fn": ["ce"], "--sliding-window": [64], "--full-attention-indices": []},
    ),
}


@dataclass
class Both:
    """What the two sides say about each case, what the peer says of our checkpoint, and the first case's checkpoint as each wrote it."""

    peer: dict[str, dict[str, Tensor]]
    ours: dict[str, dict[str, Tensor]]
    said: dict[str, Any]
    our_checkpoint: Path
    their_checkpoint: Path
    drafter: DFlash2Drafter


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    work = tmp_path_factory.mktemp("dflash2")
    target = save_target(work / "target")
    sides = {name: _ours(case, work / name, work / "target", target) for name, case in CASES.items()}
    drafter = sides["plain"][0]
    _export(work / "ours", drafter)
    paths = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers"), str(ROOT / "tests" / "package")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [str(PEER_PYTHON), str(Path(__file__).with_name("peer_dflash2.py")), str(work / "ours"), str(work / "theirs"), *(str(work / n) for n in CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(next(line.removeprefix("PEER ") for line in done.stdout.splitlines() if line.startswith("PEER ")))
    peer = {name: load_file(work / name / "peer.safetensors") for name in CASES}
    return Both(peer, {name: side[1] for name, side in sides.items()}, said, work / "ours", work / "theirs", drafter)


@pytest.mark.parametrize("name", CASES)
def test_slots_and_candidates_are_the_same(both: Both, name: str) -> None:
    peer, ours = both.peer[name], both.ours[name]
    mask = ours["mask"].bool()
    assert torch.equal(peer["mask"].bool(), mask)
    assert 20 < int(mask.sum()) <= mask.numel()
    assert torch.equal(peer["candidates"][mask], ours["candidates"][mask].float())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["hidden", "logits", "targets", "scores", "loss"])
def test_forward_agrees(both: Both, name: str, what: str) -> None:
    peer, ours = both.peer[name], both.ours[name]
    valid = ours["mask"].bool() if what in ("targets", "scores") else slice(None)
    expected, found = peer[what][valid], ours[what][valid]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree(both: Both, name: str) -> None:
    peer, ours = both.peer[name], both.ours[name]
    names = {n for n in peer if n.startswith("grad.")}
    assert names == {n for n in ours if n.startswith("grad.")}
    for n in sorted(names):
        scale = float(peer[n].abs().max())
        assert scale > 0, f"{n}: the case does not reach this parameter"
        torch.testing.assert_close(ours[n], peer[n], rtol=1e-5, atol=1e-5 * scale, msg=lambda text, n=n: f"{n}: {text}")


def test_the_peer_opens_our_checkpoint_strictly(both: Both) -> None:
    said, written = both.said, json.loads((both.our_checkpoint / "config.json").read_text())
    assert said["class"] == "DFlash2DraftModel"
    assert all(not found for found in said["loading"].values()), said["loading"]
    assert said["lacking"] == said["different"] == []
    written.pop("transformer_layer_config")
    assert {name: said["config"][name] for name in written} == written
    assert said["non_causal"] is True


def test_we_open_the_peers_checkpoint(both: Both) -> None:
    same_checkpoint(load(both.their_checkpoint), both.drafter)


def _ours(case: Case, folder: Path, target: Path, head: TargetHead) -> tuple[DFlash2Drafter, dict[str, Tensor]]:
    """Our side of a case; leaves batch, setting and weights in `folder` for the peer."""
    folder.mkdir()
    torch.manual_seed(7)
    wanted = recipes.Drafter(algorithm="dflash2", num_layers=2, block_size=BLOCK, dflash2=recipes.DFlash2(**case.own), **case.drafter)
    drafter = DFlash2Drafter(make_config(wanted, facts(), LAYERS, MASK_TOKEN))
    with torch.no_grad():
        for parameter in drafter.parameters():  # no parameter may hide behind an initial 0 or 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    anchored = drafter.config.sample_from_anchor
    samples = [_sample(length, supervised, head) for length, supervised in zip(LENGTHS, case.supervised, strict=True)]
    loss = recipes.Loss(**case.loss)
    layout = BlockLayout(BLOCK, anchored, exponential_weights(BLOCK, anchored, loss.decay), None)
    batch = pack([s for s, _ in samples], [torch.tensor(a) for a in case.anchors], layout)
    _write(case, folder, target, drafter, samples, batch.anchors)

    tables, store = make_tables(head, None), MemoryStore("fp32")
    for sample, _ in samples:
        store.put(sample)
    source = BatchSource(store, store.keys(), list(LENGTHS), layout, batch_tokens=64, anchors=8, seed=0)
    job = TrainJob(drafter, tables, source, [], recipes.Train(max_steps=1, compile=False), loss, folder, (), lambda _: None)
    # The peer divides by the number of slots that count, we by the sum of their weights.
    result, _ = compute_loss(job, batch, loss_weights(loss, 1.0), denominator=float((batch.slots >= 0).sum()))
    result.loss.backward()
    with torch.no_grad():
        z = drafter.states(batch, tables.embed)
        logits = z @ tables.head.T
        candidates = logits.topk(drafter.candidate_selector.top_k).indices
        missing = (candidates != batch.draft_labels[..., None]).all(-1)
        candidates[..., -1] = torch.where(missing, batch.draft_labels, candidates[..., -1]).clamp(min=0)
        bonus = drafter.candidate_selector.bonus(z.flatten(0, 1), batch.previous_tokens(anchored).flatten(), candidates.flatten(0, 1))
    assert int((missing & (batch.slots >= 0)).sum()) > 3
    found = {
        "hidden": z,
        "logits": logits,
        "targets": head.logits(batch.target_last)[batch.slot_target.clamp(min=0)],
        "candidates": candidates,
        "scores": logits.gather(-1, candidates) + bonus.view_as(candidates),
        "mask": batch.slots >= 0,
        "loss": result.loss.reshape(1),
        **{f"grad.{n}": p.grad for n, p in drafter.named_parameters() if p.grad is not None},
    }
    return drafter, {name: value.detach() for name, value in found.items()}


def _sample(length: int, supervised: int, head: TargetHead) -> tuple[HiddenSample, Tensor]:
    """A document whose every token is the target's first choice (the peer's losses know no other), and its last states `[T, d]`."""
    last = torch.randn(length, HIDDEN) * 2
    token_ids = torch.cat([torch.tensor([3]), head.logits(last).argmax(-1)[:-1]])
    mask = torch.arange(length) < supervised
    positions = predictable_positions(mask)
    sample = HiddenSample(f"d{length}", token_ids, mask, torch.randn(length, len(LAYERS), HIDDEN), last[positions], positions, LAYERS, "tiny")
    return sample, last


def _write(case: Case, folder: Path, target: Path, drafter: DFlash2Drafter, samples: list[tuple[HiddenSample, Tensor]], anchors: Tensor) -> None:
    own = {"kernel": "--conv-kernel-size", "group": "--conv-group-size", "rank": "--selector-rank", "top_k": "--selector-top-k"}
    setting = {
        "algorithm": "dflash2",
        "target": str(target),
        "tokens": sum(LENGTHS),
        "anchors": len(anchors),
        "num_layers": 2,
        "block_size": BLOCK,
        "layer_ids": list(LAYERS),
        "mask_token_id": MASK_TOKEN,
        "loss": case.loss,
        "seed": 0,
        "flags": {flag: [case.own[name]] for name, flag in own.items()} | case.flags,
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


def _export(folder: Path, drafter: DFlash2Drafter) -> None:
    spec = TargetSpec(
        name="pypi:tiny",  # a name that means nothing to the peer, so that it does not go looking for weights
        architecture="LlamaForCausalLM",
        model_type="llama",
        softcap=None,
        logit_scale=1.0,
        eos_ids=(1,),
        fingerprint="0123456789abcdef",
        **vars(facts()),
    )
    contract = make_contract(drafter.config, spec, template_options={}, temperatures=(), promise=None, speculative_tokens=drafter.config.num_drafts)
    export(folder, drafter.state_dict(), drafter.config, contract, target_ids=None, head_rows=None, dtype=torch.float32)
