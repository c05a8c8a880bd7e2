"""Whatever is wrong with a checkpoint is said, with both values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from package_toys import CONFIGS, DFLASH, DSPARK, edit, make_state, make_vocab, toy_contract, toy_export
from safetensors.torch import load_file, save_file

from firesteel.errors import CheckpointError, FiresteelError
from firesteel.package.export import export
from firesteel.package.load import load

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
# What a server would apply to these, and the engine here would not.
FOREIGN_ROPE: list[tuple[dict[str, Any], list[str]]] = [
    ({"rope_type": "dynamic", "factor": 2.0}, ["'dynamic'", "not what Firesteel's engine applies", "linear, llama3, yarn"]),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, ["'longrope'"]),
    ({"rope_type": "proportional"}, ["'proportional'"]),
    ({"rope_type": "linear", "factor": 2.0, "mrope_section": [2, 1, 1]}, ["'linear' with mrope_section"]),
    ({"rope_type": "yarn", "factor": 2.0, "mrope_interleaved": True}, ["'yarn' with mrope_interleaved"]),
    ({**LLAMA3, "partial_rotary_factor": 0.5}, ["'llama3' with partial_rotary_factor"]),
]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as e:
        load(folder)
    return str(e.value)


def foreign(folder: Path, name: str = "vanilla", dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint without a contract: config.json and the weights must do."""
    toy_export(folder, CONFIGS[name], dtype)
    (folder / "firesteel.json").unlink()
    return folder


def reweigh(folder: Path, change: dict[str, torch.Tensor], drop: tuple[str, ...] = ()) -> None:
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if k not in drop} | change
    save_file(tensors, folder / "model.safetensors")


def test_missing_files(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path)
    toy_export(tmp_path, DSPARK)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refusal(tmp_path)


