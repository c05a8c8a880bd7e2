"""Stage `package`: export the checkpoint, load it anew, and make it decode what validation promised."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from firesteel.artifact import Artifact, ArtifactWriter, write_atomic
from firesteel.decoding.decode import decode_speculative
from firesteel.errors import VerificationError
from firesteel.hidden.stores import HiddenStore
from firesteel.package.card import model_card, speculative_config
from firesteel.package.contract import CalibrationRow, CalibrationTable, Promise, make_contract
from firesteel.package.deploy import DEPLOY, deploy_note
from firesteel.package.export import Exported, export
from firesteel.package.load import describe
from firesteel.serving.command import plain_commands, shown_commands
from firesteel.stages import extract
from firesteel.stages.calibrate import read_calibration
from firesteel.stages.line import Line
from firesteel.stages.runtime import Runtime, open_package
from firesteel.stages.stream import held_samples
from firesteel.stages.train import load_trained, make_job, take
from firesteel.training.data import held_out_batches
from firesteel.training.loop import run_validation

NAME = "package"
CARD = "README.md"


@dataclass(frozen=True)
class Proof:
    """Decoding the exported folder against validation's promise on the same documents."""

    documents: int
    promised: float
    decoded: float
    rounds: int


def run(line: Line) -> Artifact:
    """Export and prove."""
    hidden, trained, calibration = extract.open_hidden(line), line.input("train"), line.input("calibrate")
    extract.check_input(trained, "hidden states", trained.manifest.inputs.get("hidden"), hidden.manifest.content, "train")
    extract.check_input(calibration, "the drafter", calibration.manifest.inputs.get("train"), trained.manifest.content, "calibrate")
    settings = {"package": line.recipe.package.model_dump(), "max_new_tokens": line.recipe.responses.max_new_tokens}
    inputs = {"hidden": hidden.manifest.content, "train": trained.manifest.content, "calibrate": calibration.manifest.content}
    return line.stage(NAME, settings, inputs, lambda writer: _make(line, writer, hidden, trained, calibration), loose=(CARD, DEPLOY))


def _make(line: Line, writer: ArtifactWriter, hidden: Artifact, artifact: Artifact, calibration: Artifact) -> dict[str, Any]:
    recipe, target = line.recipe, line.target
    trained = load_trained(line, recipe.drafter.algorithm, artifact)
    config, about = trained.config, artifact.manifest.about
    found = read_calibration(calibration)
    # The promise is made on the very documents that are then decoded: the two figures must agree, not just resemble.
    keys = _proof_documents(line, hidden)
    job = make_job(line, writer.path, config, trained.vocab, hidden, lambda values: None, tokens=1)
    job.drafter = trained.drafter.to(target.device)
    with closing(job.source) as source:
        store = held_samples(line, hidden, source.store, keys)
        job.held_out = held_out_batches(store, keys, source.layout, batch_tokens=recipe.train.batch_tokens)
        promised = run_validation(job)
    contract = make_contract(
        config,
        target.spec,
        template_options=recipe.target.template_options,
        temperatures=tuple(found["temperatures"]) if found else (),
        calibration=None if found is None else _calibration(found["measured"]),
        promise=Promise(
            acceptance_length=about["acceptance_length"],
            rounds=about["validation_rounds"],
            accepted=about["validation_accepted"],
            draft_length=config.num_drafts,
            temperature=0.0,
            measured_on=f"{len(about['validation_documents'])} validation documents, greedy decoding replayed",
        ),
        speculative_tokens=recipe.package.speculative_tokens or config.num_drafts,
    )
    ids = None if trained.vocab is None else trained.vocab.target_ids
    head = None if ids is None else target.head.weight[ids.to(target.device)]
    exported = export(writer.path, trained.drafter.state_dict(), config, contract, target_ids=ids, head_rows=head, dtype=torch.float32)
    proof = _prove(line, open_package(line, writer.path), store, keys, promised.acceptance_length)
    write_atomic(writer / CARD, model_card(config, contract, numbers=None, training=_training(about), exported=exported))
    speculative = speculative_config(config, contract, "PATH_OF_THIS_FOLDER")
    write_atomic(writer / DEPLOY, deploy_note(config, contract, shown_commands(recipe, speculative), None, plain=plain_commands(recipe, speculative)))
    return {"parameters": exported.parameters, "file_bytes": exported.file_bytes, "weights_sha256": exported.weights_sha256, "proof": vars(proof)}


