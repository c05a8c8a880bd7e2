"""Stage `train`: the drafter learns; with `evaluate.compare`, others on the same data and budget beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from firesteel.artifact import Artifact, ArtifactWriter, write_atomic
from firesteel.batches.packing import BlockLayout
from firesteel.batches.vocab import DraftVocab, build_vocab, count_supervised
from firesteel.drafters.build import draft_vocab_size
from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.errors import RecipeError, TrainingError
from firesteel.hidden.feed import SampleFeed
from firesteel.hidden.stores import HiddenStore
from firesteel.losses.weights import exponential_weights, uniform_weights
from firesteel.package.load import LoadedDraft
from firesteel.recipe import Drafter
from firesteel.stages import extract, stream
from firesteel.stages import prompts as prompts_stage
from firesteel.stages.configure import algorithms, begin_as_target, configure, start_from_target
from firesteel.stages.extract import Listed
from firesteel.stages.line import Line
from firesteel.stages.warm import begin, warm_described, warm_key
from firesteel.training.checkpoint import BEST, STATE, load_best
from firesteel.training.data import BatchSource, held_out_batches
from firesteel.training.events import JOURNAL
from firesteel.training.journal import journal
from firesteel.training.loop import run_validation, train
from firesteel.training.replica import load_whole_state
from firesteel.training.status import STATUS
from firesteel.training.step import TrainJob
from firesteel.training.tables import make_tables

NAME = "train"
_CONFIG, _VOCAB = "drafter.json", "vocab.json"


def artifact_name(line: Line, algorithm: str) -> str:
    """The headline drafter's artifact is `train`; others carry their name."""
    return NAME if algorithm == line.recipe.drafter.algorithm else f"{NAME}-{algorithm}"


def run(line: Line, only: str | None = None) -> list[Artifact]:
    """Train every drafter that the recipe asks for, or `only` one of them: each has an artifact of its own, so several processes can share the work."""
    chosen = algorithms(line)
    if only is not None:
        if only not in chosen:
            raise RecipeError(f"--only={only}: the recipe trains {', '.join(chosen)}", mend="name one of these, or add it to evaluate.compare")
        chosen = [only]
    for algorithm in chosen:
        if line.world.context > 1 and not get_spec(algorithm).shares_context:
            raise RecipeError(
                f"train.context_ranks={line.world.context}: {algorithm} does not train on parts of a batch, only drafters of blocks do",
                mend="set train.context_ranks=1",
            )
    hidden = extract.open_hidden(line)
    # Reading every sample takes as long as the disk does: once for all drafters, and only if one has a reduced vocabulary.
    counts = cache(lambda: line.world.tell(_counts(line, hidden) if line.world.first else torch.empty(0)))
    return [_run_one(line, hidden, a, counts) for a in chosen]


@dataclass
class Trained:
    """A finished training run: configuration, vocabulary and a drafter with the best weights."""

    config: DraftConfig
    vocab: DraftVocab | None
    drafter: nn.Module
    summary: dict[str, Any]


def load_trained(line: Line, algorithm: str, artifact: Artifact | None = None) -> Trained:
    """Open a committed training artifact."""
    artifact = artifact or line.input(artifact_name(line, algorithm))
    data = json.loads((artifact / _CONFIG).read_text())
    config = DraftConfig(**{**data, "layer_ids": tuple(data["layer_ids"]), "layer_types": tuple(data["layer_types"])})
    ids = json.loads((artifact / _VOCAB).read_text())
    vocab = None if ids is None else DraftVocab(torch.tensor(ids), config.vocab_size)
    drafter = get_spec(algorithm).build(config)
    drafter.load_state_dict(load_best(artifact.path))
    return Trained(config, vocab, drafter.eval(), artifact.manifest.about)


