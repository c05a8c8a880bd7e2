"""The batched engine on packaged drafters: what several requests get is what each gets alone, whatever serves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from line_screen import QuietScreen
from tiny_target import recipe_settings

from firesteel.cli.runner import LINE
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.protocol import Ask, Piece
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.decode import decode_plain
from firesteel.decoding.sampling import Sampling
from firesteel.drafters.paged import PagedBlockDrafter
from firesteel.errors import CheckpointError, RecipeError
from firesteel.recipe import recipe_from_dict
from firesteel.stages.engine import open_engine
from firesteel.stages.line import Line
from firesteel.target.paged import PagedTarget

MakeLine = Callable[..., Line]
PROMPTS = [tuple((7 * i + j * (i + 1)) % 90 + 4 for j in range(3 + 9 * i)) for i in range(5)]
ALGORITHMS = {
    "dspark": {"algorithm": "dspark", "block_size": 4, "num_layers": 1, "markov_rank": 8, "draft_vocab_size": 64},
    "dflash": {"algorithm": "dflash", "block_size": 4, "num_layers": 1},
    "eagle3": {"algorithm": "eagle3", "block_size": 3, "num_layers": 1},
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Callable[[str], Line]:
    """A run with a packaged drafter for each algorithm, made when first asked for."""
    made: dict[str, Path] = {}

    def get(algorithm: str, **serve: object) -> Line:
        settings = recipe_settings(base_folder, drafter=ALGORITHMS[algorithm], serve=serve, package={"proof_prompts": 2, "tolerance": 0.9})
        if algorithm not in made:
            made[algorithm] = tmp_path_factory.mktemp(algorithm)
            line = Line(recipe_from_dict({**settings, "runs_dir": str(made[algorithm])}), QuietScreen())
            for _, stage in LINE[:-1]:
                stage(line)
        return Line(recipe_from_dict({**settings, "runs_dir": str(made[algorithm])}), QuietScreen())

    return get


def answers(engine: Engine, prompts: list[tuple[int, ...]], **settings: object) -> list[list[Piece]]:
    heard: list[list[Piece]] = [[] for _ in prompts]
    for prompt, pieces in zip(prompts, heard, strict=True):
        engine.submit(Ask(prompt, 24, **settings), pieces.append)  # type: ignore[arg-type]
    while engine.step():
        pass
    return heard


def text(pieces: list[Piece]) -> list[int]:
    return [t for p in pieces for t in p.tokens]


def alone(line: Line, prompt: tuple[int, ...]) -> list[int]:
    session = line.decoding_session(line.layer_ids, 128)
    return decode_plain(session, prompt, max_new_tokens=24, eos_ids=()).tokens


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy", ["fixed", "scheduled", "asynchronous"])
def test_together_as_alone(packages: Callable[..., Line], algorithm: str, policy: str) -> None:
    line = packages(algorithm, policy=policy, max_requests=3, cache_gb=0.01)
    engine = open_engine(line, line.folder / "package")
    assert isinstance(engine.target, PagedTarget)
    assert isinstance(engine.drafter, SessionDrafter if algorithm == "eagle3" else PagedBlockDrafter)
    found = answers(engine, PROMPTS)
    assert [text(p) for p in found] == [alone(line, prompt) for prompt in PROMPTS]
    if policy == "fixed":
        assert engine.counters.rounds > 0
    assert engine.pool.used == 0


def test_a_shared_beginning_changes_neither_text_nor_drafts(packages: Callable[..., Line]) -> None:
    line = packages("dspark", policy="fixed", cache_gb=0.01)
    engine = open_engine(line, line.folder / "package")
    head = PROMPTS[4]
    prompts = [(*head, 5), (*head, 6, 7), head]
    first = answers(engine, [prompts[0]])[0]
    assert engine.pool.hit == 0
    later = answers(engine, prompts)
    assert engine.pool.hit >= 3 * 32
    assert [text(p) for p in later] == [alone(line, p) for p in prompts]
    assert [p.drafted for p in later[0]] == [p.drafted for p in first]
    for mine, own in zip(later[0], first, strict=True):
        assert [c is None for c in mine.confidences] == [c is None for c in own.confidences]
        assert [c for c in mine.confidences if c is not None] == pytest.approx([c for c in own.confidences if c is not None], abs=1e-4)


def test_a_small_cache_makes_requests_wait_or_come_again(packages: Callable[..., Line]) -> None:
    line = packages("dspark", policy="fixed")
    roomy = open_engine(line, line.folder / "package")
    per_block = line.recipe.serve.cache_gb / roomy.pool.blocks
    tight = open_engine(packages("dspark", policy="fixed", cache_gb=per_block * 9.5), line.folder / "package")
    assert tight.pool.blocks == 9
    assert [text(p) for p in answers(tight, PROMPTS)] == [alone(line, p) for p in PROMPTS]
    assert tight.pool.used == 0


def test_sampled_requests_repeat_with_their_seed(packages: Callable[..., Line]) -> None:
    line = packages("dspark", policy="fixed", cache_gb=0.01)
    engine = open_engine(line, line.folder / "package")
    sampling = Sampling(temperature=0.9, top_k=20)
    first = answers(engine, PROMPTS[:2], sampling=sampling, seed=3)
    again = answers(engine, PROMPTS, sampling=sampling, seed=3)
    assert [text(p) for p in first] == [text(p) for p in again[:2]]
    assert text(first[0]) != alone(line, PROMPTS[0])


def test_without_a_drafter_and_with_a_target_that_runs_one_by_one(packages: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    line = packages("dspark", cache_gb=0.01)
    plain = open_engine(line, None)
    wanted = [alone(line, p) for p in PROMPTS]
    assert [text(p) for p in answers(plain, PROMPTS)] == wanted
    assert plain.counters.rounds == 0
    monkeypatch.setattr("firesteel.target.paged.lean_refusal", lambda model, length: "it is another family")
    one_by_one = open_engine(packages("dspark", policy="fixed", cache_gb=0.01), line.folder / "package")
    assert isinstance(one_by_one.target, SessionTarget)
    assert not one_by_one.pool.share
    assert [text(p) for p in answers(one_by_one, PROMPTS)] == wanted
    assert one_by_one.counters.rounds > 0


def test_settings_that_do_not_fit_are_refused(packages: Callable[..., Line], tmp_path: Path) -> None:
    line = packages("dspark", tokens=9)
    with pytest.raises(RecipeError, match=r"serve\.tokens=9"):
        open_engine(line, line.folder / "package")
    with pytest.raises(CheckpointError):
        open_engine(line, tmp_path)
    with pytest.raises(RecipeError, match=r"serve\.cache_gb"):
        open_engine(packages("dspark", cache_gb=1e-6), line.folder / "package")
