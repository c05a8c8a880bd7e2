"""TargetSession: batch-1 incremental decoding of a target that also yields its captured layer states.

Three engines stand behind it. `lean` (see `target.lean`) runs Llama-like float32 models on a CPU with few operations and
packed weights; `generic` and `recurrent` (see `target.generic`) run any Transformers causal model, the latter those with recurrent
layers. `auto` takes the lean one where the model's structure allows it. Every engine must equal the model's own logits and states on a probe.

In float32 a token's logits may differ in the last bits between a step of one token and a step of many, because matrix
kernels add in another order. Greedy outputs differ only where two tokens tie within that rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from firesteel.errors import TargetError
from firesteel.kernels.linear import preferred
from firesteel.kernels.memory import holds_again
from firesteel.kernels.packed import pack_linears
from firesteel.target.generic import GenericDecoder, RecurrentDecoder, has_states
from firesteel.target.lean import UNFIT, LeanDecoder, lean_refusal
from firesteel.target.local import capture, stack_layers
from firesteel.target.spec import check_layer_ids

RECURRENT = "recurrent"
"""The engine of targets whose cache is a state, which cannot be cut off: it is copied, and accepted tokens are read again."""
_PROBE_TOKENS = 12
# Largest difference to the model's own result that counts as rounding, as a share of the largest value.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class StepOutput:
    """What a forward pass over n tokens gives.

    Attributes:
        logits: `[keep, V]` float32, of the last `keep` tokens.
        aux: `[n, m * d]` captured states of all n tokens, layer after layer, in the target's dtype.
    """

    logits: Tensor
    aux: Tensor


class _Engine(Protocol):
    def forward(self, tokens: Tensor, start: int, keep: int) -> tuple[Tensor, Tensor]:
        """Run `tokens` after the first `start` cached positions, forgetting any later ones."""
        ...

    def fork(self) -> Self:
        """The same weights with a cache of their own."""
        ...


class TargetSession:
    """One sequence being decoded by a target; made once and rewound to 0 between prompts.

    Args:
        model: a Transformers causal model in evaluation mode.
        layer_ids: captured layers; id i is the residual stream before layer i (`hidden_states[i]`), the number of
            layers is the stream after the last one, before the final norm.
        max_length: positions that a sequence may have, prompt included.
        engine: `auto`, `lean`, or `generic` for Transformers' own forward pass. `engine_name` tells what it became.

    Raises:
        RecipeError: a layer that the target does not have.
        TargetError: decoding step by step differs from the target's own pass, or an engine asked for by name does not fit.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], *, max_length: int, engine: Literal["auto", "lean", "generic"] = "auto") -> None:
        ids = tuple(layer_ids)
        check_layer_ids(ids, int(model.config.get_text_config().num_hidden_layers))
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length
        if max_length > limit:
            raise TargetError(
                f"a sequence of {max_length} tokens exceeds the {limit} positions of the target", mend="lower the number of new tokens or shorten the prompts"
            )
        self.layer_ids = ids
        self.max_length = max_length
        self.length = 0
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.engine_name, self._engine = _choose(model, ids, max_length, engine)

    def forward(self, tokens: Sequence[int] | Tensor, *, keep: int | None = None) -> StepOutput:
        """Append `tokens` to the sequence.

        Args:
            tokens: n token ids.
            keep: how many of the last tokens need logits; None is all.

        Raises:
            TargetError: the sequence would outgrow `max_length`.
        """
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.device)
        n = int(ids.shape[0])
        if self.length + n > self.max_length:
            raise TargetError(
                f"{self.length} + {n} tokens exceed the session's {self.max_length} positions", mend="shorten the prompt or lower the number of new tokens"
            )
        logits, aux = self._engine.forward(ids, self.length, n if keep is None else keep)
        self.length += n
        return StepOutput(logits.float(), aux)

    def fork(self) -> TargetSession:
        """An empty session for another sequence; weights are shared."""
        other = copy.copy(self)
        other.length, other._engine = 0, self._engine.fork()
        return other

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise TargetError(f"cannot rewind to {length}: the sequence has {self.length} tokens")
        self.length = length