def make_job(
    line: Line, folder: Any, config: DraftConfig, vocab: DraftVocab | None, hidden: Artifact, on_step: Any, *, tokens: int, init: str = "random"
) -> TrainJob:
    """A training job over the stored states; `tokens` bounds the held-out documents. The drafter starts from the target with `init=target`.

    Whoever gets it closes its source.
    """
    recipe = line.recipe
    streamed = recipe.hidden.store == "stream"
    store: HiddenStore | SampleFeed = stream.open_feed(line, stream.works(line, hidden, "train")) if streamed else extract.open_store(line, hidden)
    layout = BlockLayout(config.block_size, config.sample_from_anchor, _slot_weights(line, config), vocab)
    listed = extract.read_index(hidden, "train")
    source = BatchSource(
        store,
        [d.key for d in listed],
        [d.tokens for d in listed],
        layout,
        batch_tokens=recipe.train.batch_tokens,
        anchors=recipe.train.anchors,
        seed=recipe.seed,
    )
    source.stop = stream.last_batch(recipe.train, source.per_epoch, line.world.data_size)
    keys = [d.key for d in take(extract.read_index(hidden, "validation"), tokens)]
    with ExitStack() as stack:
        stack.callback(source.close)
        held_out = held_out_batches(stream.held_samples(line, hidden, store, keys), keys, layout, batch_tokens=recipe.train.batch_tokens)
        torch.manual_seed(recipe.seed)
        drafter = get_spec(config.algorithm).build(config).to(line.target.device)
        if init == "target":
            start_from_target(line, drafter, config, held_out)
        job = TrainJob(
            drafter,
            make_tables(line.target.head, vocab),
            source,
            held_out,
            recipe.train,
            recipe.loss,
            folder,
            line.target.spec.eos_ids,
            on_step,
            line.world,
            watch=recipe.watch,
        )
        stack.pop_all()
    return job


def take(listed: list[Listed], tokens: int) -> list[Listed]:
    """Documents from all domains in turn until they hold `tokens` tokens (at least one)."""
    by_domain: dict[str, list[Listed]] = {}
    for d in listed:
        by_domain.setdefault(d.domain, []).append(d)
    turns = [[members[i] for members in by_domain.values() if i < len(members)] for i in range(max(map(len, by_domain.values())))]
    chosen: list[Listed] = []
    for d in (d for turn in turns for d in turn):
        if chosen and sum(c.tokens for c in chosen) + d.tokens > tokens:
            break
        chosen.append(d)
    return chosen


def _run_one(line: Line, hidden: Artifact, algorithm: str, counts: Callable[[], torch.Tensor]) -> Artifact:
    recipe, drafter = line.recipe, line.recipe.drafter_of(algorithm)
    settings = {
        "drafter": {**drafter.model_dump(), "init": warm_key(drafter), **_vocab_key(line, drafter)},
        "loss": recipe.loss.model_dump(),
        "train": recipe.train.model_dump(exclude={"checkpoint_minutes", "compile", "parallel", "context_ranks"}),
        "seed": recipe.seed,
        "target": prompts_stage.target_settings(line),
    }
    name = artifact_name(line, algorithm)
    return line.stage(name, settings, {"hidden": hidden.manifest.content}, lambda writer: _make(line, writer, hidden, algorithm, counts), drop=(STATE, STATUS))


