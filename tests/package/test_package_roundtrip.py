"""What is exported comes back: bit by bit, field by field; and config.json is what the format documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from package_toys import BLOCKS, CONFIGS, DFLASH, DSPARK, EAGLE3, EAGLES, TARGET, edit, make_state, make_vocab, toy_calibration, toy_contract, toy_export
from safetensors import safe_open

from firesteel.drafters.config import FULL, SLIDING
from firesteel.errors import CheckpointError
from firesteel.package.contract import make_contract
from firesteel.package.export import export
from firesteel.package.load import check_target, describe, load

# Fields of the speculators format for dflash, and what dspark adds.
TOP = {
    "architectures",
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "dtype",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "block_size",
    "draft_vocab_size",
    "target_hidden_size",
    "sample_from_anchor",
    "sliding_window_non_causal",
}
HEADS = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = CONFIGS[name]
    written = toy_export(tmp_path / "draft", config, dtype)
    loaded = load(tmp_path / "draft")

    state, (ids, rows) = make_state(config), make_vocab(config)
    assert loaded.config == config
    assert loaded.contract == toy_contract(config)
    assert loaded.dtype == dtype
    assert loaded.speculative_tokens == config.num_drafts
    assert loaded.verifier == "acme/tiny-chat"
    assert loaded.embed is None
    assert loaded.tensors.keys() == state.keys()
    for key, tensor in loaded.tensors.items():
        wanted = torch.float32 if key.startswith("confidence_head") else dtype
        assert tensor.dtype == wanted
        assert torch.equal(tensor, state[key].to(wanted)), key
    if ids is None or rows is None:
        assert loaded.target_ids is None
        assert loaded.head_rows is None
    else:
        assert loaded.target_ids is not None
        assert loaded.head_rows is not None
        assert torch.equal(loaded.target_ids, ids)
        assert torch.equal(loaded.head_rows, rows.to(dtype))
    assert written.parameters == sum(t.numel() for t in state.values())
    assert written.file_bytes == (tmp_path / "draft" / "model.safetensors").stat().st_size


def test_the_file_holds_offsets_and_marks(tmp_path: Path) -> None:
    config = CONFIGS["reduced"]
    toy_export(tmp_path, config, torch.bfloat16)
    ids, _ = make_vocab(config)
    assert ids is not None
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
        d2t, t2d = f.get_tensor("d2t"), f.get_tensor("t2d")
        assert "embed_tokens.weight" not in f.keys()  # noqa: SIM118
    assert d2t.dtype == torch.int64
    assert [int(i + d2t[i]) for i in range(10)] == ids.tolist()
    assert t2d.dtype == torch.bool
    assert t2d.shape == (40,)
    assert t2d.nonzero().flatten().tolist() == ids.tolist()


def test_a_full_vocabulary_ships_no_tables(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & set(f.keys())


@pytest.mark.parametrize("name", EAGLES)
def test_config_json_of_an_eagle_has_the_documented_fields(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    toy_export(tmp_path, config, torch.bfloat16)
    data = json.loads((tmp_path / "config.json").read_text())
    own = {"eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
    blocks = {"aux_hidden_state_layer_ids", "mask_token_id", "block_size", "sample_from_anchor", "sliding_window_non_causal"}
    assert data.keys() == (TOP - blocks) | own | ({"mask_token_id"} if config.algorithm == "peagle" else set())
    assert data["speculators_model_type"] == data["speculators_config"]["algorithm"] == config.algorithm
    assert data["architectures"] == [{"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}[config.algorithm]]
    assert data["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert data["transformer_layer_config"]["model_type"] == config.extra["layer_style"]
    assert {n: data[n] for n in own & config.extra.keys()} == {n: config.extra[n] for n in own & config.extra.keys()}
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


def test_steps_not_served_are_still_known(tmp_path: Path) -> None:
    """config.json says how many tokens to draft, the contract how many the drafter was trained for."""
    toy_export(tmp_path, EAGLE3, speculative_tokens=2)
    loaded = load(tmp_path)
    assert (loaded.config.block_size, loaded.speculative_tokens) == (4, 2)
    (tmp_path / "firesteel.json").unlink()
    assert load(tmp_path).config.block_size == 2


@pytest.mark.parametrize("name", BLOCKS)
def test_config_json_has_the_documented_fields(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    toy_export(tmp_path, config, torch.bfloat16)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data.keys() == (TOP | HEADS if config.algorithm == "dspark" else TOP)
    assert data["speculators_version"] == "0.9.0"
    assert data["speculators_model_type"] == data["speculators_config"]["algorithm"] == config.algorithm
    assert data["architectures"] == [{"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}[config.algorithm]]
    assert data["speculators_config"].keys() == {"algorithm", "proposal_methods", "default_proposal_method", "verifier"}
    assert [m["proposal_type"] for m in data["speculators_config"]["proposal_methods"]] == ["greedy"]
    assert data["speculators_config"]["default_proposal_method"] == "greedy"
    assert data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == (4 if config.sample_from_anchor else 3)
    assert data["speculators_config"]["verifier"] == {"name_or_path": "acme/tiny-chat", "architectures": ["LlamaForCausalLM"]}
    assert data["aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert (data["mask_token_id"], data["block_size"], data["target_hidden_size"]) == (39, 4, 24)
    assert data["draft_vocab_size"] == config.draft_vocab_size
    assert data["sample_from_anchor"] is config.sample_from_anchor
    layers = data["transformer_layer_config"]
    assert layers["model_type"] == "qwen3"
    assert layers["vocab_size"] == 40
    assert layers["dtype"] == data["dtype"] == "bfloat16"
    assert "model_type" not in data  # vLLM takes a nameless config with speculators_config for one of this format


@pytest.mark.parametrize(
    ("name", "is_causal", "non_causal", "window"),
    [
        ("vanilla", None, True, None),
        ("sliding", False, True, 16),
        ("sliding-causal", True, False, 16),
        ("mixed", False, True, 16),
        ("full-causal", True, False, None),
    ],
)
def test_causality_is_never_left_to_a_default(name: str, is_causal: bool | None, non_causal: bool, window: int | None, tmp_path: Path) -> None:
    toy_export(tmp_path, CONFIGS[name])
    data = json.loads((tmp_path / "config.json").read_text())
    layers = data["transformer_layer_config"]
    assert layers.get("is_causal") is is_causal
    assert data["sliding_window_non_causal"] is non_causal
    assert layers["sliding_window"] == window
    assert layers["use_sliding_window"] is (window is not None)
    assert layers["layer_types"] == list(CONFIGS[name].layer_types)


def test_rope_is_written_as_the_readers_take_it(tmp_path: Path) -> None:
    for name, rope in [
        ("vanilla", {"rope_type": "default", "rope_theta": 5000.0}),
        ("scaled-rope", {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}),
    ]:
        toy_export(tmp_path / name, CONFIGS[name])
        assert json.loads((tmp_path / name / "config.json").read_text())["transformer_layer_config"]["rope_parameters"] == rope


def test_a_name_that_only_firesteel_knows_is_not_told_to_others(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK, target_name="pypi:some-weights")
    assert json.loads((tmp_path / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] is None
    loaded = load(tmp_path)
    assert loaded.verifier is None
    assert loaded.contract is not None
    assert loaded.contract.target_name == "pypi:some-weights"


def test_fewer_drafts_than_slots_may_be_served(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK, speculative_tokens=2)
    assert load(tmp_path).speculative_tokens == 2


def test_export_does_not_change_or_share_the_parameters(tmp_path: Path) -> None:
    state = make_state(DFLASH)
    before = {k: v.clone() for k, v in state.items()}
    # Parameters may be views of one buffer; the file must not care.
    buffer = torch.arange(48.0)
    state["norm.weight"], state["hidden_norm.weight"] = buffer[:24], buffer[24:]
    export(tmp_path, state, DFLASH, toy_contract(DFLASH), target_ids=None, head_rows=None, dtype=torch.float16)
    assert all(torch.equal(state[k], before[k]) for k in before if k not in ("norm.weight", "hidden_norm.weight"))
    assert torch.equal(load(tmp_path).tensors["hidden_norm.weight"], buffer[24:].half())


def test_the_contract_tells_of_the_target(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    contract = json.loads((tmp_path / "firesteel.json").read_text())["contract"]
    assert (contract["target_fingerprint"], contract["target_softcap"], contract["target_logit_scale"]) == ("0123456789abcdef", 30.0, 0.5)
    assert (contract["layer_convention"], contract["captured_stream"], contract["thinking"]) == ("hidden_states", "residual", "off")
    assert contract["template_options"] == {"enable_thinking": False}
    assert contract["temperatures"] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert contract["promise"]["acceptance_length"] == 2.5
    assert {"torch", "firesteel", "python"} <= contract["versions"].keys()


def test_the_right_target_is_accepted(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    check_target(load(tmp_path), TARGET.fingerprint, TARGET.hidden_size, TARGET.vocab_size)


@pytest.mark.parametrize(
    ("fingerprint", "hidden", "vocab", "words"),
    [
        ("ffff", 24, 40, ["fingerprint 0123456789abcdef", "fingerprint ffff"]),
        ("0123456789abcdef", 32, 40, ["hidden size 24", "hidden size 32"]),
        ("0123456789abcdef", 24, 41, ["vocabulary 40", "vocabulary 41"]),
    ],
)
def test_another_target_is_refused(fingerprint: str, hidden: int, vocab: int, words: list[str], tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    with pytest.raises(CheckpointError) as e:
        check_target(load(tmp_path), fingerprint, hidden, vocab, target_name="other/model")
    assert all(word in str(e.value) for word in ["acme/tiny-chat", "other/model", *words])


def test_a_foreign_checkpoint_opens_from_config_json_alone(tmp_path: Path) -> None:
    config = CONFIGS["reduced"]
    toy_export(tmp_path, config, torch.bfloat16)
    (tmp_path / "firesteel.json").unlink()
    loaded = load(tmp_path)
    assert loaded.contract is None
    assert loaded.config == config
    check_target(loaded, "whatever", 24, 40)
    with pytest.raises(CheckpointError, match=r"hidden size 24.*hidden size 25"):
        check_target(loaded, "whatever", 25, 40)


def test_layers_of_a_window_come_back(tmp_path: Path) -> None:
    config = replace(CONFIGS["mixed"], layer_types=(FULL, SLIDING), sliding_window=99)
    toy_export(tmp_path, config)
    (tmp_path / "firesteel.json").unlink()
    assert load(tmp_path).config == config


def test_make_contract_refuses_more_tokens_than_a_block_drafts() -> None:
    with pytest.raises(CheckpointError, match=r"speculative_tokens=4.*drafts 3"):
        make_contract(DFLASH, TARGET, template_options={}, temperatures=(), promise=None, speculative_tokens=4)


def test_what_a_checkpoint_says_needs_no_weights(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    loaded = load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert describe(tmp_path) == (loaded.config, loaded.contract)
    (tmp_path / "firesteel.json").unlink()
    assert describe(tmp_path) == (DSPARK, None)


def test_the_calibration_travels_and_older_files_open_without_it(tmp_path: Path) -> None:
    toy_export(tmp_path, DSPARK)
    assert load(tmp_path).contract == toy_contract(DSPARK)
    stored = json.loads((tmp_path / "firesteel.json").read_text())["contract"]["calibration"]
    assert stored == toy_calibration(DSPARK).model_dump(mode="json")
    assert (stored["positions"][0]["ece_before"], stored["positions"][0]["ece_after"]) == (0.11, 0.011)
    edit(tmp_path / "firesteel.json", {}, drop=("contract.calibration",))
    older = load(tmp_path).contract
    assert older == toy_contract(DSPARK, calibration=None)
