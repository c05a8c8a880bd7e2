"""PagedTarget: `LeanDecoder`'s layers over the flattened tokens of many sequences, with keys and values in blocks.

The products see all tokens of a step as rows of one matrix; attention goes sequence by sequence inside one compiled pass. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from firesteel.errors import TargetError
from firesteel.kernels.memory import holds_again
from firesteel.kernels.paged import BLOCK, Rotary, attend, blocks_for, make_caches, make_plan, rotate_and_store
from firesteel.kernels.spans import Span
from firesteel.target.head import decoder
from firesteel.target.lean import UNFIT, LeanDecoder, lean_refusal
from firesteel.target.local import capture, stack_layers

_TOLERANCE = 1e-4
_HALF_TOLERANCE = 0.1  # of the largest value: eight bits, through all layers


class PagedTarget:
    """A Llama-like float32 target on a CPU, for the batched engine.

    Args:
        model: a Transformers causal model.
        layer_ids: captured layers, as in `hidden_states`.
        max_length: positions that one sequence may have.
        blocks: of `BLOCK` positions each, in the cache.
        half: see `LeanDecoder`.
        spare: steps of at most this many tokens leave one core to others. They are bound by memory, which one core less reads as fast; and where
            something else wants a core (a server, its clients), every product of a step that counts on all of them waits for the one it lost.

    Raises:
        TargetError: the model is not of that kind, or the results are not the model's own.
    """

    shares_prefix = True

    def __init__(self, model: Any, layer_ids: Sequence[int], *, max_length: int, blocks: int, half: bool = False, spare: int = 0) -> None:
        if why := lean_refusal(model, max_length):
            raise TargetError(f"this target cannot run batched: {why}", mend="it is served sequence by sequence")
        self._lean = lean = LeanDecoder(model, layer_ids, 1, half=half)
        self.half = any(layer.qkv.in_half for layer in lean.layers)
        self.layer_ids, self.max_length, self.blocks = lean.layer_ids, 0, 0
        self.spare, self.threads = spare, torch.get_num_threads()
        self._rotary_table: Any = decoder(model).rotary_emb
        self.make_room(max_length, blocks)
        self._check(model, _HALF_TOLERANCE if half else _TOLERANCE)

    def make_room(self, max_length: int, blocks: int) -> None:
        """From now on take sequences of at least this length, and hold at least so many blocks; where that is news, what the cache held is lost."""
        lean = self._lean
        if max_length > self.max_length:
            cos, sin = self._rotary_table(torch.zeros(1, 1), torch.arange(max_length)[None])
            pairs = lean.dim // 2
            self._rotary = Rotary(cos[0, :, :pairs].float().contiguous(), sin[0, :, :pairs].float().contiguous(), interleaved=True)
            self.max_length = max_length
        if blocks > self.blocks:
            self._caches = []  # not beside the new ones
            self._caches = make_caches(len(lean.layers), blocks, lean.kv_heads, lean.dim, torch.device("cpu"))
            self.blocks = blocks

    @torch.inference_mode()
    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`tokens [N]`, the spans' one after another -> logits `[sum(keep), V]`, captured states `[N, m * d]`."""
        if self.spare and self.threads > 1:
            torch.set_num_threads(self.threads - (tokens.shape[0] <= self.spare))
        lean = self._lean
        plan = make_plan(spans, lean.heads // lean.kv_heads)
        x = F.embedding(tokens, lean.embedding.weight)
        states = {}
        for i, (layer, cache) in enumerate(zip(lean.layers, self._caches, strict=True)):
            if i in self.layer_ids:
                states[i] = x
            y = layer.qkv(F.rms_norm(x, layer.input_norm.shape, layer.input_norm, layer.input_eps))
            rotate_and_store(y, lean.heads, cache, plan, self._rotary, layer.qk_norm)
            x = layer.out.plus(attend(y, lean.heads, cache, plan, layer.scale), x)
            y = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, layer.mlp_eps)
            x = layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)
        states[len(lean.layers)] = x
        aux = torch.cat([states[i] for i in self.layer_ids], dim=-1) if self.layer_ids else x[:, :0]
        rows: list[int] = []
        end = 0
        for span, count in zip(spans, keep, strict=True):
            end += span.count
            rows += range(end - count, end)
        if not rows:
            return x.new_empty(0, lean.head.out_features), aux
        last = x if len(rows) == x.shape[0] else x[rows]
        return lean.head(F.rms_norm(last, lean.norm.shape, lean.norm, lean.eps)), aux

    def forget(self, key: int) -> None:
        """Nothing: what a sequence had lies in blocks, which the pool gives to others."""

    def _check(self, model: Any, tolerance: float) -> None:
        """Compare with the model's own pass: two texts, in one step and in pieces.

        Raises:
            TargetError: they differ.
        """
        n = min(24, self.max_length)
        needed = blocks_for(n)
        if self._caches[0].keys.shape[0] < 2 * needed:
            raise TargetError("the cache holds not even two short texts", mend="raise serve.cache_gb")
        vocabulary = self._lean.embedding.weight.shape[0]
        texts = torch.randint(vocabulary, (2, n), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode(), capture(model, self.layer_ids) as states:
            logits = model(texts, use_cache=False).logits
            aux = stack_layers(states, self.layer_ids).flatten(2) if self.layer_ids else logits[..., :0]
        tables = [list(range(needed)), list(range(2 * needed - 1, needed - 1, -1))]
        # The second text is read while the first is written, one token and then the rest.
        cuts = [(0, n // 2), (n // 2, n // 2 + 1), (n // 2 + 1, n)]
        for begin, end in cuts:
            if begin >= end:
                continue
            spans = [Span(i, table, begin, end - begin) for i, table in enumerate(tables)]
            got = self.forward(texts[:, begin:end].reshape(-1), spans, [end - begin] * 2)
            for mine, own in zip(got, (logits[:, begin:end].flatten(0, 1), aux[:, begin:end].flatten(0, 1)), strict=True):
                off = (mine - own).abs().max() / own.abs().max().clamp_min(1e-30) if own.numel() else torch.zeros(())
                if not float(off) <= tolerance:
                    raise TargetError(f"the batched engine's results differ from the model's by {float(off):.1e} of the largest value", mend="please report it")


def open_paged(model: Any, layer_ids: Sequence[int], *, max_length: int, blocks: int, half: bool) -> PagedTarget | None:
    """A `PagedTarget`, or None where the model's own forward pass is the way: another structure, or no memory for the packed weights.

    `half` is a wish: where rounded products stray too far, float32 ones are taken.
    """
    if lean_refusal(model, max_length) is not None or not holds_again(model.parameters()):
        return None
    for rounded in (True, False) if half else (False,):
        try:
            return PagedTarget(model, layer_ids, max_length=max_length, blocks=blocks, half=rounded)
        except UNFIT:
            continue  # the structure looked right, but a detail did not fit: the model's own forward pass is always correct
    return None


def block_bytes(model: Any) -> int:
    """What a block of positions takes in a `PagedTarget`'s cache."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * BLOCK * config.num_hidden_layers * heads * dim * torch.float32.itemsize)
