"""DFlash and DSpark from DeepSpec, z-lab and SpecForge: layers, slots and weights come over, and go back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from convert_cases import DEEPSPEC, OUTPUTS, SPECFORGE, ZLAB, deepspec, opened, save, specforge, target_tables, zlab
from package_toys import CONFIGS, DFLASH, DSPARK, TARGET, toy_contract, toy_export
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from firesteel.drafters.block import BlockDrafter
from firesteel.drafters.block_format import sees_markov
from firesteel.drafters.config import SLIDING, DraftConfig
from firesteel.drafters.session import BlockSession
from firesteel.package.convert.convert import write
from firesteel.package.load import load
from firesteel.target.local import capture

BY_HAND = replace(DFLASH, layer_ids=(1, 3, 4))


def session_of(config: DraftConfig, tensors: dict[str, torch.Tensor]) -> BlockSession:
    drafter = BlockDrafter(config).eval()
    drafter.load_state_dict({name: t for name, t in tensors.items() if name in drafter.state_dict()})
    tables = target_tables()
    return BlockSession(drafter, tables.embed, tables.head, draft_to_target=None, max_length=64)


def test_zlab_dflash_drafts_what_its_weights_draft(tmp_path: Path) -> None:
    """A Llama's `hidden_states` as z-lab reads them, against the states that Firesteel captures at the converted ids."""
    write(opened(zlab(tmp_path / "in")), tmp_path / "out", "speculators")
    loaded = load(tmp_path / "out")
    assert loaded.config == BY_HAND

    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **shape)).eval()
    tokens = torch.randint(0, 40, (1, 9))
    with torch.no_grad():
        theirs = model(tokens, output_hidden_states=True).hidden_states
        with capture(model, loaded.config.layer_ids) as states:
            model(tokens)
    reference, converted = session_of(BY_HAND, load_file(tmp_path / "in" / "model.safetensors")), session_of(loaded.config, loaded.tensors)
    reference.observe(tokens[0], torch.cat([theirs[i + 1][0] for i in OUTPUTS], dim=-1))
    converted.observe(tokens[0], torch.cat([states[i][0] for i in loaded.config.layer_ids], dim=-1))

    drafts = [converted.draft(anchor, 3).tokens for anchor in range(10)]
    assert drafts == [reference.draft(anchor, 3).tokens for anchor in range(10)]
    # Slot k stands for the token k after the anchor; slot 0 is not read.
    assert drafts[5] == (reference.states(5)[1:] @ target_tables().head.T).argmax(dim=-1).tolist()
    # Without the step from outputs to states before a layer the same weights draft other tokens.
    shifted = session_of(replace(BY_HAND, layer_ids=tuple(OUTPUTS)), loaded.tensors)
    shifted.observe(tokens[0], torch.cat([theirs[i][0] for i in OUTPUTS], dim=-1))
    assert [shifted.draft(anchor, 3).tokens for anchor in range(10)] != drafts


@pytest.mark.parametrize("make", [deepspec, specforge])
def test_dspark_slots_predict_the_token_after(make, tmp_path: Path) -> None:
    """The Markov chain by hand over slots 0 to 3, as DeepSpec samples them."""
    found = opened(make(tmp_path / "in"))
    assert found.config.algorithm == "dspark"
    assert found.config.layer_ids == (1, 3, 4)
    assert found.config.num_drafts == 4
    session = session_of(found.config, found.tensors)
    session.observe(torch.arange(5), torch.randn(5, 3 * 24, generator=torch.Generator().manual_seed(1)))
    z, previous, wanted = session.states(7), 7, []
    w1, w2 = found.tensors["markov_head.markov_w1.weight"], found.tensors["markov_head.markov_w2.weight"]
    for k in range(4):
        previous = int((target_tables().head @ z[k] + w2 @ w1[previous]).argmax())
        wanted.append(previous)
    assert session.draft(7, 4).tokens == wanted


def test_deepspec_without_heads_is_a_dflash_that_samples_from_the_anchor(tmp_path: Path) -> None:
    shapes = {n: t for n, t in load_file(deepspec(tmp_path / "x") / "model.safetensors").items() if "head" not in n and "embed" not in n}
    headless = {k: v for k, v in DEEPSPEC.items() if k not in ("markov_head_type", "confidence_head_with_markov")}
    folder = save(tmp_path / "in", headless | {"markov_rank": 0, "enable_confidence_head": False}, shapes)
    assert opened(folder).config == replace(BY_HAND, sample_from_anchor=True)
    assert opened(folder, "algorithm=dspark").config == replace(BY_HAND, sample_from_anchor=True, algorithm="dspark")


