"""The local engine: the target in this process, through Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.errors import RecipeError
from firesteel.target.head import TargetHead, decoder, final_norm, make_head
from firesteel.target.loading import Digest, WeightFiles, eos_ids, load_model, load_tokenizer, name_weights, resolve_target
from firesteel.target.spec import TargetSpec, check_layer_ids, default_layer_ids, read_spec, weights_checksum


@dataclass
class LocalTarget:
    """A loaded, frozen target with its tokenizer and head."""

    spec: TargetSpec
    model: Any
    tokenizer: Any
    head: TargetHead

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def layers(self) -> nn.ModuleList:
        return decoder(self.model).layers

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model, as Transformers writes it."""
        return self.model.config.get_text_config().to_dict()

    @property
    def norm_weight(self) -> Tensor:
        """`[d]` what the final norm multiplies by.

        Raises:
            RecipeError: it is not an RMSNorm.
        """
        return self.head.norm.get_parameter("weight").detach() + self._norm_offset()

    def layer_weights(self, first: int, count: int) -> list[dict[str, Tensor]]:
        """State dicts of `count` layers from layer `first` on, for a drafter to copy: norms hold what they multiply by.

        Raises:
            RecipeError: the target's norms are not RMSNorm.
        """
        offset = self._norm_offset()
        states = [layer.state_dict() for layer in self.layers[first : first + count]]
        return [{n: t + offset if n.endswith("norm.weight") else t for n, t in state.items()} for state in states]

    def checksum(self) -> str:
        """Hash over every bit of the weights in memory."""
        return weights_checksum(self.model)

    def _norm_offset(self) -> float:
        if self.spec.norm_offset is None:
            raise RecipeError("drafter.init=target: the target's norms are not the RMSNorm that a drafter has", mend="set drafter.init=random")
        return self.spec.norm_offset

    def layer_ids(self, wanted: list[int] | str) -> tuple[int, ...]:
        """The recipe's `target.layer_ids`, checked; `auto` becomes the default picks."""
        ids = default_layer_ids(self.spec.num_layers) if isinstance(wanted, str) else tuple(wanted)
        check_layer_ids(ids, self.spec.num_layers)
        return ids


def load_target(settings: recipes.Target, digest: Digest | None = None) -> LocalTarget:
    """Load model, tokenizer and head as the recipe says.

    Args:
        digest: needed for the fingerprint that all of a line agree on (`name_weights`); without it the loaded parameters are fingerprinted.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    path = resolve_target(settings)
    tokenizer = load_tokenizer(path, settings)
    model = load_model(path, settings)
    mark = None if digest is None else name_weights(model, WeightFiles(path, settings), settings, digest)
    spec = read_spec(model, settings.model, eos_ids(model, tokenizer), mark)
    return LocalTarget(spec, model, tokenizer, make_head(model, spec.logit_scale, spec.softcap))


@contextmanager
def capture(model: Any, layer_ids: Sequence[int]) -> Iterator[dict[int | str, Tensor]]:
    """While open, every forward pass leaves the wanted residual streams in the yielded dict.

    Key i is the stream before layer i (0 = embeddings; the number of layers = after the last one); key `last` is
    the stream before the final norm. Shapes `[batch, T, d]`.
    """
    states: dict[int | str, Tensor] = {}
    layers: nn.ModuleList = decoder(model).layers
    handles = [_on_input(layers[i], states, i) for i in layer_ids if i < len(layers)]
    # The final norm's input is the stream after all layers: it serves `last` and the id after the last layer.
    handles.append(_on_input(final_norm(model), states, "last"))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def stack_layers(states: dict[int | str, Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Captured streams side by side: `[batch, T, m, d]`."""
    return torch.stack([states[i] if i in states else states["last"] for i in layer_ids], dim=-2)


def _on_input(module: nn.Module, states: dict[int | str, Tensor], key: int | str) -> Any:
    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[key] = (args[0] if args else kwargs["hidden_states"]).detach()

    return module.register_forward_pre_hook(keep, with_kwargs=True)
