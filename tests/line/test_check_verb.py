"""What `firesteel check` predicts and how it says so; and who refuses to begin where the disk is too small."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from firesteel.cli.runner import run_line
from firesteel.errors import ResourceError
from firesteel.hidden.stores import DiskStore
from firesteel.prompts.sources import load_sources
from firesteel.stages import check, extract, forecast, prompts, respond
from firesteel.stages import line as stages_line
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


def printed(line: Line) -> list[str]:
    check.run(line)
    return line.screen.lines  # type: ignore[attr-defined,no-any-return]


def numbers(lines: list[str], pattern: str) -> list[float]:
    """The groups of the only line that the pattern fits."""
    (found,) = [m for text in lines if (m := re.fullmatch(pattern, text))]
    return [float(g) for g in found.groups()]


def disk_with(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(forecast, "free_disk", lambda folder: (free, Path("/small")))


STEPS = r"training {}: about ([\d.]+) min for (\d+) steps of ([\d.]+) s, one process on this machine; validations come on top"


def timed_with(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """A trial step takes 1 s for its passes and 0.5 s for the update; returns what is asked for."""
    asked: list[dict[str, int]] = []

    def timed(*args: object, **kwargs: int) -> tuple[float, float]:
        asked.append(kwargs)
        return 1.5, 0.5

    monkeypatch.setattr(check, "step_seconds", timed)
    return asked


def test_steps_are_timed_where_they_are_counted(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed_with(monkeypatch)
    lines = printed(make_line(train={"max_steps": 120, "accumulate": 2}, evaluate={"compare": ["dflash"]}))
    for name, trial in zip(("dspark", "dflash"), asked, strict=True):
        minutes, steps, seconds = numbers(lines, STEPS.format(name))
        assert trial["anchors"] == 16
        assert steps == 120
        assert seconds == pytest.approx(2 * 1.0 * 96 / trial["tokens"] + 0.5, abs=1e-3), "two batches, one update"
        assert minutes == pytest.approx(2 * seconds, abs=0.06)
    assert not any(text.startswith("training: at most") for text in lines)


def test_a_large_batch_is_reckoned_from_a_smaller_one(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed_with(monkeypatch)
    lines = printed(make_line(train={"max_steps": 10, "batch_tokens": 8192, "anchors": 1024}))
    assert asked[0]["anchors"] == 256
    assert 0 <= 2048 - asked[0]["tokens"] < asked[0]["length"]
    assert asked[0]["tokens"] % asked[0]["length"] == 0
    _, steps, seconds = numbers(lines, STEPS.format("dspark"))
    assert (steps, seconds) == (10, pytest.approx(0.5 + 8192 / asked[0]["tokens"], abs=1e-3))


@pytest.mark.parametrize("drafter", ["dspark", "dflash", "dflash2", "eagle3", "peagle"])
def test_the_steps_are_those_of_the_recipes_drafter(make_line: MakeLine, drafter: str) -> None:
    small = {"dflash2": {"group": 8, "rank": 8, "top_k": 6}} if drafter == "dflash2" else {}
    line = make_line(drafter={"algorithm": drafter, **small}, train={"max_steps": None, "epochs": 3.0})
    lines = printed(line)
    _, steps, seconds = numbers(lines, STEPS.format(drafter))
    per_epoch = -(-forecast.forecast(line).tokens // line.recipe.train.batch_tokens)
    assert steps == 3 * per_epoch
    assert 0 < seconds < 60


def test_with_a_reduced_vocabulary(make_line: MakeLine) -> None:
    assert numbers(printed(make_line(drafter={"draft_vocab_size": 40})), STEPS.format("dspark"))[1] == 12


def test_where_only_the_clock_ends_training_nothing_is_timed(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError

    monkeypatch.setattr(check, "step_seconds", never)
    lines = printed(make_line(train={"max_steps": None, "max_minutes": 4}, evaluate={"compare": ["dflash"]}))
    assert "training: at most 8 min (2 drafters)" in lines


def test_proof_and_evaluation_are_told(make_line: MakeLine) -> None:
    lines = printed(make_line(evaluate={"compare": ["dflash"], "temperatures": [0.0, 1.0], "speed_prompts": 3}))
    pattern = (
        r"proof and evaluation: up to ([\d.]+) min: (\d+) answers, one at a time, at the (\d+) tokens/s of plain decoding; drafts that are accepted shorten it"
    )
    minutes, answers, rate = numbers(lines, pattern)
    # Two prompts of each of two domains, one with a second turn; two drafters, two temperatures. Three prompts timed: plain and with each drafter.
    assert answers == (4 + 1) * 2 * 2 + 3 * 3
    assert minutes == pytest.approx((answers * 10 + 4 * 12) / rate / 60, abs=0.06)


def test_what_states_take_and_where(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    size = r"hidden states: at most \d+ tokens, [\d.]+ GB as fp32"
    assert any(re.fullmatch(size + r" \([\d.]+ GB free\)", text) for text in printed(make_line()))
    monkeypatch.setattr(check, "free_memory", lambda: 10**9)
    lines = printed(make_line(hidden={"store": "memory"}))
    assert any(re.fullmatch(size + r", in the memory of each process \(1\.0 GB free\)", text) for text in lines)
    assert not any(text.startswith("warning: hidden.store=memory") for text in lines)
    monkeypatch.setattr(check, "free_memory", lambda: 1000)
    lines = printed(make_line(hidden={"store": "memory"}))
    assert any(text.startswith("warning: hidden.store=memory: the states may not fit") for text in lines)
    lines = printed(make_line(hidden={"store": "stream"}))
    assert any(re.fullmatch(size + ", made while training runs and not kept", text) for text in lines)


@pytest.mark.parametrize(("verb", "word"), [(check.run, "may"), (run_line, "would")])
def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    make_line: MakeLine, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Line], None], word: str
) -> None:
    disk_with(monkeypatch, 50_000)
    line = make_line()
    with pytest.raises(ResourceError, match=rf"hidden states {word} take [\d.]+ MB, 0\.1 MB are free at /small(.|\n)*runs_dir=ANOTHER_DISK"):
        verb(line)
    assert not line.folder.exists()


def test_answers_that_may_be_too_long_for_the_disk_are_a_warning(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line()
    ahead = forecast.forecast(line)
    assert ahead.least < 0.8 * ahead.nbytes
    disk_with(monkeypatch, int(0.9 * ahead.nbytes))
    with pytest.raises(ResourceError, match="hidden states may take"):
        check.run(line)
    forecast.check_room_ahead(line)
    (warning,) = [text for text in line.screen.lines if text.startswith("warning: hidden states may take")]  # type: ignore[attr-defined]
    assert "if every answer is as long as responses.max_new_tokens allows" in warning


def test_a_run_reads_its_sources_once(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million rows take minutes to read."""
    read = []
    monkeypatch.setattr(stages_line, "load_sources", lambda settings, split: read.append(split) or load_sources(settings, split))
    line = make_line()
    forecast.check_room_ahead(line)
    prompts.run(line)
    assert read == ["train", "eval"]
    line.recipe.prompts.sources[0].limit = 20
    prompts.run(line)
    assert read == ["train", "eval"] * 2, "nothing is kept from before"


