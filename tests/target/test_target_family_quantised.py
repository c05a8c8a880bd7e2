"""Four-bit targets against float models that hold the same numbers, worked out here from the packed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_targets import folder_with, int4_folder
from target_families import LAYERS, PROMPT, VOCABULARY, Tiny, check_close, document, make_model, own_states, write
from target_training import learns_and_changes_no_text
from torch import Tensor

from firesteel.decoding.decode import decode_plain
from firesteel.errors import TargetError
from firesteel.stages.extract import capture_documents
from firesteel.target.head import make_head
from firesteel.target.loading import load_model
from firesteel.target.local import LocalTarget
from firesteel.target.reader import make_reader
from firesteel.target.session import TargetSession, fast_twin
from firesteel.target.spec import fingerprint, read_spec, weights_checksum

EVERY = tuple(range(LAYERS + 1))
# The sixteen numbers of MXFP4 (E2M1), by code.
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def check_target(loaded: Any, plain: Any, folder: Path) -> None:
    """Facts, states, logits and decoding of the loaded target are those of the float model; a drafter learns from it and changes none of its text."""
    spec = read_spec(loaded, "quantised", ())
    head = make_head(loaded, spec.logit_scale, spec.softcap)
    target = LocalTarget(spec, loaded, None, head)
    assert (spec.hidden_size, spec.vocab_size, spec.norm_offset) == (32, VOCABULARY, 0.0)
    text = write(plain, torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(2)))[0]
    (sample,) = capture_documents(target, make_reader(loaded, EVERY), [document("a", text)], EVERY)
    states, logits = own_states(plain, text)
    for i in EVERY:
        check_close(sample.aux[:, i], states[i], f"layer {i}")
    check_close(target.head.logits(sample.last), logits[sample.last_positions])
    session = TargetSession(loaded, (0, LAYERS), max_length=64)
    assert session.engine_name == "generic"
    assert decode_plain(session, text[:PROMPT].tolist(), max_new_tokens=len(text) - PROMPT, eos_ids=()).tokens == text[PROMPT:].tolist()
    assert fingerprint(loaded) == spec.fingerprint
    learns_and_changes_no_text(Tiny(loaded, spec, head, text), folder / "training")


@pytest.mark.lossless
def test_int4_in_compressed_tensors(tmp_path):
    pytest.importorskip("compressed_tensors")
    plain = make_model("llama")
    settings = int4_folder(tmp_path, plain)
    loaded = load_model(settings.model, settings)
    assert fast_twin(loaded) is loaded, "a quantised linear layer may do more than its weight tells"
    sums = weights_checksum(loaded)
    check_target(loaded, plain, tmp_path)
    assert weights_checksum(loaded) == sums, "the weights are unpacked before they are hashed"


@pytest.mark.lossless
def test_mxfp4_experts(tmp_path):
    plain = make_model("gpt_oss")
    tensors: dict[str, Tensor] = {}
    gone = []
    for i, layer in enumerate(plain.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)  # [experts, in, out]; packed along the inputs, 32 to a scale
            blocks = weight.transpose(1, 2).unflatten(-1, (-1, 32))
            power = (blocks.abs().amax(-1) / 6).log2().ceil()
            codes = (blocks[..., None] / power.exp2()[..., None, None] - FP4).abs().argmin(-1)
            weight.copy_((FP4[codes] * power.exp2()[..., None]).flatten(-2).transpose(1, 2))
            key = f"model.layers.{i}.mlp.experts.{name}"
            tensors[f"{key}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            tensors[f"{key}_scales"] = (power + 127).to(torch.uint8)
            gone.append(key)
    settings = folder_with(tmp_path, plain, tensors, gone, {"quant_method": "mxfp4"})
    loaded = load_model(settings.model, settings)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    check_target(loaded, plain, tmp_path)


def test_a_format_without_its_package_is_named(tmp_path):
    settings = folder_with(tmp_path, make_model("llama"), {}, [], {"quant_method": "gptq", "bits": 4, "group_size": 16})
    with pytest.raises(TargetError, match=r"cannot be loaded: .*optimum"):
        load_model(settings.model, settings)