def _choose(model: Any, layer_ids: tuple[int, ...], max_length: int, wanted: str) -> tuple[str, _Engine]:
    if wanted != "generic":
        engine, why = _try_lean(model, layer_ids, max_length)
        if engine is not None:
            return "lean", engine
        if wanted == "lean":
            raise TargetError(f"this target cannot run on the lean engine: {why}", mend="use the engine `auto` or `generic`")
    dtype = model.get_input_embeddings().weight.dtype
    name, kind = (RECURRENT, RecurrentDecoder) if has_states(model) else ("generic", GenericDecoder)
    if dtype == torch.float32 and _packable(model) and (twin := _packed_copy(model)) is not None:
        packed = kind(twin, layer_ids)
        if _difference(packed, model, layer_ids, max_length) <= _TOLERANCE[dtype]:
            return name, packed
    plain = kind(model, layer_ids)
    if (off := _difference(plain, model, layer_ids, max_length)) > _TOLERANCE.get(dtype, 5e-2):
        raise TargetError(
            f"decoding step by step with this target differs from its forward pass over the whole text (by {off:.1e} of the largest value)",
            mend="its cache cannot be rewound exactly; use a target with plain attention layers",
        )
    return name, plain


def _try_lean(model: Any, layer_ids: tuple[int, ...], max_length: int) -> tuple[_Engine | None, str]:
    if why := lean_refusal(model, max_length):
        return None, why
    if not holds_again(model.parameters()):
        return None, "packed weights would not fit into memory"
    try:
        lean = LeanDecoder(model, layer_ids, max_length)
        off = _difference(lean, model, layer_ids, max_length)
    except UNFIT as e:
        # Structure looked right, but a detail did not fit: the generic engine is always correct.
        return None, str(e)
    return (lean, "") if off <= _TOLERANCE[torch.float32] else (None, f"its results differ from the model's by {off:.1e} of the largest value")


def _difference(engine: _Engine, model: Any, layer_ids: tuple[int, ...], max_length: int) -> float:
    """Largest difference to the model's own pass, as a share of the largest value, over a probe with rewinds and steps of 1 and more."""
    n = min(_PROBE_TOKENS, max_length)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(0)).to(model.get_input_embeddings().weight.device)
    with torch.inference_mode(), capture(model, layer_ids) as states:
        logits = model(tokens[None], use_cache=False).logits[0]
        aux = stack_layers(states, layer_ids)[0].flatten(1)
    worst = 0.0
    for begin, end in ((0, n), (n // 2, n // 2 + 1), (n // 2 + 1, n), (n // 3, n)):
        if begin >= end:
            continue
        got = engine.forward(tokens[begin:end], begin, end - begin)
        for mine, own in zip(got, (logits, aux), strict=True):
            off = (mine.float() - own[begin:end].float()).abs().max() / own.float().abs().max().clamp_min(1e-30)
            # A NaN must not pass for equality.
            worst = max(worst, float(off) if bool(torch.isfinite(off)) else float("inf"))
    return worst


def _packable(model: Any) -> bool:
    if getattr(model.config, "quantization_config", None) is not None:  # its linear layers do more than their weights tell
        return False
    return torch.backends.mkldnn.is_available() and all(w.device.type == "cpu" for w in model.parameters()) and holds_again(model.parameters())


def fast_twin(model: Any, *, half: bool = False) -> Any:
    """The model to run long texts through: with packed linear layers where that is faster and fits into memory, else the model itself.

    `half`: the products of a float32 model run in bfloat16; what passes from layer to layer stays float32.
    """
    fits = model.get_input_embeddings().weight.dtype == torch.float32 and (half or preferred() == "onednn") and _packable(model)
    twin = _packed_copy(model, rows=256, half=half) if fits else None
    return model if twin is None else twin


def _packed_copy(model: Any, rows: int = 8, *, half: bool = False) -> Any | None:
    """The same model with packed linear layers; all other parameters and buffers are shared, and the original stays as it is.

    None where other code of the model reads a linear layer's weight (GLM-5 unfolds its latent projection so): a packed one has none.
    """
    shared: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    twin = pack_linears(copy.deepcopy(model, shared), rows, half=half)
    try:
        with torch.inference_mode():
            twin(torch.tensor([[0, 1]]), use_cache=False)
    except AttributeError:
        return None
    return twin
