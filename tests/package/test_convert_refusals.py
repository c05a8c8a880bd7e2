"""What a conversion will not guess: each doubt is one error that names the file, both values and what to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from convert_cases import DEEPSPEC, SPECFORGE, ZLAB, deepspec, eagle, opened, refused, save, specforge, target_tables, vocabulary, zlab
from package_toys import CONFIGS, DSPARK, edit, toy_export
from safetensors.torch import load_file

from firesteel.errors import CheckpointError, RecipeError
from firesteel.package.convert.convert import TargetTables, write
from firesteel.package.convert.fields import read_overrides

SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    folder = eagle(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    message = refused(folder, "layer_ids=[1,3,4]")
    assert f"{name} is a pickle" in message
    assert not Path("opened").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, ["Gemma4DSparkModel", "Qwen3DSparkModel"]),
        ({"architectures": ["Qwen3DSparkModel", "DFlashDraftModel"]}, ["architectures"]),
        ({"dflash_config": {}}, ["with dflash_config"]),
        ({"scale_residual": 0.5}, ["scale_residual is 0.5", "ignore=[scale_residual]"]),
        ({"sample_from_anchor": False}, ["sample_from_anchor is False", "sample_from_anchor=True"]),
        ({"is_causal": True}, ["causal is True", "causal=False"]),
        ({"markov_head_type": None}, ["markov_rank is 6", "markov_head_type is not there"]),
        ({"markov_head_type": "conv"}, ["conv"]),
        ({"markov_rank": 0, "markov_head_type": None}, ["markov_rank is 0", "no Markov embedding"]),
        ({"markov_rank": 8}, ["[40, 6]", "[40, 8]"]),
        ({"markov_rank": "6"}, ["markov_rank is '6', not int"]),
        ({"target_layer_ids": None}, ["target_layer_ids", "layer_ids=[...]"]),
        ({"target_layer_ids": [3, 1]}, ["[4, 2]", "not ascending"]),
        ({"target_layer_ids": [0, 2, 6]}, ["[1, 3, 7]", "layers of 6"]),
        ({"target_layer_ids": [0, 2, 5]}, ["has 5, the last of 6 layers", "final norm"]),
        ({"mask_token_id": None}, ["mask_token_id", "mask_token_id=VALUE"]),
        ({"mask_token_id": 40}, ["mask_token_id=40"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"model_type": "mamba"}, ["model_type", "mamba"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"head_dim": None}, ["head_dim"]),
        ({"dtype": "bfloat16"}, ["dtype is 'bfloat16'", "torch.float32", "ignore=[dtype]"]),
        ({"torch_dtype": "float16"}, ["dtype is 'float32'", "torch_dtype is 'float16'"]),
        ({"rope_theta": None}, ["rope_theta"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ["rope_theta is 5000.0", "rope_parameters.rope_theta is 1000000.0"]),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_parameters is", "rope_scaling is"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "not what Firesteel's engine applies"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, ["mrope_section", "plain text"]),
        ({"use_sliding_window": True, "sliding_window": 16}, ["use_sliding_window is True", "16", "no sliding layer"]),
        ({**SLIDING, "sliding_window": None}, ["sliding_window is None"]),
        (SLIDING, ["layer_types", "no window"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_deepspec_fields(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refused(deepspec(tmp_path, **change))
    assert str(tmp_path / "config.json") in message or "model.safetensors" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shift_label": True}, ["shift_label is True", "which token a slot predicts is not known"]),
        ({"projector_type": "domino"}, ["'domino'", "DFlashDraftModel"]),
        ({"markov_rank": 4, "markov_head_type": "vanilla"}, ["markov_rank is 4", "has no heads"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor is True", "k after the anchor"]),
        ({"block_size": 8}, ["block_size is 4", "dflash_config.block_size is 8"]),
        ({"attention_mode": "mha"}, ["'mha'", "'gqa'"]),
        ({"pure_draft_prefix_len": 1}, ["pure_draft_prefix_len is 1"]),
        ({"window_bias": 3}, ["dflash_config.window_bias is 3"]),
    ],
)
def test_dflash_conventions(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    message = refused(zlab(tmp_path, dflash_config={**ZLAB["dflash_config"], **change}))
    for word in words:
        assert word in message


def test_sliding_layers_of_dflash(tmp_path: Path) -> None:
    assert "does not say causal" in refused(zlab(tmp_path / "a", **SLIDING))
    mixed = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
    assert "full ones are not" in refused(zlab(tmp_path / "b", **mixed), "causal=true")
    assert opened(tmp_path / "b", "causal=false").config.causal is False


def test_layer_ids_of_file_and_user_must_agree(tmp_path: Path) -> None:
    folder = zlab(tmp_path / "a")
    assert "is [0, 2, 3], that is layer_ids=[1, 3, 4], but layer_ids=[0, 2, 3] was given" in refused(folder, "layer_ids=[0,2,3]")
    assert opened(folder, "layer_ids=[1,3,4]").config.layer_ids == (1, 3, 4)
    silent = {k: v for k, v in ZLAB["dflash_config"].items() if k != "target_layer_ids"}
    assert opened(zlab(tmp_path / "b", dflash_config=silent), "layer_ids=[1,3,4]").config.layer_ids == (1, 3, 4)


def test_an_absent_slot_convention_must_be_said(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    (tmp_path / "firesteel.json").unlink()
    edit(tmp_path / "config.json", {}, drop=("sample_from_anchor",))
    assert "sample_from_anchor" in refused(tmp_path)
    assert opened(tmp_path, "sample_from_anchor=true").config == DSPARK
    assert opened(deepspec(tmp_path / "x"), "sample_from_anchor=true").config.sample_from_anchor
    toy_export(tmp_path / "y", DSPARK)
    assert "sample_from_anchor is True, but sample_from_anchor=False was given" in refused(tmp_path / "y", "sample_from_anchor=false")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"t2d": vocabulary()["t2d"]}, ["lacks d2t", "10 of 40"]),
        ({"d2t": vocabulary()["d2t"]}, ["lacks t2d"]),
        ({**vocabulary(), "d2t": vocabulary()["d2t"] + 1}, ["d2t", "from 1 to 40", "ends at 39"]),
        ({**vocabulary(), "d2t": torch.zeros(10, dtype=torch.int64) - torch.arange(10)}, ["d2t", "without repetition"]),
        ({**vocabulary(), "d2t": vocabulary()["d2t"] + torch.arange(10)}, ["d2t"]),
        ({**vocabulary(), "t2d": ~vocabulary()["t2d"]}, ["d2t names 10", "t2d marks 30"]),
        ({**vocabulary(), "d2t": vocabulary()["d2t"][:9]}, ["shape [9]"]),
    ],
    ids=["no d2t", "no t2d", "out of range", "not injective", "ids for offsets", "t2d", "short"],
)
def test_vocabulary_tables(tables: dict[str, torch.Tensor], words: list[str], tmp_path: Path) -> None:
    message = refused(eagle(tmp_path, tables), "layer_ids=[1,3,4]")
    for word in words:
        assert word in message


def test_tensors(tmp_path: Path) -> None:
    tensors = load_file(zlab(tmp_path / "a") / "model.safetensors")
    assert "lacks hidden_norm.weight" in refused(save(tmp_path / "b", ZLAB, {n: t for n, t in tensors.items() if n != "hidden_norm.weight"}))
    assert "holds layers.0.g.weight" in refused(save(tmp_path / "c", ZLAB, tensors | {"layers.0.g.weight": torch.zeros(2)}))
    assert "norm.weight is not finite" in refused(save(tmp_path / "d", ZLAB, tensors | {"norm.weight": torch.full((24,), float("inf"))}))
    assert "norm.weight is torch.float16" in refused(save(tmp_path / "e", ZLAB, tensors | {"norm.weight": torch.ones(24, dtype=torch.float16)}))


def test_wrong_targets(tmp_path: Path) -> None:
    target = target_tables()
    for change, what in (({"vocab_size": 44}, "vocabulary is 40"), ({"hidden_size": 32}, "hidden size is 24"), ({"num_layers": 8}, "number of layers is 6")):
        other = TargetTables(type(target.spec)(**{**target.spec.to_dict(), **change}), target.embed, target.head)
        assert f"whose {what}, that of acme/tiny-chat is {next(iter(change.values()))}" in refused(zlab(tmp_path), target=other)
    silent = {k: v for k, v in ZLAB.items() if k != "num_target_layers"}
    short = TargetTables(type(target.spec)(**{**target.spec.to_dict(), "num_layers": 3}), target.embed, target.head)
    assert "[1, 3, 4]" in refused(save(tmp_path / "b", silent, load_file(tmp_path / "model.safetensors")), target=short)
    toy_export(tmp_path / "ours", DSPARK)
    other = TargetTables(type(target.spec)(**{**target.spec.to_dict(), "fingerprint": "f" * 16}), target.embed, target.head)
    assert "fingerprint is 0123456789abcdef" in refused(tmp_path / "ours", target=other)


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("fill-in", "deepspec", "sample_from_anchor is False"),
        ("full-causal", "deepspec", "causal is True"),
        ("mixed", "deepspec", "layer_types is"),
        ("reduced", "sglang", "draft_vocab_size is 10 of 40"),
        ("vanilla", "deepspec", "layer_ids has 6 of 6"),
        ("eagle3", "deepspec", "algorithm is 'eagle3'"),
        ("peagle", "sglang", "has no peagle"),
        ("vanilla", "torch", "no layout 'torch'"),
    ],
)
def test_drafters_that_a_layout_cannot_say(name: str, to: str, words: str, tmp_path: Path) -> None:
    toy_export(tmp_path / "ours", CONFIGS[name])
    with pytest.raises(CheckpointError, match=words):
        write(opened(tmp_path / "ours"), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_not_written_over(tmp_path: Path) -> None:
    folder = zlab(tmp_path)
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write(opened(folder), folder, "speculators")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer_id=[1]", "layer_ids="),
        ("layer_ids", "layer_ids"),
        ("causal=1", "not bool"),
        ("layer_ids=[a, 1.5]", "whole numbers"),
        ("block_size=four", "not int"),
    ],
)
def test_overrides_are_checked(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        read_overrides([text])


def test_an_override_without_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="norm_output=True was given"):
        opened(zlab(tmp_path), "norm_output=true")


def test_known_harmless_fields_can_be_ignored(tmp_path: Path) -> None:
    assert opened(deepspec(tmp_path / "a", new_field=3), "ignore=[new_field]").config.block_size == DEEPSPEC["block_size"]
    nested = {**SPECFORGE["dflash_config"], "note": "x"}
    assert opened(specforge(tmp_path / "b", dflash_config=nested), "ignore=[dflash_config.note]").config.markov_rank == 6


@pytest.mark.parametrize("place", ["residual_scale", "transformer_layer_config.qk_clip", "markov_bias"])
def test_a_speculators_file_has_no_unknown_fields(place: str, tmp_path: Path) -> None:
    """`load` alone does not look at them: engines do not either, and a server must not fail for a field that a trainer left."""
    toy_export(tmp_path, DSPARK)
    edit(tmp_path / "config.json", {place: 0.5})
    message = refused(tmp_path)
    assert f"config.json: {place} is 0.5, a field that Firesteel does not know" in message
    assert f"ignore=[{place}]" in message
    assert opened(tmp_path, f"ignore=[{place}]").config == DSPARK


def test_what_transformers_writes_beside_the_shape_is_harmless(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    written = {"_name_or_path": "x", "transformers_version": "5.19.0", "auto_map": {"": "config.X"}, "tie_word_embeddings": False, "torch_dtype": "float32"}
    layers = {"initializer_range": 0.02, "use_cache": True, "bos_token_id": 1, "eos_token_id": [2], "pretraining_tp": 1, "transformers_version": "5.19.0"}
    edit(tmp_path / "config.json", {**written, **{f"transformer_layer_config.{name}": value for name, value in layers.items()}})
    assert opened(tmp_path).config == DSPARK


@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_of_ours_converts_without_a_word(name: str, tmp_path: Path) -> None:
    toy_export(tmp_path, CONFIGS[name])
    (tmp_path / "firesteel.json").unlink()
    assert opened(tmp_path).config.layer_ids == CONFIGS[name].layer_ids


def test_an_unknown_kind_of_speculators_file_is_named(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    edit(tmp_path / "config.json", {"speculators_model_type": "medusa", "medusa_heads": 4})
    assert "speculators_model_type is 'medusa'" in refused(tmp_path)
