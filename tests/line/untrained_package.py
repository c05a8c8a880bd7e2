"""A packaged drafter without any training, for tests that do not ask how good it is."""

from __future__ import annotations

from pathlib import Path

import torch

from firesteel.drafters.registry import get_spec
from firesteel.package.contract import make_contract
from firesteel.package.export import export
from firesteel.stages.configure import configure
from firesteel.stages.line import Line


def untrained(line: Line, folder: Path) -> Path:
    """The recipe's drafter as a package, with the weights that it begins with."""
    config, _ = configure(line, line.recipe.drafter.algorithm)
    torch.manual_seed(0)
    drafter = get_spec(config.algorithm).build(config)
    contract = make_contract(config, line.target.spec, template_options={}, temperatures=(), promise=None, speculative_tokens=config.num_drafts)
    ids = torch.arange(config.draft_vocab_size) if config.reduced_vocab else None
    head = None if ids is None else line.target.head.weight[ids.to(line.target.device)]
    export(folder, drafter.state_dict(), config, contract, target_ids=ids, head_rows=head, dtype=torch.float32)
    return folder
