"""TargetSession against the model's own full forward pass."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from firesteel.errors import RecipeError, TargetError
from firesteel.target.session import TargetSession

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
IDS = (0, 1, 3, 4)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, extra = {
        "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", {}),
        "gemma3": ("Gemma3Text", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 8}),
        "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2}),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**{k: v for k, v in SIZES.items() if kind not in ("qwen2", "granite") or k != "head_dim"}, **extra)
    model = getattr(transformers, "Gemma3ForCausalLM" if kind == "gemma3" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # biases and norms away from 0 and 1
    return model.eval()


def own(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and captured states by Transformers alone; the last layer's output by a hook, since `hidden_states[-1]` is normed."""
    last = []
    handle = model.model.layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        out = model(tokens[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    states = [out.hidden_states[i][0] if i < 4 else last[0].reshape(len(tokens), -1) for i in IDS]
    return out.logits[0], torch.cat(states, -1)


@pytest.mark.parametrize(
    ("kind", "wanted", "engine"),
    [
        ("llama", "auto", "lean"),
        ("llama", "generic", "generic"),
        ("qwen2", "auto", "lean"),
        ("qwen3", "auto", "lean"),
        ("gemma3", "auto", "generic"),
        ("granite", "auto", "generic"),
    ],
)
def test_steps_equal_the_full_pass(kind, wanted, engine):
    model = make(kind)
    tokens = torch.randint(97, (30,))
    logits, aux = own(model, tokens)
    session = TargetSession(model, IDS, max_length=40, engine=wanted)
    assert session.engine_name == engine
    # Prefill, single steps, wrong drafts that are rewound, blocks, and a second text in the same session.
    for _ in range(2):
        session.rewind(0)
        first = session.forward(tokens[:13], keep=1)
        assert first.logits.shape == (1, 97)
        torch.testing.assert_close(first.logits, logits[12:13], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(first.aux, aux[:13], atol=2e-5, rtol=1e-4)
        for begin, end in ((13, 14), (14, 18), (18, 19), (19, 30)):
            session.forward((tokens[begin : min(begin + 5, end + 3)] + 1) % 97)
            session.rewind(begin)
            step = session.forward(tokens[begin:end].tolist())
            assert session.length == end
            torch.testing.assert_close(step.logits, logits[begin:end], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(step.aux, aux[begin:end], atol=2e-5, rtol=1e-4)


def test_model_is_left_as_it_was():
    model = make("gemma3")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    TargetSession(model, IDS, max_length=40).forward([1, 2, 3])
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_half_precision_runs_on_the_generic_engine():
    model = make("llama").to(torch.bfloat16)
    session = TargetSession(model, IDS, max_length=40)
    step = session.forward([1, 2, 3])
    assert session.engine_name == "generic"
    assert step.logits.dtype == torch.float32
    assert step.aux.dtype == torch.bfloat16


def test_a_lean_look_alike_with_other_arithmetic_is_noticed(monkeypatch):
    model = make("llama")
    # The same parts as Llama's, but the residual stream is scaled: structure cannot tell, the probe must.
    layer = model.model.layers[2]
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: plain(*args, **kwargs) * 1.01)
    assert TargetSession(model, IDS, max_length=40).engine_name == "generic"
    with pytest.raises(TargetError, match="differ from the model"):
        TargetSession(model, IDS, max_length=40, engine="lean")


def test_window_that_never_binds_runs_lean():
    model = make("llama")
    model.config.sliding_window = 64
    assert TargetSession(model, IDS, max_length=64).engine_name == "lean"
    assert TargetSession(model, IDS, max_length=65).engine_name == "generic"


def test_layers_without_any_cache_are_refused():
    model = make("llama")
    model.config.layer_types = ["full_attention", "something_else"] * 2
    with pytest.raises(TargetError, match="has no cache for the layers"):
        TargetSession(model, (1,), max_length=20, engine="generic")


def test_limits_are_named():
    model = make("llama")
    with pytest.raises(RecipeError, match="5"):
        TargetSession(model, (5,), max_length=40)
    with pytest.raises(TargetError, match="128 positions"):
        TargetSession(model, IDS, max_length=129)
    session = TargetSession(model, IDS, max_length=8)
    session.forward([1] * 6)
    with pytest.raises(TargetError, match=r"6 \+ 3 tokens exceed the session's 8"):
        session.forward([1, 2, 3])
    with pytest.raises(TargetError, match="cannot rewind to 7"):
        session.rewind(7)