def write_card(line: Line, package: Artifact, numbers: Mapping[str, Any]) -> None:
    """Write the model card anew with what evaluation measured (`evaluation.report.model_card_numbers`)."""
    (config, contract), about = describe(package.path), package.manifest.about
    assert contract is not None, "a package of this line has a contract"
    trained = line.input("train").manifest.about
    exported = Exported(package.path, about["parameters"], about["file_bytes"], about["weights_sha256"])
    write_atomic(package / CARD, model_card(config, contract, numbers=numbers, training=_training(trained), exported=exported))


def _proof_documents(line: Line, hidden: Artifact) -> list[str]:
    """Validation documents of all domains in turn, as many as the recipe decodes for proof."""
    listed = extract.read_index(hidden, "validation")
    return [d.key for d in take(listed, sum(d.tokens for d in listed))[: line.recipe.package.proof_prompts]]


def _prove(line: Line, runtime: Runtime, store: HiddenStore, keys: list[str], promised: float) -> Proof:
    """Decode every document's first prompt greedily with the exported drafter.

    Raises:
        VerificationError: the acceptance length falls short of the promise by more than package.tolerance.
    """
    recipe = line.recipe
    accepted = rounds = 0
    with line.screen.bar("proving the exported drafter", len(keys)) as bar:
        for key in keys:
            sample = store.get(key)
            starts = sample.loss_mask.nonzero()[:, 0]
            prompt = sample.token_ids[: int(starts[0])].tolist()
            gaps = (~sample.loss_mask[int(starts[0]) :]).nonzero()[:, 0]
            answer = int(gaps[0]) if gaps.numel() else len(sample) - int(starts[0])
            # An answer that the target ended itself is left to end again; one that was cut is cut at the same token.
            ended = int(sample.token_ids[int(starts[0]) + answer - 1]) in line.target.spec.eos_ids
            limit = answer + runtime.num_drafts + 1 if ended else answer
            found = decode_speculative(
                runtime.target, runtime.session, prompt, draft_tokens=runtime.num_drafts, max_new_tokens=limit, eos_ids=line.target.spec.eos_ids
            )
            accepted += sum(r.accepted for r in found.rounds)
            rounds += len(found.rounds)
            bar.advance()
    decoded = 1.0 + accepted / max(1, rounds)
    line.screen.say(
        f"package: the exported folder decodes with acceptance length {decoded:.3f} on {len(keys)} validation prompts; validation promised {promised:.3f}"
    )
    if decoded - 1.0 < (promised - 1.0) * (1.0 - recipe.package.tolerance):
        raise VerificationError(
            f"the exported drafter decodes with acceptance length {decoded:.3f}, validation promised {promised:.3f} on the same documents "
            f"(package.tolerance={recipe.package.tolerance})",
            mend="training and serving disagree; nothing was packaged. With few prompts and rounded states (hidden.codec, hidden.precision) chance can "
            "do this: raise package.proof_prompts or package.tolerance",
        )
    return Proof(len(keys), promised, decoded, rounds)


def _calibration(measured: dict[str, Any]) -> CalibrationTable:
    """What the stage before measured, as the contract keeps it."""
    rows = [CalibrationRow(**{name: row[name] for name in CalibrationRow.model_fields}) for row in measured["positions"]]
    return CalibrationTable(bins=measured["bins"], measured_on=measured["measured_on"], positions=tuple(rows))


def _training(about: dict[str, Any]) -> dict[str, Any]:
    names = ("algorithm", "parameters", "steps", "epochs", "train_seconds", "documents", "tokens", "acceptance_length", "best_step", "coverage")
    return {n: about[n] for n in names}