def _make(line: Line, writer: ArtifactWriter, hidden: Artifact, algorithm: str, counts: Callable[[], torch.Tensor]) -> dict[str, Any]:
    recipe, target = line.recipe, line.target
    settings = recipe.drafter_of(algorithm)
    config, warm = configure(line, algorithm)
    vocab = _draft_vocab(line, settings, config, warm, counts)
    frozen = target.checksum()
    with line.screen.bar(f"training {algorithm}", 1.0) as bar:

        def on_step(values: dict[str, Any]) -> None:
            if "alarm" in values:
                line.screen.warn(f"{algorithm}: {values['alarm']}")
            elif "validation" in values:
                line.screen.say(f"{algorithm}: step {values['step']}: validation acceptance length {values['validation']:.3f} (best {values['best']:.3f})")
            else:
                bar.set(values["done"], f"step {values['step']} loss {values['loss']:.3f} best {values['best']:.2f}")

        job = make_job(line, writer.path, config, vocab, hidden, on_step, tokens=recipe.train.validation_tokens, init=settings.init)
        with closing(job.source):
            if warm is not None:
                line.screen.say(f"{algorithm}: {begin(job.drafter, warm, vocab, target.head.weight)}")
            # After a warm start, too: the hook leaves its weights, but what must be this target's own (an MTP head's copy of the final norm) it fills.
            begin_as_target(line, job.drafter, settings)
            job.settings = writer.settings
            count = sum(p.numel() for p in job.drafter.parameters())
            line.screen.say(f"{algorithm}: {count / 1e6:.1f}M trainable parameters, {len(job.source.keys)} documents, {job.source.per_epoch} batches per epoch")
            result = train(job)
    if target.checksum() != frozen:
        raise TrainingError("the target's weights changed while the drafter was trained", mend="this is a bug of Firesteel: please report it with the recipe")
    line.world.wait()  # for rank 0's last weights
    load_whole_state(job.drafter, load_best(writer.path))
    best = run_validation(job)
    if line.world.first:
        write_atomic(writer / _CONFIG, json.dumps(config.to_dict()))
        write_atomic(writer / _VOCAB, json.dumps(None if vocab is None else vocab.target_ids.tolist()))
        write_atomic(writer / JOURNAL, journal(writer.path, f"{algorithm} of {recipe.name}"))
    assert (writer / BEST).is_file(), "a finished run has validated at least once"
    return {
        "algorithm": algorithm,
        "parameters": count,
        "steps": result.progress.step,
        "epochs": job.source.epoch_of(result.progress.batch),
        "train_seconds": result.progress.seconds,
        "skipped_steps": result.progress.skipped,
        "spiked_steps": result.progress.spiked,
        "returns": result.progress.returns,
        "stopped_by": result.stopped_by,
        "processes": line.world.size,
        "saving_seconds": result.saving,
        "best_step": result.progress.best_step,
        "acceptance_length": best.acceptance_length,
        "expected_length": best.expected_length,
        "conditional": best.conditional,
        "validation_rounds": best.rounds,
        "validation_accepted": best.accepted,
        "validation_documents": [d.key for d in take(extract.read_index(hidden, "validation"), recipe.train.validation_tokens)],
        "documents": len(job.source.keys),
        "tokens": sum(job.source.lengths),
        "coverage": None if vocab is None else vocab.coverage(counts()),
        "target": target.spec.to_dict(),
    }


def _vocab_key(line: Line, settings: Drafter) -> dict[str, Any]:
    """What stands for an empty `drafter.draft_vocab_size` in a training artifact's settings, where that is not the target's whole vocabulary."""
    source, whole = warm_described(settings), line.target.spec.vocab_size
    size = draft_vocab_size(settings, whole, source)
    if settings.draft_vocab_size is not None or size == whole:
        return {}
    return {"draft_vocab_size": size if source is None else f"{size} of the checkpoint"}


def _draft_vocab(line: Line, settings: Drafter, config: DraftConfig, warm: LoadedDraft | None, counts: Callable[[], torch.Tensor]) -> DraftVocab | None:
    """The reduced vocabulary, or None: the checkpoint's own where the recipe leaves its size to it, else the most frequent tokens."""
    if not config.reduced_vocab:
        return None
    if settings.draft_vocab_size is None and warm is not None and warm.target_ids is not None:
        return DraftVocab(warm.target_ids, config.vocab_size)
    return build_vocab(counts(), config.draft_vocab_size, line.target.spec.eos_ids)


def _counts(line: Line, hidden: Artifact) -> torch.Tensor:
    """`[V]` how often each token is supervised in the training documents: what a reduced vocabulary is ranked by."""
    if line.recipe.hidden.store == "stream":
        found = ((torch.tensor(w.token_ids), torch.tensor(w.loss_mask)) for w in stream.works(line, hidden, "train"))
        return count_supervised(found, line.target.spec.vocab_size)
    store: HiddenStore = extract.open_store(line, hidden)
    samples = (store.get(d.key) for d in extract.read_index(hidden, "train"))
    return count_supervised(((s.token_ids, s.loss_mask) for s in samples), line.target.spec.vocab_size)


def _slot_weights(line: Line, config: DraftConfig) -> torch.Tensor:
    loss = line.recipe.loss
    if loss.position_weights == "exponential":
        decay = get_spec(config.algorithm).decay(config)
        return exponential_weights(config.block_size, config.sample_from_anchor, loss.decay if decay is None else decay)
    # D-PACE multiplies its own weights in, batch by batch.
    return uniform_weights(config.block_size, config.sample_from_anchor)
