"""The codec: what it may lose, what it must refuse."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.errors import HiddenStateError
from firesteel.hidden.codec import checksum, decode_sample, decode_states, encode_sample, encode_states, state_bytes, verify
from firesteel.hidden.sample import HiddenSample, check_sample, predictable_positions

CODECS = ("bf16", "fp32", "fp8")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def make_sample(key: str = "doc", t: int = 9, m: int = 3, d: int = 8, seed: int = 0, lognorm: bool = True) -> HiddenSample:
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(t) >= t // 3
    positions = predictable_positions(mask)
    growth = torch.tensor([1000.0**i for i in range(m)])[:, None]
    return HiddenSample(
        key=key,
        token_ids=torch.randint(0, 50, (t,), generator=g),
        loss_mask=mask,
        aux=torch.randn(t, m, d, generator=g) * growth,
        last=torch.randn(len(positions), d, generator=g),
        last_positions=positions,
        layer_ids=tuple(range(1, m + 1)),
        target="fingerprint-of-a-target",
        last_lognorm=torch.randn(len(positions), generator=g) if lognorm else None,
    )


def fp8_bound(values: torch.Tensor) -> torch.Tensor:
    """Largest error that e4m3 with a scale of amax/448 may make: half a step of 3 mantissa bits, or of the subnormal grid."""
    v = values.double()
    scale = v.abs().amax(-1, keepdim=True) / 448
    return torch.maximum(v.abs() / 16, scale * 2.0**-10) * (1 + 1e-5) + 1e-37


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=6), st.integers(-30, 30))
def test_fp8_error_is_bounded_by_each_tokens_own_size(rows: list[list[float]], exponent: int) -> None:
    values = (torch.tensor(rows) * 10.0**exponent).clamp(-3e38, 3e38)
    payload, scale = encode_states(values, "fp8")
    assert scale is not None
    assert payload.dtype == torch.float8_e4m3fn
    assert scale.shape == values.shape[:-1]
    error = (decode_states(payload, scale).double() - values.double()).abs()
    assert bool((error <= fp8_bound(values)).all()), (values, decode_states(payload, scale))


@settings(max_examples=40, deadline=None)
@given(st.lists(FLOATS.filter(lambda x: abs(x) < 3.3e38), min_size=1, max_size=12))
def test_fp32_is_exact_and_bf16_is_the_cast(numbers: list[float]) -> None:
    values = torch.tensor(numbers)[None]
    for codec, wanted in (("fp32", values), ("bf16", values.to(torch.bfloat16))):
        payload, scale = encode_states(values, codec)
        assert scale is None
        assert torch.equal(decode_states(payload, scale), wanted)


def test_fp8_keeps_layers_whose_norms_differ_a_million_times() -> None:
    aux = make_sample(t=20).aux  # layer norms 1 : 1000 : 1000000
    payload, scale = encode_states(aux, "fp8")
    decoded = decode_states(payload, scale)
    relative = (decoded - aux).norm(dim=-1) / aux.norm(dim=-1)  # [T, m]
    assert relative.max() < 0.04
    one_scale = aux.abs().max() / 448
    flushed = (aux / one_scale).to(torch.float8_e4m3fn).float() * one_scale
    assert bool((flushed[:, 0] == 0).all()), "the test's layers are too alike to show what one scale would lose"


def test_fp8_decodes_every_code_as_the_dtype_defines_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scale = torch.tensor([2.0, 0.25])
    assert torch.equal(decode_states(codes, scale).nan_to_num(7.0), (codes.float() * scale[:, None]).nan_to_num(7.0))


def test_fp8_of_zero_and_of_one_huge_element() -> None:
    values = torch.tensor([[0.0, 0.0, -0.0], [3.4e38, -3.4e38, 0.0], [1e-45, 0.0, 0.0]])
    payload, scale = encode_states(values, "fp8")
    decoded = decode_states(payload, scale)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded[0], torch.zeros(3))
    assert torch.allclose(decoded[1], values[1], rtol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["aux", "last", "last_lognorm"])
def test_non_finite_states_are_refused_by_name(codec: str, bad: float, field: str) -> None:
    sample = make_sample("doc7")
    getattr(sample, field).view(-1)[5] = bad
    with pytest.raises(HiddenStateError, match="doc7"):
        encode_sample(sample, codec)  # type: ignore[arg-type]


def test_a_state_beyond_bf16_is_refused_not_stored_as_infinity() -> None:
    sample = make_sample()
    sample.aux[0, 0, 0] = 3.4028e38
    with pytest.raises(HiddenStateError, match=r"range of bf16(.|\n)*hidden\.codec=fp32"):
        encode_sample(sample, "bf16")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("lognorm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sample_comes_back_with_everything_it_carried(codec: str, lognorm: bool, dtype: torch.dtype) -> None:
    sample = make_sample(lognorm=lognorm, m=2)
    sample.aux, sample.last = sample.aux.to(dtype), sample.last.to(dtype)
    tensors, header = encode_sample(sample, codec)  # type: ignore[arg-type]
    verify(tensors, header, "here")
    back = decode_sample(tensors, header)
    check_sample(back, layer_ids=sample.layer_ids, target=sample.target)
    assert (back.key, len(back)) == (sample.key, len(sample))
    for name in ("token_ids", "loss_mask", "last_positions"):
        found, wanted = getattr(back, name), getattr(sample, name)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert (back.last_lognorm is None) == (not lognorm)
    if back.last_lognorm is not None:
        assert torch.equal(back.last_lognorm, sample.last_lognorm)
    for name in ("aux", "last"):
        found, wanted = getattr(back, name).float(), getattr(sample, name).float()
        assert found.shape == wanted.shape
        assert float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) <= {"fp32": 0, "bf16": 2**-8, "fp8": 0.06}[codec]
    assert tensors["aux"].nbytes + (tensors["aux_scale"].nbytes if codec == "fp8" else 0) == state_bytes(9 * 2, 8, codec)  # type: ignore[arg-type]


def test_the_checksum_covers_names_types_shapes_bytes_and_header() -> None:
    tensors, header = encode_sample(make_sample(), "fp8")
    reference = header["checksum"]
    assert checksum(dict(reversed(tensors.items())), dict(reversed(header.items()))) == reference
    for name, tensor in tensors.items():
        flipped = tensor.clone()
        flipped.view(torch.uint8).view(-1)[-1] ^= 1
        assert checksum({**tensors, name: flipped}, header) != reference, name
        assert checksum({**tensors, name: tensor.unsqueeze(0)}, header) != reference, name
    assert checksum({**tensors, "aux_scale": tensors["aux_scale"].view(torch.int32)}, header) != reference
    for name in header.keys() - {"checksum"}:
        assert checksum(tensors, {**header, name: header[name] + "0"}) != reference, name


def test_another_format_version_is_named_as_such() -> None:
    tensors, header = encode_sample(make_sample(), "bf16")
    header["format_version"] = "2"
    header["checksum"] = checksum(tensors, header)
    with pytest.raises(HiddenStateError, match="format version 2, this Firesteel reads 1"):
        verify(tensors, header, "file")


def test_a_sample_with_the_checksum_of_earlier_days_is_read_and_its_damage_seen() -> None:
    tensors, header = encode_sample(make_sample(), "bf16")
    digest = hashlib.blake2b(json.dumps({k: v for k, v in header.items() if k != "checksum"}, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    header["checksum"] = digest.hexdigest()
    verify(tensors, header, "file")
    tensors["aux"].view(torch.uint8)[0, 0, 0] ^= 1
    with pytest.raises(HiddenStateError, match="file is corrupt"):
        verify(tensors, header, "file")


def test_an_empty_document_tail_encodes() -> None:
    sample = make_sample()
    sample.last, sample.last_positions, sample.last_lognorm = sample.last[:0], sample.last_positions[:0], None
    for codec in CODECS:
        assert decode_sample(*encode_sample(sample, codec)).last.shape == (0, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 2, 5), (700, 3, 96), (1, 1), (7,), (0, 4), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_in_parts_is_fp8_at_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    states = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10 ** torch.arange(float(shape[-1])).remainder(5)).to(dtype)
    payload, scale = encode_states(states, "fp8")
    values = states.float()
    wanted = (values.abs().amax(-1) / 448).clamp_min(torch.finfo(torch.float32).tiny)
    assert scale is not None
    assert torch.equal(scale, wanted)
    assert torch.equal(payload.view(torch.uint8), (values / wanted[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
