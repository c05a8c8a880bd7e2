"""A target of which only the ends are loaded is the same target; its layers come when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_targets import folder_with, int4_folder
from safetensors.torch import load_file, save_file
from target_families import FAMILIES, VOCABULARY, make_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from firesteel.errors import TargetError
from firesteel.hidden.weights import weights_digest
from firesteel.recipe import Target, recipe_from_dict
from firesteel.stages.line import Bar, Line
from firesteel.target.front import FrontTarget, load_front
from firesteel.target.local import LocalTarget, load_target
from firesteel.target.spec import fingerprint

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}


def save_tokenizer(folder: Path, words: int) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")), eos_token="w2")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


def save_target(folder: Path, kind: str, tied: bool, shards: str = "5GB") -> Path:
    torch.manual_seed(0)
    config, model = (LlamaConfig, LlamaForCausalLM) if kind == "llama" else (GraniteConfig, GraniteForCausalLM)
    made = model(config(**SIZES, tie_word_embeddings=tied, eos_token_id=2))  # type: ignore[arg-type]
    with torch.no_grad():
        made.model.norm.weight.uniform_(0.5, 2)
    made.save_pretrained(folder, max_shard_size=shards)
    save_tokenizer(folder, 50)
    return folder


def save_family(folder: Path, name: str, **how: Any) -> Target:
    """A tiny target of a family, with layers, embedding, norm and head that all differ."""
    make_model(name).save_pretrained(folder, **how)
    save_tokenizer(folder, VOCABULARY)
    return Target(model=str(folder), device="cpu", threads=1)


def change(settings: Target, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a folder's one file."""
    file = Path(settings.model) / "model.safetensors"
    tensors = {n: t.clone() for n, t in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def ends(settings: Target) -> FrontTarget:
    front = load_front(settings, weights_digest)
    assert front is not None
    return front


def check_same(settings: Target) -> tuple[FrontTarget, LocalTarget]:
    """The ends alone are those of the loaded target, which has the same facts."""
    front, whole = ends(settings), load_target(settings, weights_digest)
    assert front.spec == whole.spec
    last = torch.randn(5, whole.spec.hidden_size)
    assert torch.equal(front.head.states(last.to(front.head.weight.dtype)), whole.head.states(last.to(whole.head.weight.dtype)))
    assert torch.equal(front.head.logits(last), whole.head.logits(last))
    assert torch.equal(front.head.embed, whole.head.embed)
    assert not front.head.weight.requires_grad
    assert "model" not in vars(front)
    return front, whole


@pytest.mark.parametrize(("kind", "tied", "shards"), [("llama", True, "5GB"), ("llama", False, "5KB"), ("granite", False, "5GB")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ends_are_those_of_the_loaded_target(tmp_path: Path, kind: str, tied: bool, shards: str, dtype: str) -> None:
    settings = Target(model=str(save_target(tmp_path, kind, tied, shards)), dtype=dtype, device="cpu", threads=1)  # type: ignore[arg-type]
    front, whole = check_same(settings)
    assert whole.spec.fingerprint == fingerprint(whole.model), "answers and packages that are out there name such targets so"
    assert front.text_config == whole.text_config
    before = front.checksum()
    assert [torch.equal(a[n], b[n]) for a, b in zip(front.layer_weights(1, 2), whole.layer_weights(1, 2), strict=True) for n in a].count(False) == 0
    assert "model" in vars(front)
    assert front.checksum() == before
    with torch.no_grad():
        front.head.weight[0, 0] += 1
    assert front.checksum() != before


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ends_of_every_family(name: str, tmp_path: Path) -> None:
    check_same(save_family(tmp_path, name))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "glm_moe_dsa"])
def test_experts_that_are_stored_one_by_one(name: str, tmp_path: Path) -> None:
    """As hub files have them; Transformers makes one tensor of all experts of a layer."""
    settings = save_family(tmp_path, name)
    (expert,) = [n for n in load_file(tmp_path / "model.safetensors") if n.endswith("layers.3.mlp.experts.2.up_proj.weight")]
    front, whole = check_same(settings)
    assert front.spec.fingerprint != fingerprint(whole.model)
    half = settings.model_copy(update={"dtype": "bfloat16"})
    assert ends(half).spec.fingerprint == front.spec.fingerprint
    loaded = dict(front.model.named_parameters())
    assert all(torch.equal(loaded[n], p) for n, p in whole.model.named_parameters())

    late = ends(settings)
    change(settings, lambda tensors: tensors[expert].add_(1))
    changed, _ = check_same(settings)
    assert changed.spec.fingerprint != front.spec.fingerprint
    with pytest.raises(TargetError, match="when loaded"):
        _ = late.model


def test_experts_that_are_stored_as_transformers_has_them(tmp_path: Path) -> None:
    settings = save_family(tmp_path, "qwen3_moe", save_original_format=False)
    assert any(n.endswith("experts.gate_up_proj") for n in load_file(tmp_path / "model.safetensors"))
    _, whole = check_same(settings)
    assert whole.spec.fingerprint == fingerprint(whole.model)


def test_weights_in_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    plain = make_model("llama")
    settings = int4_folder(tmp_path, plain)
    save_tokenizer(tmp_path, VOCABULARY)
    front, whole = check_same(settings)
    assert front.spec.fingerprint != fingerprint(whole.model)
    assert torch.equal(front.head.weight, plain.lm_head.weight)
    assert front.model.config.get_text_config().num_hidden_layers == front.spec.num_layers
    change(settings, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight_packed"].bitwise_xor_(1))
    assert ends(settings).spec.fingerprint != front.spec.fingerprint


def test_the_ends_need_no_package_of_a_quantised_format(tmp_path: Path) -> None:
    plain = make_model("llama")
    settings = folder_with(tmp_path, plain, {}, [], {"quant_method": "gptq", "bits": 4, "group_size": 16})
    save_tokenizer(tmp_path, VOCABULARY)
    front = ends(settings)
    assert torch.equal(front.head.weight, plain.lm_head.weight)
    with pytest.raises(TargetError, match="cannot be loaded"):
        _ = front.model


def in_a_wrapper(tensors: dict[str, Tensor]) -> None:
    """Names as in Kimi K2.5's files, and parts for further tokens that have ends of their own."""
    norm, table = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    tensors["mtp.norm.weight"] = norm + 1
    tensors["language_model.model.layers.61.embed_tokens.weight"] = table + 1
    tensors["vision_tower.norm.weight"] = norm[:4].clone()


def test_ends_with_other_names_are_known_by_how_they_end(tmp_path: Path) -> None:
    settings, plain = save_family(tmp_path, "llama"), make_model("llama")
    change(settings, in_a_wrapper)
    front = ends(settings)
    assert torch.equal(front.head.embed, plain.model.embed_tokens.weight)
    assert torch.equal(front.head.weight, plain.lm_head.weight)
    assert torch.equal(front.head.norm.get_parameter("weight"), plain.model.norm.weight)


def without_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def packed_head(tensors: dict[str, Tensor]) -> None:
    head = tensors.pop("lm_head.weight")
    tensors["lm_head.weight_packed"] = torch.zeros(head.shape[0], head.shape[1] // 8, dtype=torch.int32)
    tensors["lm_head.weight_scale"] = torch.ones(head.shape[0], 2)


def eight_bit_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale_inv"] = torch.ones(1, 1)


def without_embedding(tensors: dict[str, Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]


def two_norms(tensors: dict[str, Tensor]) -> None:
    norm = tensors.pop("model.norm.weight")
    tensors |= {"a.norm.weight": norm, "b.norm.weight": norm.clone()}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without_head, r"lm_head\.weight is not in its files;"),
        (packed_head, r"lm_head\.weight is not in its files, which have lm_head\.weight_packed, lm_head\.weight_scale;"),
        (eight_bit_head, r"lm_head\.weight is F8_E4M3 \[128, 32\] in its files"),
        (without_embedding, r"model\.embed_tokens\.weight is not in its files;"),
        (two_norms, r"model\.norm\.weight is not in its files, which have a\.norm\.weight, b\.norm\.weight;"),
    ],
)
def test_ends_that_are_no_plain_tensors_are_named(tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], said: str) -> None:
    settings = save_family(tmp_path, "qwen3_moe")
    change(settings, edit)
    with pytest.raises(TargetError, match=said) as caught:
        load_front(settings, weights_digest)
    assert "target.engine=vllm needs embedding, final norm and LM head as plain tensors" in str(caught.value)
    assert "target.engine=local" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "llama", False, "5KB")
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(TargetError, match=f"{gone.name} is not there"):
        load_front(Target(model=str(folder), device="cpu", threads=1), weights_digest)


