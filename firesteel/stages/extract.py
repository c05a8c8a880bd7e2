"""Stage `hidden`: the target's hidden states of every answered prompt, checked and stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from firesteel.artifact import Artifact, ArtifactWriter, write_atomic
from firesteel.errors import ArtifactError, DataError, HiddenStateError
from firesteel.hidden.sample import HiddenSample, check_sample, predictable_positions
from firesteel.hidden.stores import DiskStore, HiddenStore, MemoryStore, predict_bytes
from firesteel.kernels.linear import wants_half
from firesteel.prompts.conversation import Prompt
from firesteel.prompts.dropped import Dropped
from firesteel.prompts.template import Document, build_document, supervised_by_source, supervised_tokens
from firesteel.responses.answers import Answered
from firesteel.stages import prompts as prompts_stage
from firesteel.stages import respond
from firesteel.stages.forecast import check_room
from firesteel.stages.line import Line
from firesteel.stages.states import captured, check_served_logits, rounding_variation
from firesteel.target.local import LocalTarget
from firesteel.target.reader import Reader, make_reader

NAME = "hidden"
SPLITS = respond.SPLITS
_SAMPLES = "samples"
_CHECKED_SAMPLES = 4


@dataclass(frozen=True)
class Listed:
    """A stored document: its key, T tokens, supervised tokens, domain."""

    key: str
    tokens: int
    supervised: int
    domain: str


@dataclass
class Notes:
    """What became of answers on their way to stored documents: left out, and kept but cut."""

    dropped: Dropped = field(default_factory=Dropped)
    cut: Dropped = field(default_factory=Dropped)


def run(line: Line) -> Artifact:
    """Capture the states of all documents; samples already there are kept after a kill."""
    prompts, responses = _inputs(line)
    recipe = line.recipe
    settings = {
        "hidden": recipe.hidden.model_dump(include={"codec", "max_length", "store", "precision"}),
        "layer_ids": list(line.layer_ids),
        "target": prompts_stage.target_identity(line),
    }
    inputs = {"prompts": prompts.manifest.content, "responses": responses.manifest.content}
    return line.stage(NAME, settings, inputs, lambda writer: _make(line, writer))


def open_hidden(line: Line) -> Artifact:
    """The stage's artifact, if its states are those that the recipe names.

    Raises:
        ArtifactError: there is none, or they are another target's or of other layers.
    """
    found = line.input(NAME)
    _check_target(line, found, "extract")
    check_input(found, "target.layer_ids", found.manifest.about.get("layer_ids"), list(line.layer_ids), "extract")
    return found


def check_input(artifact: Artifact, what: str, made_of: object, wanted: object, verb: str) -> None:
    """An earlier stage's artifact is of what this run has now; nothing is held against one that does not say what it is of.

    Args:
        what: in a word.
        verb: makes it anew.

    Raises:
        ArtifactError: states both values.
    """
    if made_of is not None and made_of != wanted:
        raise ArtifactError(f"{artifact.path} was made with {what} {_shown(made_of)}, now it is {_shown(wanted)}", mend=f"firesteel {verb} RECIPE")


def _shown(value: object) -> object:
    """Of a content hash the beginning is enough."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else value


def read_index(artifact: Artifact, split: str) -> list[Listed]:
    """The documents of a split, in order."""
    return [Listed(**row) for row in json.loads((artifact / "index.json").read_text())[split]]


def open_store(line: Line, artifact: Artifact) -> HiddenStore:
    """The samples of a committed stage; with `hidden.store: memory` they are captured again here."""
    if line.recipe.hidden.store == "disk":
        return DiskStore(artifact / _SAMPLES, line.recipe.hidden.codec)
    store = MemoryStore(line.recipe.hidden.codec)
    _capture_all(line, [d for split in SPLITS for d in documents_of(line, split)], store)
    return store


def documents_of(line: Line, split: str, notes: Notes | None = None) -> list[Document]:
    """The documents of a split, as the stage makes them of prompts and answers; what is left out or cut is counted in `notes`.

    Raises:
        DataError: there is none.
    """
    prompts, responses = _inputs(line)
    notes = notes or Notes()
    found = _documents(line, prompts_stage.read_prompts(prompts, split), respond.read_responses(responses, split), notes)
    if not found:
        limit, cut = line.recipe.hidden.max_length, notes.dropped.counts[_cut_away(line)]
        raise DataError(
            f"no document of split {split} has a supervised token, or two in a row: the drafter could learn nothing; {'; '.join(notes.dropped.lines())}",
            mend=f"hidden.max_length={limit} cuts {cut} of them before their answers: raise it"
            if cut
            else "check that the answers are not empty: firesteel respond RECIPE",
        )
    return found


def _inputs(line: Line) -> tuple[Artifact, Artifact]:
    """Prompts, and the target's answers to these.

    Raises:
        ArtifactError: one is missing, or the answers are another target's or to other prompts.
    """
    prompts, responses = line.input("prompts"), line.input("responses")
    check_input(responses, "prompts", responses.manifest.inputs.get("prompts"), prompts.manifest.content, "respond")
    _check_target(line, responses, "respond")
    return prompts, responses


