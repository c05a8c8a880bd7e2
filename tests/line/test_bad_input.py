"""What users do wrong: one clear error each, that names the file or setting and the mend."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from templated_target import save_templated_target
from tiny_target import save_tiny_target, write_prompts

from firesteel import artifact
from firesteel.cli.runner import LINE, run_line
from firesteel.errors import CheckpointError, DataError, FiresteelError, RecipeError, ResourceError, TargetError, TemplateError, VerificationError
from firesteel.hidden.stores import DiskStore
from firesteel.stages import check, extract, package, prompts, respond
from firesteel.stages.line import Line
from firesteel.stages.runtime import open_package

from prompt_templates import ENDLESS, REWRITER  # isort: skip - templated_target makes it known

MakeLine = Callable[..., Line]


def sources(path: Path, base: Path) -> dict[str, object]:
    return {"sources": [{"path": str(path)}, {"path": str(base / "eval.jsonl"), "split": "eval"}], "validation": 0.2, "max_tokens": 64}


def test_missing_file(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        prompts.run(make_line(prompts=sources(tmp_path / "nothing.jsonl", base_folder)))


def test_empty_file(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        prompts.run(make_line(prompts=sources(path, base_folder)))


def test_rows_of_mixed_shape_are_used_or_counted(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "mixed.jsonl", 10)
    with path.open("a") as f:
        f.write(json.dumps({"conversations": [{"from": "human", "value": "w1 w9 w33"}, {"from": "gpt", "value": "w2"}]}) + "\n")
        f.write(json.dumps({"prompt": "w4 w5 w61"}) + "\n{broken\n" + json.dumps({"nonsense": 1}) + "\n")
    line = make_line(prompts=sources(path, base_folder))
    about = prompts.run(line).manifest.about
    assert about["prompts"]["train"] + about["prompts"]["validation"] == 12
    assert sum(d["count"] for d in about["dropped"].values()) == 2
    assert any("mixed.jsonl:13" in d["first"] for d in about["dropped"].values())


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_separator_of_lines_in_a_prompt_is_text(make_line: MakeLine, base_folder: Path, tmp_path: Path, separator: str) -> None:
    path, text = write_prompts(tmp_path / "separated.jsonl", 10), f"w1 w9{separator}w33 w61"
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    found = prompts.run(make_line(prompts=sources(path, base_folder)))
    texts = [p.messages[0]["content"] for split in ("train", "validation") for p in prompts.read_prompts(found, split)]
    assert len(texts) == 11
    assert text in texts


def test_cut_answers_are_counted_and_said(make_line: MakeLine) -> None:
    line = make_line(responses={"max_new_tokens": 4})
    prompts.run(line)
    found = respond.run(line)
    for split in respond.SPLITS:
        turns = [t for a in respond.read_responses(found, split) for t in a.turns]
        cut = [t for t in turns if t.token_ids[-1] != 2]
        assert [t.finish_reason for t in turns] == ["length" if t in cut else "stop" for t in turns]
        assert all(len(t.token_ids) == 4 for t in cut)
        assert len(cut) > 0
        whole = {"stop": len(turns) - len(cut)} if len(cut) < len(turns) else {}
        assert found.manifest.about[split]["finish_reasons"] == {"length": len(cut), **whole}
        [said] = [text for text in line.screen.lines if text.startswith(f"responses: {split}: ")]
        stops = "".join(f", {n} stop" for n in whole.values())
        assert said.endswith(f"finish reasons: {len(cut)} length{stops} ({len(cut) / len(turns):.0%} cut at responses.max_new_tokens=4)")


def test_supervised_tokens_are_told_by_source(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    more = write_prompts(tmp_path / "more.jsonl", 12, start=300)
    given = [{"path": str(base_folder / "train.jsonl")}, {"path": str(more)}, {"path": str(base_folder / "eval.jsonl"), "split": "eval"}]
    line = make_line(prompts={"sources": given})
    prompts.run(line)
    respond.run(line)
    about = extract.run(line).manifest.about
    told = {split: about["supervised_by_source"][split] for split in extract.SPLITS}
    assert set(told["train"]) == {"train.jsonl", "more.jsonl"}
    for split in extract.SPLITS:
        assert sum(told[split].values()) == sum(about["supervised"][split].values())
    both = sum(told[split].get("more.jsonl", 0) for split in extract.SPLITS)
    assert any(text.startswith("hidden: supervised tokens by source: ") and f"{both} of more.jsonl" in text for text in line.screen.lines)


def test_layer_out_of_range(make_line: MakeLine) -> None:
    line = make_line(target={"layer_ids": [1, 9]})
    with pytest.raises(RecipeError, match=r"target\.layer_ids has 9.*4 layers"):
        _ = line.layer_ids


def test_target_without_chat_template(make_line: MakeLine, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "bare", template=None)
    with pytest.raises(TargetError, match="chat template"):
        prompts.run(make_line(target={"model": str(tmp_path / "bare")}))


@pytest.mark.parametrize(("template", "words"), [(REWRITER, "otherwise once it is answered"), (ENDLESS, "no end-of-turn token after an answer")])
def test_a_template_that_cannot_be_aligned(make_line: MakeLine, tmp_path: Path, template: str, words: str) -> None:
    line = make_line(target={"model": str(save_templated_target(tmp_path / "odd", template))})
    for stage in (prompts.run, check.run):
        with pytest.raises(TemplateError, match=words + r"(.|\n)*target\.chat_template=FILE"):
            stage(line)
    assert not (line.folder / "prompts").exists()


def test_tools_that_the_template_does_not_show_are_counted(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    path, tools = write_prompts(tmp_path / "tools.jsonl", 10), [{"name": "look", "parameters": {"type": "object", "properties": {}}}]
    rows = [json.loads(text) | ({"tools": tools} if number < 3 else {}) for number, text in enumerate(path.read_text().splitlines())]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    line = make_line(prompts=sources(path, base_folder))
    notes = prompts.run(line).manifest.about["notes"]
    assert [(n["count"], "does not show the prompt's tools" in text) for text, n in notes.items()] == [(3, True)]
    assert any("prompts: 3 x the chat template does not show the prompt's tools" in text for text in line.screen.lines)


def test_interrupted_download(make_line: MakeLine, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(TargetError, match=r"target\.model="):
        _ = make_line(target={"model": str(folder)}).target


def test_folder_without_a_model(make_line: MakeLine, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(TargetError, match=r"config\.json"):
        _ = make_line(target={"model": str(tmp_path / "nothing")}).target


def test_full_disk_keeps_what_was_finished(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line()
    prompts.run(line)
    respond.run(line)
    written: list[str] = []
    real = DiskStore.put

    def put(self: DiskStore, sample: object) -> None:
        if len(written) == 5:
            raise artifact.disk_error(OSError(errno.ENOSPC, "No space left on device"), self.folder)
        real(self, sample)  # type: ignore[arg-type]
        written.append(sample.key)  # type: ignore[attr-defined]

    monkeypatch.setattr(DiskStore, "put", put)
    with pytest.raises(ResourceError, match="No space left"):
        extract.run(line)
    monkeypatch.undo()
    kept = DiskStore(line.folder / "hidden.partial" / "samples", "fp32").keys()
    assert sorted(kept) == sorted(written)
    extract.run(line)


def test_checkpoint_of_another_target(make_line: MakeLine, tmp_path: Path) -> None:
    line = make_line()
    run_line(line)
    save_tiny_target(tmp_path / "other", seed=5)
    other = make_line(target={"model": str(tmp_path / "other")})
    with pytest.raises(CheckpointError, match="was trained for"):
        open_package(other, line.folder / "package")


def test_nan_in_the_states_is_refused(make_line: MakeLine) -> None:
    """A target that gives NaN: loud at capture, not silent in training."""
    line = make_line()
    prompts.run(line)
    respond.run(line)
    with torch.no_grad():
        line.target.layers[2].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(FiresteelError, match="non-finite"):
        extract.run(line)


def test_a_drafter_that_does_not_keep_its_promise_is_not_packaged(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and serving disagree: here validation promises a token a round more than the exported folder decodes."""
    line = make_line()
    for _, stage in LINE[:5]:
        stage(line)
    real = package.run_validation

    def boastful(*args: object, **kwargs: object) -> object:
        found = real(*args, **kwargs)  # type: ignore[arg-type]
        found.acceptance_length += 1.0
        return found

    monkeypatch.setattr(package, "run_validation", boastful)
    with pytest.raises(VerificationError, match="validation promised"):
        LINE[5][1](line)
    assert not (line.folder / "package").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"drafter": {"algorithm": "dflash2", "draft_vocab_size": 40}}, "drafter.draft_vocab_size=40"),
        (
            {"drafter": {"draft_vocab_size": 40}, "evaluate": {"compare": ["dflash2"]}},
            r"compare has dflash2: drafter.draft_vocab_size=40(.|\n)*in evaluate.drafters.dflash2",
        ),
        ({"evaluate": {"drafters": {"eagle": {"num_layers": 1}}}}, r"evaluate.drafters=eagle is not known(.|\n)*did you mean peagle"),
        ({"evaluate": {"compare": ["mtp"]}}, "evaluate.compare has mtp: drafter.algorithm=mtp: no MTP head is known"),
        ({"drafter": {"init": "target", "num_layers": 5}}, r"init=target: 4 target layers for drafter.num_layers=5"),
        ({"drafter": {"init": "target", "intermediate_size": 40}}, r"init=target: .* is \[40, 32\] in the drafter and \[48, 32\]"),
        ({"package": {"speculative_tokens": 5}}, "package.speculative_tokens has 5, but this drafter drafts 1 to 4"),
        ({"drafter": {"algorithm": "dflash"}, "evaluate": {"draft_lengths": [2, 4]}}, "evaluate.draft_lengths has 4, but this drafter drafts 1 to 3"),
        ({"drafter": {"algorithm": "eagle3", "eagle": {"fc_norm": True, "norm_before_fc": True}}}, "both true"),
        ({"drafter": {"algorithm": "eagle3", "sample_from_anchor": False}}, "sample_from_anchor"),
        ({"drafter": {"algorithm": "mtp"}}, "no MTP head is known for targets of model type 'llama'"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_before_anything_is_made(make_line, sections, words: str) -> None:
    line = make_line(**sections)
    with pytest.raises(FiresteelError, match=words):
        run_line(line)
    assert not line.folder.exists()
