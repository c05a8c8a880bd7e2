"""A batched engine from its parts: what is refused when it starts, what runs the targets that no batch can run, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from line_screen import QuietScreen
from torch import nn
from transformers import OlmoConfig, OlmoForCausalLM
from untrained_package import untrained

from firesteel.batches.anchors import seeded
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.batched.sessions import SessionTarget
from firesteel.decoding.decode import decode_plain, decode_speculative
from firesteel.decoding.policies import StaticThreshold
from firesteel.decoding.sampling import Sampling
from firesteel.drafters.rows import Draft
from firesteel.errors import RecipeError
from firesteel.stages import engine as engine_stage
from firesteel.stages import runtime
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.target.head import TargetHead
from firesteel.target.lean import lean_refusal
from firesteel.target.local import LocalTarget
from firesteel.target.paged import PagedTarget
from firesteel.target.session import TargetSession

MakeLine = Callable[..., Line]
PROMPTS = [tuple((7 * i + j * (i + 1)) % 90 + 4 for j in range(3 + 9 * i)) for i in range(3)]


def answers(engine: Engine, **settings: Any) -> list[list[int]]:
    heard: list[list[Piece]] = [[] for _ in PROMPTS]
    for prompt, pieces in zip(PROMPTS, heard, strict=True):
        engine.submit(Ask(prompt, 16, **settings), pieces.append)
    while engine.step():
        pass
    return [[t for p in pieces for t in p.tokens] for pieces in heard]


def alone(model: Any) -> list[list[int]]:
    session = TargetSession(model, (1,), max_length=100, engine="generic")
    return [decode_plain(session, p, max_new_tokens=16, eos_ids=()).tokens for p in PROMPTS]


@pytest.mark.parametrize("algorithm", ["dflash", "eagle3"])
def test_a_threshold_without_confidences_is_refused_before_the_server_is_up(make_line: MakeLine, tmp_path: Path, algorithm: str) -> None:
    line = make_line(drafter={"algorithm": algorithm}, serve={"policy": "threshold", "cache_gb": 0.01})
    with pytest.raises(RecipeError, match=rf"serve\.policy=threshold .* confidence head, which this one \({algorithm}\) has not"):
        open_engine(line, untrained(line, tmp_path / "package"))


def test_a_threshold_with_confidences_is_taken(make_line: MakeLine, tmp_path: Path) -> None:
    line = make_line(serve={"policy": "threshold", "cache_gb": 0.01})
    engine = open_engine(line, untrained(line, tmp_path / "package"))
    assert isinstance(engine.policy, StaticThreshold)
    assert answers(engine) == alone(line.target.model)


@pytest.mark.parametrize("error", [AttributeError("it has no weight"), ValueError("positions over a part"), RuntimeError("no such product")], ids=repr)
def test_a_target_with_an_unforeseen_detail_runs_one_by_one(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def lean(*_: object, **__: object) -> None:
        raise error

    line = make_line(target={"device": "cpu"}, serve={"cache_gb": 0.01})
    monkeypatch.setattr("firesteel.target.paged.LeanDecoder", lean)
    engine = open_engine(line, None)
    assert isinstance(engine.target, SessionTarget)
    assert any(f"requests take turns, a batch gains nothing ({error})" in text for text in line.screen.lines)  # type: ignore[attr-defined]
    assert answers(engine) == alone(line.target.model)


def test_a_target_whose_weights_do_not_fit_again_runs_one_by_one(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line(target={"device": "cpu"}, serve={"cache_gb": 0.01})
    monkeypatch.setattr(engine_stage, "holds_again", lambda tensors: False)
    assert isinstance(open_engine(line, None).target, SessionTarget)
    assert any("would not fit into memory" in text for text in line.screen.lines)  # type: ignore[attr-defined]


def test_norms_without_weight_run_one_by_one() -> None:
    """OLMo-1: Llama's structure, but its norms have no weight."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = OlmoForCausalLM(OlmoConfig(**sizes, max_position_embeddings=128, eos_token_id=2)).eval()
    assert lean_refusal(model, 100) is None
    with pytest.raises(AttributeError):
        PagedTarget(model, (1,), max_length=100, blocks=30)
    line: Any = SimpleNamespace(target=SimpleNamespace(model=model), screen=QuietScreen(), layer_ids=(1,))
    target = engine_stage._target(line, None, 100, 30, 0)
    assert isinstance(target, SessionTarget)


def test_a_drafter_and_its_tables_are_where_the_target_is() -> None:
    """On a device without values, since a machine without a GPU has no other."""
    there = torch.device("meta")
    head = TargetHead(nn.Identity(), torch.empty(8, 4, device=there), 1.0, None, torch.empty(8, 4, device=there))
    target, nothing = LocalTarget(None, None, None, head), None  # type: ignore[arg-type]
    ids = torch.tensor([1, 3, 6])
    shared = runtime._parts(target, nn.Linear(4, 4), nothing, ids, None, None, (), None)  # type: ignore[arg-type]
    own = runtime._parts(target, nn.Linear(4, 4), nothing, ids, torch.ones(3, 4), torch.ones(8, 4), (), None)  # type: ignore[arg-type]
    for parts in (shared, own):
        assert parts.target_ids is not None
        assert parts.head.shape == (3, 4)
        assert {t.device.type for t in (parts.embed, parts.head, parts.target_ids, *parts.drafter.parameters())} == {"meta"}


def test_a_drafter_on_a_cpu_is_given_the_generator_itself() -> None:
    """Nothing else is drawn from it: texts of a seed stay what they were."""
    given: list[object] = []

    class Session:
        def draft(self, anchor: int, count: int, *, temperature: float, generator: torch.Generator | None) -> Draft:
            given.append(generator)
            return Draft([anchor] * count, None, None)

    generator = seeded(3)
    before = generator.get_state()
    for device in (None, torch.device("cpu")):
        session = runtime.FullVocabulary(Session(), device)  # type: ignore[arg-type]
        session.draft(1, 2, temperature=0.7, generator=generator)
        session.draft(1, 2, temperature=0.7)
    assert given == [generator, None, generator, None]
    assert torch.equal(generator.get_state(), before)
    assert runtime.generator_on(torch.device("cuda"), None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "drafter",
    [{"draft_vocab_size": 40}, {"algorithm": "dflash2"}, {"algorithm": "eagle3", "draft_vocab_size": 40}, {"algorithm": "peagle"}],
    ids=["dspark", "dflash2", "eagle3", "peagle"],
)
def test_on_a_gpu_drafts_are_made_and_drawn_there(make_line: MakeLine, tmp_path: Path, drafter: dict[str, object]) -> None:
    line = make_line(target={"device": "cuda"}, drafter=drafter, serve={"policy": "fixed", "cache_gb": 0.01})
    folder = untrained(line, tmp_path / "package")
    found = runtime.open_package(line, folder)
    assert {p.device.type for p in found.drafter.parameters()} == {"cuda"}
    for temperature in (0.0, 0.8):
        texts = [
            decode_speculative(
                found.target,
                found.session,
                PROMPTS[1],
                draft_tokens=found.num_drafts,
                max_new_tokens=16,
                eos_ids=(),
                temperature=temperature,
                generator=seeded(5),
            ).tokens
            for _ in range(2)
        ]
        assert texts[0] == texts[1]
    engine = open_engine(line, folder)
    assert isinstance(engine.target, SessionTarget)
    assert answers(engine) == alone(line.target.model)
    assert answers(engine, sampling=Sampling(0.8), seed=3) == answers(engine, sampling=Sampling(0.8), seed=3)
