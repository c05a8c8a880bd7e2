"""Hidden states while training runs (`hidden.store: stream`): who makes them, and the feed that training takes them from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from firesteel.artifact import Artifact
from firesteel.endpoints.roster import FILE as ENDPOINTS
from firesteel.endpoints.roster import Roster
from firesteel.errors import HiddenStateError, RecipeError
from firesteel.hidden.codec import decode_sample, encode_sample
from firesteel.hidden.feed import Fetch, SampleFeed, Work
from firesteel.hidden.sample import HiddenSample, check_sample
from firesteel.hidden.stores import HiddenStore, MemoryStore
from firesteel.hidden.window import watermarks
from firesteel.kernels.linear import wants_half
from firesteel.prompts.template import Document
from firesteel.recipe import Train
from firesteel.stages import extract, states
from firesteel.stages.line import Line
from firesteel.target.reader import make_reader

_LOCAL = "local"


def works(line: Line, hidden: Artifact, split: str) -> list[Work]:
    """The documents of a split, in the order of its index."""
    documents = {d.key: d for d in extract.documents_of(line, split)}
    listed = extract.read_index(hidden, split)
    for row in listed:
        if row.key not in documents:
            raise HiddenStateError(f"document {row.key} of split {split} is no longer among the answers", mend="firesteel extract RECIPE lists them anew")
    return [Work(row.key, documents[row.key].token_ids, documents[row.key].loss_mask) for row in listed]


def open_feed(line: Line, wanted: Sequence[Work]) -> SampleFeed:
    """A feed of these documents from the line's target: this process, or the servers of `target.endpoints`."""
    recipe, settings = line.recipe, line.recipe.hidden.feed
    step = recipe.train.accumulate * max(recipe.train.batch_tokens, max((len(w.token_ids) for w in wanted), default=0))
    check = partial(check_sample, layer_ids=line.layer_ids, target=line.target.spec.fingerprint)
    if recipe.target.engine == "local":
        # One forward pass at a time: a second one would only take cores from the first.
        alone = settings.model_copy(update={"concurrency": 1})
        return SampleFeed(local_fetch(line), wanted, Roster([_LOCAL]), alone, step_tokens=step, check=check)
    groups = settings.groups
    if line.world.size % groups:
        raise RecipeError(
            f"hidden.feed.groups={groups} does not divide the {line.world.size} processes of this run", mend="set hidden.feed.groups to a divisor, or to 1"
        )
    watermarks(settings, step)  # like the groups: refused before a client is made that nobody would close
    served = states.open_states(line)

    async def fetch(endpoint: str, work: Work) -> HiddenSample:
        return await served.fetch(endpoint, work.token_ids, work.loss_mask, work.key)

    roster = Roster(states.servers(line), line.folder / ENDPOINTS, part=(line.world.rank * groups // line.world.size, groups))
    return SampleFeed(fetch, wanted, roster, settings, step_tokens=step, check=check, finish=partial(states.leave, served))


def held_samples(line: Line, hidden: Artifact, store: HiddenStore | SampleFeed, keys: Sequence[str]) -> HiddenStore:
    """A store that has the samples of these validation documents: the one given, or a feed's worth of them in memory."""
    if not isinstance(store, SampleFeed):
        return store
    by_key = {w.key: w for w in works(line, hidden, "validation")}
    wanted = [by_key[key] for key in dict.fromkeys(keys)]
    held = MemoryStore("fp32")  # as they came: bfloat16 and float8 values are float32 values
    with line.screen.bar("fetching held-out states", len(wanted)) as bar, open_feed(line, wanted) as feed:
        feed.stop = len(wanted)
        for number in range(len(wanted)):
            held.put(feed.take(number, lambda n: [n])[0])
            bar.advance()
    return held


def last_batch(train: Train, per_epoch: int, ranks: int = 1) -> int | None:
    """The number of batches that a run's budget allows, whole optimiser steps of so many ranks' batches; None where only the clock ends it."""
    steps, batches = [train.max_steps] if train.max_steps is not None else [], train.accumulate * ranks
    if train.epochs is not None:
        steps.append(math.ceil(train.epochs * per_epoch / batches))
    return min(steps) * batches if steps else None


def local_fetch(line: Line) -> Fetch:
    """The target in this process as an endpoint; numbers are those that the codec would have kept."""
    target, recipe = line.target, line.recipe.hidden
    reader = make_reader(target.model, line.layer_ids, half=wants_half(recipe.precision, target.device))

    def capture(work: Work) -> HiddenSample:
        document = Document(work.token_ids, work.loss_mask, "", (), (), "", "")
        sample = extract.capture_documents(target, reader, [document], line.layer_ids)[0]
        return decode_sample(*encode_sample(sample, recipe.codec))

    async def fetch(endpoint: str, work: Work) -> HiddenSample:
        return await asyncio.to_thread(capture, work)

    return fetch
