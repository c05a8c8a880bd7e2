"""Writes captured documents as speculators' trainer reads them, so that a peer trains on the same tokens, masks and states.

A row of the Arrow dataset is a document (`input_ids`, `loss_mask`, `seq_len`); beside it `hidden_states/hs_ROW.safetensors`
holds `token_ids [T]` and `hidden_states [T, m + 1, d]`: the layers in order, then the last layer before the final norm.

The peer needs the last state at every position, ours keeps it only where a block predicts; so documents pass through the
target once more, by the reader that made ours, with the layers that the peer's configurations want, and are stored in the
precision that ours were. One pass serves several configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from firesteel.target.local import LocalTarget
from firesteel.target.reader import make_reader

Pair = tuple[Tensor, Tensor]
"""Token ids `[T]` and loss mask `[T]` of a document."""


def export_states(
    target: LocalTarget,
    documents: Sequence[Pair],
    folders: Mapping[Path, Sequence[int]],
    dtype: torch.dtype,
    progress: Callable[[int], None],
    *,
    half: bool,
    batch_tokens: int,
) -> None:
    """Write dataset and states of documents into every folder, with the layers given for it.

    Args:
        progress: hears how many documents are done.
        half: products of the target run in bfloat16, as `hidden.precision` has them.
        batch_tokens: read together.
    """
    dataset = Dataset.from_dict(
        {
            "input_ids": [ids.tolist() for ids, _ in documents],
            "loss_mask": [mask.tolist() for _, mask in documents],
            "seq_len": [len(ids) for ids, _ in documents],
        }
    )
    dataset.set_format("torch")
    for folder in folders:
        dataset.save_to_disk(str(folder))
        (folder / "hidden_states").mkdir()
    wanted = sorted({i for ids in folders.values() for i in ids})
    reader = make_reader(target.model, wanted, half=half)
    row = 0
    for group in together([ids for ids, _ in documents], batch_tokens):
        for token_ids, (aux, last) in zip(group, reader([ids.tolist() for ids in group]), strict=True):
            for folder, layer_ids in folders.items():
                states = torch.cat([aux[:, [wanted.index(i) for i in layer_ids]], last[:, None]], dim=1).to("cpu", dtype)
                save_file({"token_ids": token_ids.contiguous(), "hidden_states": states.contiguous()}, folder / "hidden_states" / f"hs_{row}.safetensors")
            row += 1
        progress(row)


def together(texts: Sequence[Tensor], batch_tokens: int) -> Iterator[list[Tensor]]:
    """The texts in order, in groups of at most `batch_tokens` tokens (or one text)."""
    group: list[Tensor] = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > batch_tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