def test_embeddings_count_as_minus_one(tmp_path: Path) -> None:
    assert opened(deepspec(tmp_path, target_layer_ids=[-1, 2, 4])).config.layer_ids == (0, 3, 5)


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "no-markov", "no-confidence", "scaled-rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["deepspec", "sglang"])
def test_round_trip_is_exact(layout: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = replace(CONFIGS[name], layer_ids=(1, 3, 5))
    # Without a Markov head the field says nothing, and files state false.
    config = replace(config, confidence_with_markov=sees_markov(config))
    toy_export(tmp_path / "ours", config, dtype)
    write(opened(tmp_path / "ours"), tmp_path / "theirs", layout)
    back = opened(tmp_path / "theirs")
    assert back.layout == ("deepspec" if layout == "deepspec" else "dflash_config")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["num_target_layers"] == 6
    write(back, tmp_path / "again", "speculators")

    first, second = load(tmp_path / "ours"), load(tmp_path / "again")
    assert second.config == first.config
    assert second.dtype == dtype
    assert second.tensors.keys() == first.tensors.keys()
    for key, tensor in first.tensors.items():
        assert second.tensors[key].dtype == tensor.dtype
        assert torch.equal(second.tensors[key], tensor), key


def test_dflash_goes_to_sglang_and_back(tmp_path: Path) -> None:
    toy_export(tmp_path / "ours", replace(DFLASH, layer_ids=(1, 3, 5)))
    write(opened(tmp_path / "ours"), tmp_path / "theirs", "sglang")
    data = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert data["architectures"] == ["DFlashDraftModel"]
    assert data["dflash_config"] == {"mask_token_id": 39, "target_layer_ids": [0, 2, 4]}
    assert opened(tmp_path / "theirs").config == replace(DFLASH, layer_ids=(1, 3, 5))


def test_written_configs_have_the_published_fields(tmp_path: Path) -> None:
    toy_export(tmp_path / "ours", replace(DSPARK, layer_ids=(1, 3, 4)))
    for layout, published in (("deepspec", DEEPSPEC), ("sglang", SPECFORGE)):
        write(opened(tmp_path / "ours"), tmp_path / layout, layout)
        data = json.loads((tmp_path / layout / "config.json").read_text())
        told = {k for k in published if k not in ("bos_token_id", "eos_token_id", "initializer_range", "transformers_version", "use_cache")}
        assert told <= data.keys()
        for name in told - {"max_window_layers", "dflash_config"}:
            assert data[name] == published[name], name
    assert data["dflash_config"].keys() == SPECFORGE["dflash_config"].keys() - {"confidence_head_alpha"}


def test_with_its_target_a_drafter_gets_a_contract_and_loses_copies(tmp_path: Path) -> None:
    target, folder = target_tables(), deepspec(tmp_path / "in")
    tensors = load_file(folder / "model.safetensors") | {"embed_tokens.weight": target.embed, "lm_head.weight": target.head}
    save(folder, DEEPSPEC, tensors)
    assert write(opened(folder, target=target), tmp_path / "out", "speculators", target) == ()
    loaded = load(tmp_path / "out")
    assert loaded.contract is not None
    assert loaded.contract.target_fingerprint == TARGET.fingerprint
    assert loaded.contract.promise is None
    assert loaded.embed is None
    assert loaded.head_rows is None
    write(opened(tmp_path / "out"), tmp_path / "back", "deepspec", target)
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"], target.head)


def test_own_tables_stay_and_then_there_is_no_contract(tmp_path: Path) -> None:
    target = target_tables()
    notes = write(opened(deepspec(tmp_path / "in"), target=target), tmp_path / "out", "speculators", target)
    assert "its own embedding and LM head" in notes[0]
    loaded = load(tmp_path / "out")
    assert loaded.contract is None
    assert loaded.embed is not None
    assert loaded.head_rows is not None


def test_without_a_target_the_file_names_none(tmp_path: Path) -> None:
    assert "without --target" in write(opened(zlab(tmp_path / "in")), tmp_path / "out", "speculators")[0]
    frame = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert frame["verifier"] == {"name_or_path": None, "architectures": []}


def test_a_contract_survives(tmp_path: Path) -> None:
    toy_export(tmp_path / "ours", DSPARK)
    assert write(opened(tmp_path / "ours"), tmp_path / "copy", "speculators") == ()
    assert load(tmp_path / "copy").contract == toy_contract(DSPARK)
    toy_export(tmp_path / "fit", replace(DSPARK, layer_ids=(1, 3, 5)))
    assert "temperatures" in write(opened(tmp_path / "fit"), tmp_path / "theirs", "deepspec")[0]


def test_sliding_layers_need_a_word(tmp_path: Path) -> None:
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
    for causal in (True, False):
        found = opened(zlab(tmp_path / str(causal), **window), f"causal={str(causal).lower()}").config
        assert (found.causal, found.layer_types, found.sliding_window) == (causal, (SLIDING, SLIDING), 16)


def test_shards_and_older_head_names(tmp_path: Path) -> None:
    folder = specforge(tmp_path)
    tensors = {f"logit_head.{n}" if "_head." in n else n: t for n, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(tensors)[:5], "b.safetensors": sorted(tensors)[5:]}
    for file, names in parts.items():
        save(folder, SPECFORGE, {n: tensors[n] for n in names})
        (folder / "model.safetensors").rename(folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert opened(folder).tensors.keys() == {n.removeprefix("logit_head.") for n in tensors}


def test_block_size_may_lie_inside(tmp_path: Path) -> None:
    moved = {k: v for k, v in ZLAB.items() if k != "block_size"} | {"dflash_config": {**ZLAB["dflash_config"], "block_size": 8}}
    shapes = load_file(zlab(tmp_path / "x") / "model.safetensors")
    assert opened(save(tmp_path / "in", moved, shapes)).config.block_size == 8