def test_layers_that_changed_since_are_not_taken(tmp_path: Path) -> None:
    settings = Target(model=str(save_target(tmp_path, "llama", True)), device="cpu", threads=1)
    front = ends(settings)
    change(settings, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].add_(1))
    with pytest.raises(TargetError, match="when loaded"):
        _ = front.model


def test_layers_that_the_files_do_not_have_are_missed_when_they_are_asked_for(tmp_path: Path) -> None:
    settings = save_family(tmp_path, "llama")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("mlp", "feed_forward")] = tensors.pop(name)

    change(settings, rename)
    front = ends(settings)
    with pytest.raises(TargetError, match="weights are not in its files"):
        _ = front.model


class Screen:
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        raise AssertionError("a target has no bar")
        yield


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_target_that_must_be_loaded_whole_says_what_that_costs(tmp_path: Path, kind: str) -> None:
    folder = save_target(tmp_path / "target", "llama", False)
    if kind == "bin":
        file = folder / "model.safetensors"
        torch.save({n: t.clone() for n, t in load_file(file).items()}, folder / "pytorch_model.bin")
        file.unlink()
    screen = Screen()
    settings = {"model": str(folder), "engine": "vllm", "device": "cpu", "threads": 1}
    target = Line(recipe_from_dict({"runs_dir": str(tmp_path / "runs"), "train": {"max_steps": 1}, "target": settings}), screen).target
    if kind == "bin":
        assert load_front(Target(model=str(folder), device="cpu", threads=1), weights_digest) is None
        (warning,) = screen.warnings
        assert "no safetensors" in warning
        assert "every process loads all its layers" in warning
        assert target.spec.fingerprint == fingerprint(target.model)
    else:
        assert isinstance(target, FrontTarget)
        assert not screen.warnings
