"""A target of which only the ends are loaded: embedding, final norm and LM head, from its files. Its layers come when somebody needs them.

With `target.engine: vllm` servers run the layers; checking samples and training a drafter takes only the ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from firesteel import recipe as recipes
from firesteel.errors import TargetError
from firesteel.target.head import TargetHead, final_norm, make_head
from firesteel.target.loading import eos_ids, load_empty, load_model, load_tokenizer, pick_device, resolve_target
from firesteel.target.local import LocalTarget
from firesteel.target.spec import TargetSpec, fingerprint, read_spec, weights_checksum


class FrontTarget(LocalTarget):
    """The ends of a target; `model`, and what is made of it, loads the whole."""

    def __init__(self, spec: TargetSpec, tokenizer: Any, head: TargetHead, config: Any, load: Callable[[], Any]) -> None:
        self.spec, self.tokenizer, self.head = spec, tokenizer, head
        self._config, self._load = config, load

    @functools.cached_property
    def model(self) -> Any:
        model = self._load()
        found = fingerprint(model)
        if found != self.spec.fingerprint:
            raise TargetError(
                f"target {self.spec.name} has fingerprint {found} when loaded, {self.spec.fingerprint} in its files", mend="set target.engine=local"
            )
        return model

    @property
    def text_config(self) -> dict[str, Any]:
        return self._config.get_text_config().to_dict()

    def checksum(self) -> str:
        """Of the ends alone, whether or not the layers were loaded meanwhile: training reads nothing else."""
        ends = nn.ParameterList([nn.Parameter(t, requires_grad=False) for t in (self.head.weight, self.head.embed)])
        return weights_checksum(nn.ModuleList([self.head.norm, ends]))


def load_front(settings: recipes.Target) -> FrontTarget | None:
    """Load the ends of a target; None where its files do not name its weights as Transformers does, so that only loading it tells what they are.

    Raises:
        TargetError: the files cannot be read.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    path = resolve_target(settings)
    model = load_empty(path, settings)
    files = _Files(path, settings.revision)
    if getattr(model.config, "quantization_config", None) is not None or not files.names:
        return None
    device, dtype = pick_device(settings.device), model.dtype

    def read(name: str) -> Tensor:
        tensor = files.read(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    try:
        mark = fingerprint(model, read)
        _fill(model, read, device)
    except KeyError:
        return None
    tokenizer = load_tokenizer(path, settings)
    spec = read_spec(model, settings.model, eos_ids(model, tokenizer), mark)
    return FrontTarget(spec, tokenizer, make_head(model, spec.logit_scale, spec.softcap), model.config, lambda: load_model(path, settings))


def _fill(model: Any, read: Callable[[str], Tensor], device: torch.device) -> None:
    """Put real tensors into the ends of a model that has none."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (model.get_input_embeddings(), final_norm(model), model.get_output_embeddings()):
        for name, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                full = f"{names[id(module)]}.{name}"
                module.load_state_dict({name: _tied(model, full, read).to(device)}, strict=False, assign=True)
        module.requires_grad_(False)
    model.eval()


def _tied(model: Any, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """A weight of the files; an LM head that is tied to the embedding is that one."""
    try:
        return read(name)
    except KeyError:
        if model.get_output_embeddings().weight.shape == model.get_input_embeddings().weight.shape and model.config.get_text_config().tie_word_embeddings:
            return model.get_input_embeddings().weight
        raise


class _Files:
    """Tensors of a folder's, or a cached hub model's, safetensors by name; read when asked for."""

    def __init__(self, path: str, revision: str | None) -> None:
        folder = Path(path)
        if not folder.is_dir():
            config = cached_file(path, "config.json", revision=revision)
            folder = Path(config).parent
        self.names: dict[str, Any] = {}
        try:
            for file in sorted(folder.glob("*.safetensors")):
                opened = safe_open(file, framework="pt")
                self.names.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as e:
            raise TargetError(f"target.model={path}: its weights cannot be read: {e}", mend="fetch the folder again") from e

    def read(self, name: str) -> Tensor:
        return self.names[name].get_tensor(name)