def _check_target(line: Line, artifact: Artifact, verb: str) -> None:
    """The weights count, not where they lie."""
    said, spec = artifact.manifest.about.get("target") or {}, line.target.spec
    if said.get("fingerprint") not in (None, spec.fingerprint):
        made_of = f"{said.get('name')} (fingerprint {said['fingerprint']})"
        check_input(artifact, "target", made_of, f"{spec.name} (fingerprint {spec.fingerprint})", verb)


def _make(line: Line, writer: ArtifactWriter) -> dict[str, Any]:
    recipe, target = line.recipe, line.target
    notes = Notes()
    documents = {split: documents_of(line, split, notes) for split in SPLITS}
    every = [d for docs in documents.values() for d in docs]
    tokens, supervised = sum(len(d.token_ids) for d in every), sum(sum(d.loss_mask) for d in every)
    size = predict_bytes(tokens, supervised, len(line.layer_ids), target.spec.hidden_size, recipe.hidden.codec, len(every))
    streamed = recipe.hidden.store == "stream"
    place = "made while training runs, not kept" if streamed else f"{size / 1e6:.0f} MB" + (" of memory" if recipe.hidden.store == "memory" else "")
    line.screen.say(f"hidden: {len(every)} documents, {tokens} tokens ({supervised} supervised), layers {list(line.layer_ids)}, {place}")
    line.screen.say("hidden: supervised tokens by source: " + ", ".join(f"{n} of {name}" for name, n in supervised_by_source(every).items()))
    store = DiskStore(writer / _SAMPLES, recipe.hidden.codec) if recipe.hidden.store == "disk" else MemoryStore(recipe.hidden.codec)
    check_room(line, size - store.nbytes())
    # Streamed states are made while training runs; a few are made here, to see that they are right.
    notes.dropped.merge(_capture_all(line, every[:_CHECKED_SAMPLES] if streamed else every, store))
    for text in notes.dropped.lines():
        line.screen.say(f"hidden: dropped: {text}")
    for text in notes.cut.lines():
        line.screen.say(f"hidden: kept, but {text}")
    if isinstance(store, DiskStore):
        store.sweep()
    checked, tolerance = [d for d in every if d.key in store][:_CHECKED_SAMPLES], recipe.hidden.logits_tolerance
    if recipe.target.engine == "vllm":
        worst = check_served_logits(line, [store.get(d.key) for d in checked], tolerance)
    else:
        worst = check_logits(target, store, checked, tolerance, recipe.hidden.codec)
    line.screen.say(f"hidden: logits recomputed from stored states differ from the target's by at most {worst:.4f} (total variation)")
    kept = {s: [d for d in docs if streamed or d.key in store] for s, docs in documents.items()}
    index = {s: [vars(Listed(d.key, len(d.token_ids), sum(d.loss_mask), d.domain)) for d in docs] for s, docs in kept.items()}
    for split, rows in index.items():
        if not rows:
            raise DataError(
                f"no document of split {split} is left after the checks: {'; '.join(notes.dropped.lines())}",
                mend="look at the answers: firesteel respond RECIPE",
            )
    # Later stages depend on the states. Where none are kept beside the index, the content must tell them apart.
    states = {**writer.settings["hidden"], "layer_ids": list(line.layer_ids), "target": target.spec.fingerprint}
    write_atomic(writer / "index.json", json.dumps(index if isinstance(store, DiskStore) else {**index, "states": states}))
    return {
        "supervised_by_source": {s: supervised_by_source(docs) for s, docs in documents.items()},
        "target": target.spec.to_dict(),
        "layer_ids": list(line.layer_ids),
        "documents": {s: len(rows) for s, rows in index.items()},
        "tokens": sum(len(d.token_ids) for docs in kept.values() for d in docs),
        "supervised": {s: supervised_tokens(docs) for s, docs in kept.items()},
        "dropped": notes.dropped.to_dict(),
        "cut": notes.cut.to_dict(),
        "worst_total_variation": worst,
        "bytes": store.nbytes(),
    }


def _documents(line: Line, prompts: Sequence[Prompt], answers: Sequence[Answered], notes: Notes) -> list[Document]:
    """Documents of a split, cut to hidden.max_length; those without two supervised tokens in a row teach nothing and are left out."""
    by_key = {p.key: p for p in prompts}
    limit = line.recipe.hidden.max_length
    found: dict[str, Document] = {}
    for answered in answers:
        prompt = by_key[answered.prompt_key]
        documents = build_document(line.target.tokenizer, prompt, answered.turns)
        if len({turn for d in documents for turn in d.turns}) < len(answered.turns):
            notes.dropped.add("empty answer", prompt.where)
        for document in documents:
            cut = Document(**{**vars(document), "token_ids": document.token_ids[:limit], "loss_mask": document.loss_mask[:limit]})
            if not _teaches(cut):
                notes.dropped.add(_cut_away(line) if _teaches(document) else "no two supervised tokens in a row", prompt.where)
                continue
            if (key := cut.key) in found:
                notes.dropped.add("the same tokens as another document", prompt.where)
            elif len(document.token_ids) > limit:
                notes.cut.add(f"cut to hidden.max_length={limit} tokens", prompt.where)
            found[key] = cut
    return list(found.values())


