"""The batch that both sides of a step benchmark train on: one document of the target's own greedy text, and its hidden states.

The prompt is supervised nowhere, the text everywhere. Because the text is greedy, the true token is the target's first
choice, so a loss that takes its labels from the text and one that takes them from the target's logits mean the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from firesteel.target.local import LocalTarget, capture, stack_layers

PROMPT = "Tell me a long and detailed story about a lighthouse keeper, her son, the ships that pass and what the sea brings."
FILES = ("batch.safetensors", "setting.json")


def write_batch(folder: Path, target: LocalTarget, setting: dict[str, Any]) -> None:
    """Write `batch.safetensors` and `setting.json` (as given), unless the same setting's are there.

    The file holds token_ids `[T]` int64, loss_mask `[T]` bool, aux `[T, m, d]` and last `[T, d]` float32 (before the final
    norm), and anchors `[N]` int64: fixed anchors for comparing losses, whose blocks lie within the text.
    """
    text = json.dumps(setting, indent=1)
    if all((folder / name).is_file() for name in FILES) and (folder / FILES[1]).read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    token_ids, start = greedy_text(target, setting["tokens"])
    with capture(target.model, setting["layer_ids"]) as states, torch.inference_mode():
        logits = target.model(token_ids[None], use_cache=False).logits[0]
    agrees = logits[:-1].argmax(-1) == token_ids[1:]  # [T - 1]; cached and uncached passes may differ where two tokens tie
    # EAGLE-3 of the peer has a chain at every token but the first: there everything is supervised, and every token an anchor of ours.
    chains = setting["algorithm"] == "eagle3"
    tensors = {
        "token_ids": token_ids,
        "loss_mask": torch.arange(len(token_ids)) >= (0 if chains else start),
        "aux": stack_layers(states, setting["layer_ids"])[0].float(),
        "last": states["last"][0].float(),
        "anchors": torch.arange(1, len(token_ids) - 1) if chains else fixed_anchors(agrees, start, setting),
    }
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, folder / FILES[0])
    (folder / FILES[1]).write_text(text)


@torch.inference_mode()
def greedy_text(target: LocalTarget, tokens: int) -> tuple[Tensor, int]:
    """`[tokens]` int64: the rendered prompt and what the target says, never ending its turn; and the first position that the target wrote."""
    rendered = target.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False)
    prompt = target.tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
    wanted = tokens - prompt.shape[1]
    if wanted < 1:
        raise SystemExit(f"--tokens {tokens} leaves no room for text: the prompt alone has {prompt.shape[1]}")
    written = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=wanted, min_new_tokens=wanted, do_sample=False, pad_token_id=target.spec.eos_ids[0]
    )
    return written[0], prompt.shape[1]


def fixed_anchors(agrees: Tensor, start: int, setting: dict[str, Any]) -> Tensor:
    """Up to `anchors` positions p whose block predicts only tokens that are the target's first choice; sorted."""
    size = setting["block_size"]
    clean = agrees.unfold(0, size, 1).all(-1)  # [T - g]: tokens p + 1 .. p + g are all the target's choice
    clean[:start] = False
    found = clean.nonzero(as_tuple=True)[0][:-1]  # the peer leaves out the last g positions
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(setting["seed"]))
    return found[order[: setting["anchors"]]].sort().values