@pytest.mark.parametrize("store", ["memory", "stream"])
def test_states_that_are_not_kept_on_a_disk_need_none(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    disk_with(monkeypatch, 50_000)
    line = make_line(hidden={"store": store})
    forecast.check_room_ahead(line)
    prompts.run(line)
    respond.run(line)
    extract.run(line)


def test_extraction_refuses_by_the_true_size_and_counts_what_is_there(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line()
    prompts.run(line)
    respond.run(line)
    with monkeypatch.context() as patch:
        disk_with(patch, 50_000)
        forecast.check_room_ahead(line)  # the answers are there: what they take is extraction's to say
        with pytest.raises(ResourceError, match=r"hidden states would take [\d.]+ MB, 0\.1 MB are free at /small"):
            extract.run(line)
    samples = line.folder / "hidden.partial" / "samples"
    assert not samples.exists(), "nothing was captured"
    real, put = DiskStore.put, []

    def killed(self: DiskStore, sample: object) -> None:
        real(self, sample)  # type: ignore[arg-type]
        put.append(1)
        if len(put) == 25:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            extract.run(line)
    kept = sum(p.stat().st_size for p in samples.iterdir())
    whole = extract_bytes(line)
    assert 0 < whole - kept < whole
    disk_with(monkeypatch, int((whole - kept) / 0.9) + 1000)
    extract.run(line)


def extract_bytes(line: Line) -> int:
    """What extraction predicts for all documents."""
    documents = [d for split in extract.SPLITS for d in extract.documents_of(line, split)]
    tokens, supervised = sum(len(d.token_ids) for d in documents), sum(sum(d.loss_mask) for d in documents)
    return forecast.predict_bytes(tokens, supervised, len(line.layer_ids), line.target.spec.hidden_size, "fp32", len(documents))


def test_rows_that_the_run_would_drop_do_not_stop_the_forecast(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    """A prompt too long to be taken says nothing about the length of others."""
    path = tmp_path / "more.jsonl"
    long = " ".join(f"w{i % 80}" for i in range(500))
    path.write_text((base_folder / "train.jsonl").read_text() + f'{{"prompt": "{long}"}}\n')
    plain, more = make_line(), make_line(prompts={"sources": [{"path": str(path)}, {"path": str(base_folder / "eval.jsonl"), "split": "eval"}]})
    one, two = forecast.forecast(plain), forecast.forecast(more)
    assert two.documents == one.documents + 1
    assert two.tokens < one.tokens + 96
