"""What every target's drafter must do: learn in one step, and change no text that the target would write."""

from __future__ import annotations

from pathlib import Path

import torch
from target_families import LAYERS, PROMPT, VOCABULARY, Tiny, document

from firesteel import recipe as recipes
from firesteel.batches.packing import BlockLayout, eval_batches
from firesteel.decoding.decode import decode_speculative
from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.build import make_config
from firesteel.drafters.session import BlockSession
from firesteel.hidden.stores import MemoryStore
from firesteel.losses.weights import uniform_weights
from firesteel.stages.configure import target_facts
from firesteel.stages.extract import capture_documents
from firesteel.stages.runtime import FullVocabulary
from firesteel.target.local import LocalTarget
from firesteel.target.reader import PaddedReader
from firesteel.target.session import TargetSession
from firesteel.target.spec import weights_checksum
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


def learns_and_changes_no_text(tiny: Tiny, folder: Path) -> None:
    """One step of training lowers the loss and leaves the target alone; what the drafter drafts leaves the greedy text as it is, with drafts rejected."""
    frozen = weights_checksum(tiny.model)
    layout = BlockLayout(4, True, uniform_weights(4, True), None)
    store = MemoryStore("fp32")
    for sample in capture_documents(tiny.local, PaddedReader(tiny.model, IDS), [document("a", tiny.text), document("b", tiny.text.flip(0))], IDS):
        store.put(sample)
    drafter = new_drafter(tiny.local)
    settings = recipes.Train(max_steps=1, lr=3e-3, precision="float32", compile=False)
    source = BatchSource(store, store.keys(), [len(tiny.text)] * 2, layout, batch_tokens=128, anchors=16, seed=0)
    job = TrainJob(drafter, make_tables(tiny.head, None), source, [], settings, LOSS, folder, (), lambda _: None)
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