@pytest.mark.parametrize("where", [0.02, 0.5, 0.999])
def test_a_flipped_bit_is_found(where: float, tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    message = refusal(tmp_path)
    assert "model.safetensors is corrupt" in message
    assert "firesteel.json says" in message


def test_a_truncated_file_is_found_without_a_contract(tmp_path: Path) -> None:
    path = foreign(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors is corrupt" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "firesteel.json"])
@pytest.mark.parametrize("content", [b'{"a": ', b"\xff\xfe", b"[1]"])
def test_broken_json(name: str, content: bytes, tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    (tmp_path / name).write_bytes(content)
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculators_model_type": "medusa"}, ["speculators_model_type", "medusa", "dspark"]),
        ({"speculators_config.algorithm": "dflash"}, ["'dspark'", "'dflash'", "speculators_config.algorithm"]),
        ({"speculators_config.proposal_methods": []}, ["proposal_methods"]),
        ({"speculators_config.proposal_methods.0.speculative_tokens": 5}, ["speculative_tokens is 5", "drafts 4"]),
        ({"transformer_layer_config.num_hidden_layers": 3}, ["layer_types names 2", "num_hidden_layers is 3"]),
        ({"transformer_layer_config.attention_bias": True}, ["attention_bias", "True"]),
        ({"transformer_layer_config.model_type": "mamba"}, ["model_type", "mamba"]),
        ({"transformer_layer_config.is_neox_style": False}, ["is_neox_style", "False"]),
        ({"transformer_layer_config.logit_scale": 2.0}, ["logit_scale", "2.0"]),
        ({"transformer_layer_config.hidden_size": "24"}, ["transformer_layer_config.hidden_size", "'24'"]),
        ({"transformer_layer_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"transformer_layer_config.rope_parameters": {"rope_type": "default"}}, ["rope_theta is None"]),
        *(({"transformer_layer_config.rope_parameters": {"rope_theta": 1e4, **rope}}, ["config.json", *words]) for rope, words in FOREIGN_ROPE),
        (
            {
                "transformer_layer_config.rope_parameters": None,
                "transformer_layer_config.rope_theta": 1e4,
                "transformer_layer_config.rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            ["'dynamic'"],
        ),
        ({"transformer_layer_config.partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"transformer_layer_config.use_sliding_window": True}, ["config.json", "use_sliding_window is True", "no sliding layer"]),
        ({"transformer_layer_config.num_key_value_heads": 3}, ["num_heads=4", "num_kv_heads=3"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"markov_head_type": "cubic"}, ["markov_head_type", "cubic"]),
        ({"mask_token_id": 40}, ["mask_token_id=40", "vocabulary of 40"]),
        ({"mask_token_id": None}, ["mask_token_id", "None"]),
        ({"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids", "None"]),
        ({"aux_hidden_state_layer_ids": []}, ["layer_ids"]),
        ({"draft_vocab_size": 41}, ["draft_vocab_size=41", "vocabulary of 40"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn"]),
        ({"dtype": "bfloat16"}, ["fc.weight is torch.float32", "torch.bfloat16"]),
        ({"aux_hidden_state_layer_ids": [1, 3]}, ["fc.weight", "[24, 72]", "[24, 48]"]),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, ["markov_head.markov_w1.weight", "does not know"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov is true", "markov_rank is 0"]),
        ({"enable_confidence_head": False}, ["confidence_head.proj.bias", "does not know"]),
        ({"draft_vocab_size": 10}, ["lacks d2t, lm_head.weight, t2d"]),
    ],
)
def test_config_json_is_read_strictly(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    foreign(tmp_path)
    edit(tmp_path / "config.json", change)
    message = refusal(tmp_path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "field",
    [
        "speculators_model_type",
        "speculators_config",
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "block_size",
        "draft_vocab_size",
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "transformer_layer_config.head_dim",
        "transformer_layer_config.rms_norm_eps",
        "transformer_layer_config.rope_parameters",
    ],
)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    foreign(tmp_path)
    edit(tmp_path / "config.json", {}, drop=(field,))
    assert field.rsplit(".", 1)[-1].replace("rope_parameters", "rope_theta") in refusal(tmp_path)


def test_sliding_layers_must_say_how(tmp_path: Path) -> None:
    for i, (change, words) in enumerate(
        [
            ({"transformer_layer_config.sliding_window": None}, ["sliding_window is None"]),
            ({"transformer_layer_config.use_sliding_window": False}, ["use_sliding_window is False"]),
            ({"transformer_layer_config.is_causal": True}, ["is_causal is True", "sliding_window_non_causal is True"]),
            ({"transformer_layer_config.layer_types": None}, ["layer_types"]),
            ({"transformer_layer_config.is_causal": None, "sliding_window_non_causal": False}, ["causal"]),
        ]
    ):
        folder = foreign(tmp_path / str(i), "mixed")
        edit(folder / "config.json", change)
        message = refusal(folder)
        assert all(word in message for word in words), message


def test_older_spellings_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    """Absent where all readers agree on the default: full attention, DFlash's anchor rule, the target's width."""
    foreign(tmp_path, "dflash")
    edit(
        tmp_path / "config.json",
        {"transformer_layer_config.rope_theta": 5000.0, "transformer_layer_config.use_sliding_window": False, "torch_dtype": "float32"},
        drop=(
            "dtype",
            "sample_from_anchor",
            "target_hidden_size",
            "sliding_window_non_causal",
            "transformer_layer_config.rope_parameters",
            "transformer_layer_config.layer_types",
        ),
    )
    assert load(tmp_path).config == DFLASH
    edit(tmp_path / "config.json", {"transformer_layer_config.rope_scaling": {"type": "linear", "factor": 2.0}})
    assert load(tmp_path).config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_sliding_without_is_causal_is_causal(tmp_path: Path) -> None:
    foreign(tmp_path, "sliding")
    edit(tmp_path / "config.json", {"sliding_window_non_causal": False}, drop=("transformer_layer_config.is_causal",))
    assert load(tmp_path).config.causal
    edit(tmp_path / "config.json", {"sliding_window_non_causal": True})
    assert not load(tmp_path).config.causal


@pytest.mark.parametrize("name", ["vanilla", "reduced", "dflash"])
def test_tensors_are_read_strictly(name: str, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, torch.Tensor], tuple[str, ...], list[str]]] = [
        ({}, ("layers.1.mlp.up_proj.weight",), ["lacks layers.1.mlp.up_proj.weight"]),
        ({"layers.2.mlp.up_proj.weight": torch.zeros(40, 24)}, (), ["holds layers.2.mlp.up_proj.weight"]),
        ({"model.norm.weight": torch.zeros(24)}, ("norm.weight",), ["lacks norm.weight", "holds model.norm.weight"]),
        ({"norm.weight": torch.zeros(25)}, (), ["norm.weight has shape [25]", "[24]"]),
        ({"norm.weight": torch.zeros(24).half()}, (), ["norm.weight is torch.float16", "torch.float32"]),
        ({"norm.weight": torch.full((24,), float("nan"))}, (), ["norm.weight is not finite"]),
    ]
    for i, (change, drop, words) in enumerate(cases):
        folder = foreign(tmp_path / str(i), name)
        reweigh(folder, change, drop)
        message = refusal(folder)
        assert all(word in message for word in words), message


def test_tables_must_agree(tmp_path: Path) -> None:
    ids, _ = make_vocab(CONFIGS["reduced"])
    assert ids is not None
    d2t, t2d = ids - torch.arange(10), torch.zeros(40, dtype=torch.bool).index_fill(0, ids, True)
    other = t2d.clone()
    other[int(ids[0])], other[int((~t2d).nonzero()[0])] = False, True
    cases: list[tuple[dict[str, torch.Tensor], tuple[str, ...], list[str]]] = [
        ({}, ("d2t",), ["lacks d2t"]),
        ({}, ("t2d", "lm_head.weight"), ["lacks lm_head.weight, t2d"]),
        ({"d2t": ids + 20}, (), ["d2t", "vocabulary ends at 39"]),
        ({"d2t": torch.arange(10).neg()}, (), ["d2t", "without repetition"]),
        ({"t2d": other}, (), ["d2t names 10", "t2d marks 10", "disagree"]),
        ({"d2t": d2t.int()}, (), ["d2t is torch.int32", "torch.int64"]),
        ({"t2d": t2d.long()}, (), ["t2d is torch.int64", "torch.bool"]),
    ]
    for i, (change, drop, words) in enumerate(cases):
        folder = foreign(tmp_path / str(i), "reduced")
        reweigh(folder, change, drop)
        message = refusal(folder)
        assert all(word in message for word in words), message


def test_a_foreign_checkpoint_may_have_its_own_tables_and_a_narrow_confidence_head(tmp_path: Path) -> None:
    foreign(tmp_path, dtype=torch.bfloat16)
    embed, head = torch.randn(40, 24).bfloat16(), torch.randn(40, 24).bfloat16()
    bias = torch.ones(1).bfloat16()
    reweigh(tmp_path, {"embed_tokens.weight": embed, "lm_head.weight": head, "confidence_head.proj.bias": bias})
    loaded = load(tmp_path)
    assert loaded.embed is not None
    assert loaded.head_rows is not None
    assert torch.equal(loaded.embed, embed)
    assert torch.equal(loaded.head_rows, head)
    assert loaded.tensors["confidence_head.proj.bias"].dtype == torch.bfloat16
    assert "lm_head.weight" not in loaded.tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sample_from_anchor": False, "speculators_config.proposal_methods.0.speculative_tokens": 3}, ["sample_from_anchor is True", "False"]),
        ({"aux_hidden_state_layer_ids": [0, 2, 5]}, ["layer_ids is (1, 3, 6)", "(0, 2, 5)"]),
        ({"block_size": 5}, ["block_size is 4", "5"]),
        ({"mask_token_id": 3}, ["mask_token_id is 39", "3"]),
        ({"transformer_layer_config.rope_parameters.rope_theta": 1e6}, ["rope_theta is 5000.0", "1000000.0"]),
        ({"transformer_layer_config.rms_norm_eps": 1e-6}, ["rms_norm_eps is 1e-05", "1e-06"]),
        ({"transformer_layer_config.is_causal": True}, ["causal is False", "True"]),
        ({"speculators_config.proposal_methods.0.speculative_tokens": 2}, ["speculative_tokens is 4", "2"]),
        ({"enable_confidence_head": False}, ["confidence_head is True", "False"]),
    ],
)
def test_config_json_against_the_contract(change: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    edit(tmp_path / "config.json", change)
    message = refusal(tmp_path)
    assert all(word in message for word in [*words, "firesteel.json", "config.json"]), message


@pytest.mark.parametrize(
    ("change", "drop", "words"),
    [
        ({"format_version": 2}, (), ["format_version 2", "reads 1"]),
        ({"contract": []}, (), ["contract is list"]),
        ({}, ("draft",), ["draft is missing"]),
        ({"contract.sample_from_anchor": False}, (), ["sample_from_anchor is False in the contract", "True"]),
        ({"contract.layer_ids": [0, 2, 5]}, (), ["layer_ids is (0, 2, 5) in the contract", "(1, 3, 6)"]),
        ({"contract.vocab_size": 41}, (), ["vocab_size is 41 in the contract", "40"]),
        ({"contract.draft_vocab_size": 20}, (), ["draft_vocab_size is 20 in the contract", "40"]),
        ({"contract.causal": True}, (), ["causal is True in the contract", "False"]),
        ({"contract.rope_theta": 1.0}, (), ["rope_theta is 1.0 in the contract", "5000.0"]),
        ({"contract.sliding_window": 8}, (), ["sliding_window is 8 in the contract", "None"]),
        ({"contract.target_layers": 5}, (), ["layer_ids has 6", "target_layers is 5"]),
        ({"contract.temperatures": [1.0]}, (), ["temperatures has 1 values", "drafts 4"]),
        ({"contract.calibration.positions.1.position": 7}, (), ["calibration has positions [1, 7, 3, 4]"]),
        ({"contract.temperatures": []}, (), ["calibration has positions [1, 2, 3, 4], there are temperatures for 0"]),
        ({"contract.calibration.positions.0.ece_after": "low"}, (), ["contract.calibration.positions.0.ece_after"]),
        ({}, ("contract.calibration.bins",), ["contract.calibration.bins"]),
        ({"contract.layer_convention": "deepspec"}, (), ["contract.layer_convention"]),
        ({"contract.captured_stream": "mlp"}, (), ["contract.captured_stream"]),
        ({"contract.novelty": 1}, (), ["contract.novelty"]),
        ({}, ("contract.target_fingerprint",), ["contract.target_fingerprint"]),
        ({"draft.novelty": 1}, (), ["novelty"]),
        ({"draft.num_heads": None}, (), ["draft"]),
        ({"draft.hidden_size": 25}, (), ["hidden_size is 25", "24"]),
        ({"files": {}}, (), ["sha256", "None"]),
    ],
)
def test_firesteel_json_is_read_strictly(change: dict[str, Any], drop: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    edit(tmp_path / "firesteel.json", change, drop=drop)
    message = refusal(tmp_path)
    assert all(word in message for word in words), message


def test_export_refuses_what_load_would(tmp_path: Path) -> None:
    reduced = CONFIGS["reduced"]
    ids, rows = make_vocab(reduced)
    assert ids is not None
    assert rows is not None
    state, contract = make_state(reduced), toy_contract(reduced)
    half = torch.float16
    broken = {**state, "norm.weight": torch.full((24,), 1e6)}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"target_ids": None, "head_rows": None}, ["draft_vocab_size=10", "neither target_ids nor head_rows"]),
        ({"head_rows": None}, ["exported with target_ids"]),
        ({"target_ids": ids.flip(0)}, ["ascending"]),
        ({"target_ids": torch.cat([ids[:-1], torch.tensor([40])])}, ["vocabulary ends at 39"]),
        ({"target_ids": torch.cat([ids[:-1], ids[:1]])}, ["without repetition"]),
        ({"target_ids": ids[:9]}, ["d2t has shape [9]", "[10]"]),
        ({"head_rows": rows[:9]}, ["lm_head.weight has shape [9, 24]"]),
        ({"head_rows": rows * float("inf")}, ["lm_head.weight is not finite"]),
        ({"state_dict": broken, "dtype": half}, ["norm.weight is not finite in torch.float16"]),
        ({"state_dict": {**state, "extra": rows}}, ["holds extra"]),
        ({"dtype": torch.int8}, ["torch.int8", "bfloat16"]),
        ({"contract": contract.model_copy(update={"block_size": 5})}, ["block_size is 5", "4"]),
    ]
    for change, words in cases:
        given = {"state_dict": state, "contract": contract, "target_ids": ids, "head_rows": rows, "dtype": torch.float32} | change
        with pytest.raises(CheckpointError) as e:
            export(
                tmp_path / "x",
                given["state_dict"],
                reduced,
                given["contract"],
                target_ids=given["target_ids"],
                head_rows=given["head_rows"],
                dtype=given["dtype"],
            )
        assert all(word in str(e.value) for word in words), str(e.value)
        assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="a full one neither"):
        export(tmp_path / "x", make_state(DSPARK), DSPARK, toy_contract(DSPARK), target_ids=ids, head_rows=rows, dtype=half)


def test_a_scaling_that_others_would_not_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rope_type"):
        toy_export(tmp_path, replace(DSPARK, rope_scaling={"type": "linear", "factor": 2.0}))


def test_a_failed_overwrite_does_not_pass_for_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_export(tmp_path, DSPARK)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("firesteel.package.export.save_file", full_disk)
    with pytest.raises(FiresteelError, match="No space left"):
        toy_export(tmp_path, replace(DSPARK, block_size=5))
    assert not (tmp_path / "firesteel.json").exists()
