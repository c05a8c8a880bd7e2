"""A target of which only the ends are loaded: embedding, final norm and LM head, from its files. Its layers come when somebody needs them.

With `target.engine: vllm` servers run the layers; checking samples and training a drafter takes only the ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.errors import TargetError
from firesteel.target.head import TargetHead, final_norm, make_head
from firesteel.target.loading import Digest, WeightFiles, eos_ids, load_empty, load_model, load_tokenizer, name_weights, pick_device, resolve_target
from firesteel.target.local import LocalTarget
from firesteel.target.spec import TargetSpec, read_spec, weights_checksum


class FrontTarget(LocalTarget):
    """The ends of a target; `model`, and what is made of it, loads the whole.

    Args:
        load: gives the whole model, and the fingerprint that it then has.
    """

    def __init__(self, spec: TargetSpec, tokenizer: Any, head: TargetHead, config: Any, load: Callable[[], tuple[Any, str]]) -> None:
        self.spec, self.tokenizer, self.head = spec, tokenizer, head
        self._config, self._load = config, load

    @functools.cached_property
    def model(self) -> Any:
        model, found = self._load()
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


def load_front(settings: recipes.Target, digest: Digest) -> FrontTarget | None:
    """Load the ends of a target; None where it has no safetensors, the only files that can be read in part.

    Raises:
        TargetError: the files cannot be read, or have one of the ends not as a plain tensor.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    path = resolve_target(settings)
    model = load_empty(path, settings)
    files = WeightFiles(path, settings)
    if not files.names:
        return None
    device, dtype = pick_device(settings.device), model.dtype

    def read(name: str) -> Tensor:
        tensor = files.read(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def load() -> tuple[Any, str]:
        whole = load_model(path, settings)
        return whole, name_weights(whole, WeightFiles(path, settings), settings, digest)

    mark = name_weights(model, files, settings, digest, read)
    _fill(model, files, settings.model, device)
    tokenizer = load_tokenizer(path, settings)
    spec = read_spec(model, settings.model, eos_ids(model, tokenizer), mark)
    return FrontTarget(spec, tokenizer, make_head(model, spec.logit_scale, spec.softcap), model.config, load)


def _fill(model: Any, files: WeightFiles, target: str, device: torch.device) -> None:
    """Put real tensors into the ends of a model that has none; an LM head that is tied and not in the files is the embedding."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head, dtype = model.get_input_embeddings(), model.get_output_embeddings(), model.dtype
    tied = head.weight is embedding.weight or (
        head.weight.shape == embedding.weight.shape and getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    )
    for module in (embedding, final_norm(model), head):
        for name, parameter in list(module.named_parameters()):
            if not parameter.is_meta:
                continue
            full, shape = f"{names[id(module)]}.{name}", tuple(parameter.shape)
            found = files.find(full, shape)
            shared = found is None and tied and module is head and name == "weight"
            tensor = embedding.weight if shared else _plain(files, target, full, found, shape).to(dtype)
            module.load_state_dict({name: tensor.to(device)}, strict=False, assign=True)
        module.requires_grad_(False)
    model.eval()


def _plain(files: WeightFiles, target: str, name: str, found: str | None, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the ends, `name` to Transformers and `found` in the files.

    Raises:
        TargetError: it is not there, or what is there is not the weight itself.
    """
    if found is not None and files.is_plain(found) and files.shape(found) == shape:
        return files.read(found)
    if found is not None:
        what = f"{found} is {files.dtype(found)} {list(files.shape(found))} in its files, not a plain tensor of {list(shape)}"
    else:
        like = files.like(name)
        what = f"{name} is not in its files" + (f", which have {', '.join(like[:4])}" if like else "")
    raise TargetError(
        f"target.model={target}: {what}; target.engine=vllm needs embedding, final norm and LM head as plain tensors",
        mend="set target.engine=local, or take a checkpoint whose embedding, final norm and LM head are not quantised",
    )
