"""What an earlier stage made of something else is refused, with both values and the command that mends it; or it is made anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_target import TEMPLATE, save_tiny_target, write_prompts

from firesteel.cli.runner import LINE
from firesteel.errors import ArtifactError
from firesteel.stages import calibrate, extract, package, prompts, respond, train
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]


def walk(line: Line, stages: int) -> Line:
    for _, stage in LINE[:stages]:
        stage(line)
    return line


def current(line: Line) -> set[str]:
    """Stages that had nothing to do."""
    return {text.removesuffix(": up to date") for text in line.screen.lines if text.endswith(": up to date")}  # type: ignore[attr-defined]


@pytest.mark.parametrize("store", ["disk", "memory", "stream"])
def test_states_of_other_layers_are_not_trained_on(make_line: MakeLine, store: str) -> None:
    hidden = {"store": store}
    walk(make_line(hidden=hidden), 4)
    other = make_line(hidden=hidden, target={"layer_ids": [1, 2, 3]})
    for stage in (train, calibrate, package):
        with pytest.raises(ArtifactError, match=r"hidden was made with target\.layer_ids \[1, 2, 4\], now it is \[1, 2, 3\]\n.*firesteel extract RECIPE"):
            stage.run(other)
    extract.run(other)
    with pytest.raises(ArtifactError, match=r"train was made with hidden states \w{12}, now it is \w{12}\n.*firesteel train RECIPE"):
        calibrate.run(other)
    train.run(other)
    assert train.load_trained(other, "dspark").config.layer_ids == (1, 2, 3)


def test_states_and_answers_of_another_target_are_refused(make_line: MakeLine, tmp_path: Path) -> None:
    first = walk(make_line(), 3)
    save_tiny_target(tmp_path / "other", seed=5)
    other = make_line(target={"model": str(tmp_path / "other")})
    words = rf"made with target .* \(fingerprint {first.target.spec.fingerprint}\), now it is .* \(fingerprint {other.target.spec.fingerprint}\)"
    with pytest.raises(ArtifactError, match=rf"{words}\n.*firesteel extract RECIPE"):
        train.run(other)
    with pytest.raises(ArtifactError, match=rf"{words}\n.*firesteel respond RECIPE"):
        extract.run(other)


def test_answers_to_other_prompts_are_refused(make_line: MakeLine, base_folder: Path, tmp_path: Path) -> None:
    walk(make_line(), 2)
    path = write_prompts(tmp_path / "more.jsonl", 44)
    more = make_line(prompts={"sources": [{"path": str(path)}, {"path": str(base_folder / "eval.jsonl"), "split": "eval"}]})
    prompts.run(more)
    with pytest.raises(ArtifactError, match=r"responses was made with prompts \w{12}, now it is \w{12}\n.*firesteel respond RECIPE"):
        extract.run(more)
    respond.run(more)
    extract.run(more)


def test_an_artifact_that_does_not_say_what_it_is_of_is_taken(make_line: MakeLine) -> None:
    line = walk(make_line(), 3)
    found = line.input("hidden")
    found.manifest.about.clear()
    line.__dict__["input"] = lambda name: found
    assert extract.open_hidden(line) is found


def test_an_edited_template_file_counts(make_line: MakeLine, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    target = {"chat_template": str(file)}
    assert current(walk(make_line(target=target), 2)) == set()
    assert current(walk(make_line(target=target), 2)) == {"prompts", "responses"}
    file.write_text(TEMPLATE.replace("<|im_start|>assistant {% endif %}", "<|im_start|>assistant w7 {% endif %}"))
    assert current(walk(make_line(target=target), 2)) == set()


def test_answers_on_file_under_another_template_are_not_taken(make_line: MakeLine, tmp_path: Path) -> None:
    answers = walk(make_line(), 2).folder / "responses" / "train.jsonl"
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE.replace("<|im_start|>assistant {% endif %}", "<|im_start|>assistant w7 {% endif %}"))
    other = make_line(target={"chat_template": str(file)}, responses={"answers": str(answers)})
    other.recipe.name = "other"
    walk(other, 2)
    assert not any("on file" in text for text in other.screen.lines)


def test_options_of_the_template_count(make_line: MakeLine, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE.replace("<|im_start|>assistant {% endif %}", "<|im_start|>assistant {% if thinking %}w7 {% endif %}{% endif %}"))
    target: dict[str, Any] = {"chat_template": str(file)}
    answers = tmp_path / "answers.jsonl"
    shutil.copy(walk(make_line(target=target), 2).folder / "responses" / "train.jsonl", answers)
    target["template_options"] = {"thinking": True}
    thinking = make_line(target=target, responses={"answers": str(answers)})
    assert current(walk(thinking, 2)) == set()
    assert not any("on file" in text for text in thinking.screen.lines)
    assert current(walk(make_line(target=target, responses={"answers": str(answers)}), 2)) == {"prompts", "responses"}


def test_other_weights_in_the_same_folder_count(make_line: MakeLine, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "tuned")
    target = {"model": str(folder)}
    assert current(walk(make_line(target=target), 3)) == set()
    assert current(walk(make_line(target=target), 3)) == {"prompts", "responses", "hidden"}
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = 1.01 * tensors["model.norm.weight"]
    # Not over the old file, which models of this process may have mapped.
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")
    assert current(walk(make_line(target=target), 3)) == {"prompts"}
