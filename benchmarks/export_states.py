"""Writes captured documents as speculators' trainer reads them, so that a peer trains on the same tokens, masks and states.

A row of the Arrow dataset is a document (`input_ids`, `loss_mask`, `seq_len`); beside it `hidden_states/hs_ROW.safetensors`
holds `token_ids [T]` and `hidden_states [T, m + 1, d]`: the layers in order, then the last layer before the final norm.

The peer needs the last state at every position, ours keeps it only where a block predicts; so documents pass through the
target once more, with the layers that the peer's configuration wants, and are stored in the precision that ours were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from firesteel.target.local import LocalTarget, capture, stack_layers


def export_states(
    target: LocalTarget, documents: Sequence[tuple[Tensor, Tensor]], layer_ids: Sequence[int], folder: Path, dtype: torch.dtype, progress: Callable[[int], None]
) -> None:
    """Write dataset and states of `(token_ids [T], loss_mask [T])` documents; `progress` hears how many are done."""
    rows = {
        "input_ids": [ids.tolist() for ids, _ in documents],
        "loss_mask": [mask.tolist() for _, mask in documents],
        "seq_len": [len(ids) for ids, _ in documents],
    }
    dataset = Dataset.from_dict(rows)
    dataset.set_format("torch")
    dataset.save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for row, (token_ids, _) in enumerate(documents):
        states = capture_all(target, token_ids, layer_ids).to(dtype)
        save_file({"token_ids": token_ids.contiguous(), "hidden_states": states.contiguous()}, folder / "hidden_states" / f"hs_{row}.safetensors")
        progress(row + 1)


@torch.inference_mode()
def capture_all(target: LocalTarget, token_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """`[T, m + 1, d]`: the wanted layers and the last one, at every position."""
    with capture(target.model, layer_ids) as states:
        target.model(token_ids[None].to(target.device), use_cache=False, logits_to_keep=1)
    return torch.cat([stack_layers(states, layer_ids)[0], states["last"][0, :, None]], dim=1).cpu()
