"""Runtime: a drafter and its target as two decoding sessions, from an exported folder or from a training artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from firesteel.drafters.config import DraftConfig
from firesteel.drafters.registry import get_spec
from firesteel.drafters.rows import DraftSession
from firesteel.package.contract import Contract
from firesteel.package.load import check_target, load
from firesteel.stages.line import Line
from firesteel.stages.train import load_trained
from firesteel.target.local import LocalTarget
from firesteel.target.session import TargetSession


@dataclass
class Proposal:
    """What the reference engine takes: tokens, `[n, V]` distributions over target ids (None where greedy), confidences."""

    tokens: Sequence[int]
    probs: Tensor | None
    confidences: Sequence[float] | None


class FullVocabulary:
    """A drafter's session whose distributions are spread over the target's vocabulary, as the acceptance rule wants them.

    Args:
        device: where the session draws its tokens; None takes every generator as it is.
    """

    def __init__(self, session: DraftSession, device: torch.device | None = None) -> None:
        self.inner, self.device = session, device

    def observe(self, tokens: Sequence[int] | Tensor, aux: Tensor) -> None:
        self.inner.observe(tokens, aux)

    def draft(self, anchor: int, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None) -> Proposal:
        drawn_by = generator_on(self.device, generator) if temperature > 0 else generator
        found = self.inner.draft(anchor, count, temperature=temperature, generator=drawn_by)
        probs = None if found.probs is None else self.inner.expand(found.probs)
        return Proposal(found.tokens, probs, found.confidences)

    def rewind(self, length: int) -> None:
        self.inner.rewind(length)

    def fork(self) -> FullVocabulary:
        """An empty session for another sequence."""
        return FullVocabulary(self.inner.fork(), self.device)


def generator_on(device: torch.device | None, generator: torch.Generator | None) -> torch.Generator | None:
    """A generator that tensors on `device` take: the given one; or where that is of another kind of device a new one, whose seed it draws."""
    if device is None or generator is None or generator.device.type == device.type:
        return generator
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return torch.Generator(device).manual_seed(seed)


@dataclass
class Runtime:
    """Two sessions that decode together, batch 1."""

    target: TargetSession
    session: FullVocabulary
    drafter: nn.Module
    config: DraftConfig
    contract: Contract | None

    @property
    def num_drafts(self) -> int:
        return self.config.num_drafts


@dataclass
class Parts:
    """A drafter with what it needs to decode: tables of the target, or its own. All of it is where the target is."""

    drafter: nn.Module
    config: DraftConfig
    embed: Tensor
    head: Tensor
    target_ids: Tensor | None
    temperatures: list[float] | None
    contract: Contract | None

    def session(self, max_length: int) -> DraftSession:
        """A decoding session for one sequence."""
        return get_spec(self.config.algorithm).session(
            self.drafter,
            self.embed,
            self.head,
            draft_to_target=self.target_ids,
            max_length=max_length,
            confidence_temperatures=self.temperatures,
        )

    def full_session(self, max_length: int) -> FullVocabulary:
        """The same, with distributions over the target's vocabulary."""
        return FullVocabulary(self.session(max_length), self.embed.device)


def package_parts(target: LocalTarget, folder: Path) -> Parts:
    """Load an exported folder for a target.

    Raises:
        CheckpointError: the folder is damaged, or its drafter belongs to another target.
    """
    loaded, spec = load(folder), target.spec
    check_target(loaded, spec.fingerprint, spec.hidden_size, spec.vocab_size, target_name=spec.name)
    drafter = get_spec(loaded.config.algorithm).build(loaded.config)
    drafter.load_state_dict({name: tensor.float() for name, tensor in loaded.tensors.items()})
    temperatures = loaded.contract.temperatures if loaded.contract is not None else ()
    head = None if loaded.head_rows is None else loaded.head_rows.float()
    return _parts(target, drafter, loaded.config, loaded.target_ids, head, loaded.embed, temperatures, loaded.contract)


def open_package(line: Line, folder: Path) -> Runtime:
    """Open an exported folder for the line's target.

    Raises:
        CheckpointError: the folder is damaged, or its drafter belongs to another target.
    """
    return _runtime(line, package_parts(line.target, folder))


def open_trained(line: Line, algorithm: str) -> Runtime:
    """A trained drafter that is compared, not exported."""
    trained = load_trained(line, algorithm)
    ids = None if trained.vocab is None else trained.vocab.target_ids
    return _runtime(line, _parts(line.target, trained.drafter, trained.config, ids, None, None, (), None))


def _parts(
    target: LocalTarget,
    drafter: nn.Module,
    config: DraftConfig,
    target_ids: Tensor | None,
    head: Tensor | None,
    embed: Tensor | None,
    temperatures: Sequence[float],
    contract: Contract | None,
) -> Parts:
    device = target.device
    ids = None if target_ids is None else target_ids.to(device)
    if head is None:
        head = target.head.weight if ids is None else target.head.weight[ids]
    embed = target.head.embed if embed is None else embed
    return Parts(drafter.eval().to(device), config, embed.to(device), head.to(device), ids, list(temperatures) or None, contract)


def _runtime(line: Line, parts: Parts) -> Runtime:
    length = session_length(line)
    session = parts.full_session(length)
    return Runtime(line.decoding_session(parts.config.layer_ids, length), session, parts.drafter, parts.config, parts.contract)


def session_length(line: Line) -> int:
    """Positions that decoding may need: the longest prompt with its earlier answers, and a new answer."""
    recipe = line.recipe
    wanted = 4 * recipe.prompts.max_tokens + 4 * max(recipe.evaluate.max_new_tokens, recipe.responses.max_new_tokens)
    return min(wanted, line.target.spec.max_position_embeddings)
