"""LeanDecoder: a lean forward pass for Llama-like targets on a CPU, for decoding a few tokens at a time.

Transformers spends most of a one-token step on attention-mask building, cache concatenation and some forty small
operations a layer. Here a layer is a dozen: weights are packed once for oneDNN, q/k/v share one matrix, SwiGLU and
residual additions ride in the matmuls' epilogues, and keys and values go into a preallocated cache.

What is recognised is checked by structure (`lean_refusal`); that the result equals the model's own is checked by
whoever builds it (`target.session` compares logits and captured states before trusting it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firesteel.errors import TargetError
from firesteel.kernels.packed import PackedLinear
from firesteel.target.head import decoder, final_norm

# Rotary kinds whose frequencies do not depend on the length of the sequence: a table may be made once.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ATTENTION_PARTS = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
UNFIT = (TargetError, RuntimeError, ValueError, AttributeError)
"""How making a model lean ends where a detail that `lean_refusal` does not look at is another: a norm without weight, positions over a part of the head."""


@dataclass
class _Layer:
    input_norm: Tensor
    input_eps: float
    qkv: PackedLinear
    qk_norm: tuple[Tensor, float] | None  # [H + Hkv, D] weights of q and k norms, permuted as the rows of qkv are
    scale: float
    out: PackedLinear
    mlp_norm: Tensor
    mlp_eps: float
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    keys: Tensor  # [Hkv, max_length, D]
    values: Tensor


def lean_refusal(model: Any, max_length: int) -> str | None:
    """Why this model cannot run lean; None where it can (as far as structure tells)."""
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return "only float32 on a CPU runs lean"
    config = model.config.get_text_config()
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "it has layers without full attention"
    if (getattr(config, "sliding_window", None) or max_length) < max_length:
        return "its attention has a sliding window"
    inner = decoder(model)
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _STATIC_ROPE or not hasattr(inner, "rotary_emb"):
        return f"its positions are not a fixed rotary table ({kind})"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(model.get_input_embeddings(), nn.Embedding):
        return "its head or embedding is unusual"
    return next((why for layer in inner.layers if (why := _layer_refusal(layer))), None)


def _layer_refusal(layer: nn.Module) -> str | None:
    parts = dict(layer.named_children())
    if set(parts) != _LAYER_PARTS:
        return f"its layers have other parts than Llama's: {sorted(set(parts) ^ _LAYER_PARTS)}"
    attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    if set(attention) not in _ATTENTION_PARTS or set(mlp) != _MLP_PARTS:
        return "its attention or MLP has other parts than Llama's"
    if any(True for part in (layer, parts["self_attn"], parts["mlp"]) for _ in part.parameters(recurse=False)):
        return "its layers have parameters of their own"
    linears = [m for name, m in (attention | mlp).items() if name.endswith("_proj")]
    if any(type(m) is not nn.Linear for m in linears):
        return "its projections are not plain linear layers"
    if type(mlp["act_fn"]).__name__ not in ("SiLU", "SiLUActivation"):
        return "its MLP is not SwiGLU"
    return None


class LeanDecoder:
    """Runs tokens through a Llama-like model with a cache of fixed size; batch 1, float32, CPU.

    The packed weights are copies: they take as much memory again as the model. Weights changed later are not seen.

    Args:
        model: a Transformers causal model that `lean_refusal` has nothing against.
        layer_ids: captured layers, as in `hidden_states` (0 = embeddings, number of layers = before the final norm).
        max_length: positions that the cache holds.
        half: multiply in bfloat16 in the layers; the head's products stay float32, for rounded logits would have ties.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], max_length: int, *, half: bool = False) -> None:
        inner = decoder(model)
        norm: Any = final_norm(model)
        first = inner.layers[0].self_attn
        self.layer_ids = tuple(layer_ids)
        self.dim = int(first.head_dim)
        self.heads = first.q_proj.weight.shape[0] // self.dim
        self.kv_heads = first.k_proj.weight.shape[0] // self.dim
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.norm, self.eps = norm.weight.detach(), _epsilon(norm)
        head = model.get_output_embeddings()
        self.head = PackedLinear(head.weight, head.bias)
        # Rotation of the first and second half of a head in pairs, as a complex product: [max_length, D/2].
        cos, sin = inner.rotary_emb(torch.zeros(1, 1), torch.arange(max_length)[None])
        if cos.shape[-1] != self.dim:
            raise ValueError("rotary embedding over a part of the head only")
        pairs = self.dim // 2
        self.rotation = torch.complex(cos[0, :, :pairs].float(), sin[0, :, :pairs].float())
        self.layers = [self._layer(layer, max_length, half) for layer in inner.layers]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int, keep: int) -> tuple[Tensor, Tensor]:
        """Run `tokens` `[n]` at positions `start ...`, after `start` cached ones.

        Returns:
            logits `[keep, V]` of the last `keep` tokens, captured states `[n, m * d]`.
        """
        n, end, kv, dim = tokens.shape[0], start + tokens.shape[0], self.kv_heads, self.dim
        rotated = self.heads + kv
        heads = rotated + kv
        # Values get the rotation 1, so that one product leaves keys and values side by side.
        rotation = torch.ones(n, heads, dim // 2, dtype=torch.complex64)
        rotation[:, :rotated] = self.rotation[start:end, None]
        # One token sees everything; so do several at the start, causally. Otherwise: 0 where seen, -inf where not.
        mask = None if n == 1 or start == 0 else torch.full((1, 1, n, end), -torch.inf).triu_(start + 1)
        x = F.embedding(tokens, self.embedding.weight)
        states = {}
        for i, layer in enumerate(self.layers):
            if i in self.layer_ids:
                states[i] = x
            y = layer.qkv(F.rms_norm(x, layer.input_norm.shape, layer.input_norm, layer.input_eps)).view(n, heads, dim)
            if layer.qk_norm is not None:
                weight, eps = layer.qk_norm
                torch.mul(F.rms_norm(y[:, :rotated], (dim,), None, eps), weight, out=y[:, :rotated])
            y = torch.view_as_real(torch.view_as_complex(y.view(n, heads, dim // 2, 2)) * rotation).view(n, heads, dim).transpose(0, 1)
            layer.keys[:, start:end] = y[self.heads : rotated]
            layer.values[:, start:end] = y[rotated:]
            seen = F.scaled_dot_product_attention(
                y[None, : self.heads],
                layer.keys[None, :, :end],
                layer.values[None, :, :end],
                attn_mask=mask,
                is_causal=start == 0 and n > 1,
                scale=layer.scale,
                enable_gqa=True,
            )
            x = layer.out.plus(seen[0].transpose(0, 1).reshape(n, self.heads * dim), x)
            y = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, layer.mlp_eps)
            x = layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)
        states[len(self.layers)] = x
        last = F.rms_norm(x[n - keep :], self.norm.shape, self.norm, self.eps)
        return self.head(last), torch.cat([states[i] for i in self.layer_ids], dim=-1)

    def fork(self) -> Self:
        """The same packed weights with a cache of their own."""
        other = copy.copy(self)
        other.layers = [replace(layer, keys=torch.zeros_like(layer.keys), values=torch.zeros_like(layer.values)) for layer in self.layers]
        return other

    def _layer(self, layer: Any, max_length: int, half: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        # Row order within a head of q and k: halves interleaved, so that rotated pairs lie side by side as complex
        # numbers do. Dot products of q and k do not change when both are permuted alike.
        order = torch.arange(self.dim).view(2, -1).T.flatten()
        rotated = (self.heads + self.kv_heads) * self.dim
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        rows = torch.cat([(torch.arange(rotated).view(-1, self.dim)[:, order]).flatten(), torch.arange(rotated, rotated + self.kv_heads * self.dim)])
        weight = torch.cat([m.weight.detach() for m in qkv])[rows]
        bias = None if qkv[0].bias is None else torch.cat([m.bias.detach() for m in qkv])[rows]
        qk_norm = None
        if hasattr(attention, "q_norm"):
            parts = [attention.q_norm.weight.detach()[order].expand(self.heads, -1), attention.k_norm.weight.detach()[order].expand(self.kv_heads, -1)]
            qk_norm = (torch.cat(parts), _epsilon(attention.q_norm))
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            input_eps=_epsilon(layer.input_layernorm),
            qkv=PackedLinear(weight, bias, half=half),
            qk_norm=qk_norm,
            scale=float(attention.scaling),
            out=PackedLinear(attention.o_proj.weight, attention.o_proj.bias, half=half),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            mlp_eps=_epsilon(layer.post_attention_layernorm),
            gate=PackedLinear(mlp.gate_proj.weight, mlp.gate_proj.bias, half=half),
            up=PackedLinear(mlp.up_proj.weight, mlp.up_proj.bias, half=half),
            down=PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias, half=half),
            keys=torch.zeros(self.kv_heads, max_length, self.dim),
            values=torch.zeros(self.kv_heads, max_length, self.dim),
        )


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