def _teaches(document: Document) -> bool:
    """A block starts at a supervised token and predicts those after it."""
    return any(a and b for a, b in pairwise(document.loss_mask))


def _cut_away(line: Line) -> str:
    return f"no two supervised tokens in a row within hidden.max_length={line.recipe.hidden.max_length}"


def _capture_all(line: Line, documents: Sequence[Document], store: HiddenStore) -> Dropped:
    """Capture what is not stored yet; a document whose states fail the checks is dropped and counted.

    Raises:
        HiddenStateError: more than a tenth of the documents fail.
    """
    missing = sorted((d for d in documents if d.key not in store), key=lambda d: len(d.token_ids))
    sources = {d.key: d.source for d in missing}
    bad, last = Dropped(), ""
    with line.screen.bar("capturing hidden states", sum(len(d.token_ids) for d in missing)) as bar:
        for sample in captured(line, missing) if line.recipe.target.engine == "vllm" else _captured(line, missing):
            try:
                check_sample(sample, layer_ids=line.layer_ids, target=line.target.spec.fingerprint)
                store.put(sample)
            except HiddenStateError as e:
                last = e.message
                reason = " ".join(e.message.replace(sample.key, "").split()).replace(" ,", ",").replace(" :", ":")
                bad.add(reason, f"{sources[sample.key]}, document {sample.key}")
            bar.advance(len(sample))
    if bad.total > 0.1 * len(documents):
        raise HiddenStateError(
            f"{bad.total} of {len(documents)} documents have bad hidden states; the last: {last}", mend="check target.layer_ids and target.dtype"
        )
    return bad


def _captured(line: Line, documents: Sequence[Document]) -> Iterator[HiddenSample]:
    """Documents of like length share a forward pass."""
    target, budget = line.target, line.recipe.hidden.batch_tokens
    reader = make_reader(target.model, line.layer_ids, half=wants_half(line.recipe.hidden.precision, target.device))
    group: list[Document] = []
    for document in documents:
        if group and (len(group) + 1) * len(document.token_ids) > budget:
            yield from capture_documents(target, reader, group, line.layer_ids)
            group = []
        group.append(document)
    if group:
        yield from capture_documents(target, reader, group, line.layer_ids)


@torch.inference_mode()
def capture_documents(target: LocalTarget, reader: Reader, documents: Sequence[Document], layer_ids: Sequence[int]) -> list[HiddenSample]:
    """One forward pass of the target's `reader` over all of these documents."""
    return [_sample(target, d, *read, tuple(layer_ids)) for d, read in zip(documents, reader([d.token_ids for d in documents]), strict=True)]


def _sample(target: LocalTarget, document: Document, aux: Tensor, last: Tensor, layer_ids: tuple[int, ...]) -> HiddenSample:
    mask = torch.tensor(document.loss_mask)
    positions = predictable_positions(mask)
    rows = last[positions.to(last.device)]
    lognorm = target.head.logits(rows).logsumexp(-1)
    return HiddenSample(
        key=document.key,
        token_ids=torch.tensor(document.token_ids),
        loss_mask=mask,
        aux=aux.cpu(),
        last=rows.cpu(),
        last_positions=positions,
        layer_ids=layer_ids,
        target=target.spec.fingerprint,
        last_lognorm=lognorm.float().cpu(),
    )


@torch.inference_mode()
def check_logits(target: LocalTarget, store: HiddenStore, documents: Sequence[Document], tolerance: float, codec: str) -> float:
    """Recompute the target's probabilities from stored states and compare them with its own; returns the worst mean total variation.

    A wrong layer, a final norm applied twice or never, or a forgotten soft-cap shows here, before anything is trained.

    Raises:
        HiddenStateError: they differ by more than `tolerance` and what rounding to the codec explains.
    """
    worst = 0.0
    for document in documents:
        sample = store.get(document.key)
        truth = target.model(sample.token_ids[None].to(target.device), use_cache=False).logits[0, sample.last_positions].float().softmax(-1)
        again = target.head.logits(sample.last.to(target.device)).softmax(-1)
        distance = float(0.5 * (truth - again).abs().sum(-1).mean())
        worst = max(worst, distance)
        if distance <= tolerance:
            continue
        allowed = tolerance + rounding_variation(target.head, sample.last, again, codec)
        if not distance <= allowed:
            raise HiddenStateError(
                f"document {document.key}: probabilities recomputed from stored states differ from the target's by {distance:.4f} (total variation), "
                f"hidden.logits_tolerance={tolerance} and rounding explain {allowed:.4f}",
                mend="hidden.codec=fp32 rules out rounding; otherwise the target's head is not what Firesteel takes it for (soft-cap, scale, final norm)",
            )
    return worst
