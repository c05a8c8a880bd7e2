"""What extraction leaves out, cuts and refuses: counted by reason, said, and written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from firesteel.errors import DataError, HiddenStateError
from firesteel.hidden.sample import HiddenSample
from firesteel.prompts.template import AnsweredTurn, build_document
from firesteel.responses.answers import Answered
from firesteel.stages import extract, prompts, respond
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]
IM_END = 2


def answered(line: Line) -> Line:
    prompts.run(line)
    respond.run(line)
    return line


def made_of(line: Line, read: Callable[..., list[Answered]]) -> int:
    """Documents that the answers come to, one that is empty counted as one."""
    count = 0
    for split in respond.SPLITS:
        asked = {p.key: p for p in prompts.read_prompts(line.input("prompts"), split)}
        count += sum(max(1, len(build_document(line.target.tokenizer, asked[a.prompt_key], a.turns))) for a in read(line.input("responses"), split))
    return count


def said(line: Line) -> list[str]:
    return [text for text in line.screen.lines if text.startswith("hidden: ")]  # type: ignore[attr-defined]


def test_every_answer_that_becomes_no_document_is_counted_by_reason(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = answered(make_line(hidden={"max_length": 24}))
    real = respond.read_responses

    def read(artifact: object, split: str) -> list[Answered]:
        """The first answers of the training split are replaced."""
        found = real(artifact, split)  # type: ignore[arg-type]
        if split == "train":
            one = [i for i, a in enumerate(found) if len(a.turns) == 1]
            turns = ([], [IM_END], [10, 11, IM_END], [10, 11, IM_END], list(range(10, 40)))
            made = [AnsweredTurn(ids, "", "stop") for ids in turns]
            for at, turn in zip(one, made, strict=False):
                found[at] = Answered(f"a{at}", found[at].prompt_key, 0, [turn])
            found[one[3]] = Answered("again", found[one[2]].prompt_key, 0, [made[2]])
        return found

    monkeypatch.setattr(respond, "read_responses", read)
    found = extract.run(line)
    about = found.manifest.about
    counts = {reason: d["count"] for reason, d in about["dropped"].items()}
    lost = [counts.pop("no two supervised tokens in a row within hidden.max_length=24")]
    assert counts == {"empty answer": 1, "no two supervised tokens in a row": 1, "the same tokens as another document": 1}
    assert all(d["first"].startswith("train.jsonl:") for d in about["dropped"].values())
    (cut,) = about["cut"]
    assert cut == "cut to hidden.max_length=24 tokens"
    assert about["cut"][cut]["count"] >= 1
    assert sum(about["documents"].values()) + sum(counts.values()) + sum(lost) == made_of(line, read), "nothing is missing that is not counted"
    assert max(d.tokens for d in extract.read_index(found, "train")) == 24
    for reason in counts:
        assert any(text.startswith(f"hidden: dropped: 1 x {reason} (first: train.jsonl:") for text in said(line))
    assert any(f"hidden: kept, but {about['cut'][cut]['count']} x {cut} (first: " in text for text in said(line))


@pytest.mark.parametrize("store", ["memory", "stream"])
def test_the_counts_are_there_wherever_the_states_are_kept(make_line: MakeLine, store: str) -> None:
    line = answered(make_line(hidden={"max_length": 24, "store": store}))
    about = extract.run(line).manifest.about
    assert sum(d["count"] for d in about["cut"].values()) > 0
    assert any("kept, but" in text for text in said(line))


def test_answers_that_lie_beyond_the_longest_document_are_named_with_the_setting(make_line: MakeLine) -> None:
    line = answered(make_line())
    # Shorter than any prompt; the setting itself refuses such values.
    object.__setattr__(line.recipe.hidden, "__dict__", {**line.recipe.hidden.__dict__, "max_length": 3})
    count = made_of(line, lambda artifact, split: respond.read_responses(artifact, split) if split == "train" else [])
    with pytest.raises(DataError) as e:
        extract.run(line)
    assert f"{count} x no two supervised tokens in a row within hidden.max_length=3 (first: train.jsonl:" in e.value.message
    assert e.value.mend == f"hidden.max_length=3 cuts {count} of them before their answers: raise it"


def test_documents_with_bad_states_are_counted_with_the_reason_and_the_row(make_line: MakeLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line = answered(make_line())
    spoiled: list[str] = []
    real = extract.capture_documents

    def capture(*args: object) -> list[HiddenSample]:
        samples = real(*args)  # type: ignore[arg-type]
        if not spoiled:
            samples[0].aux = samples[0].aux.clone()
            samples[0].aux[1, 1] = 0
            spoiled.append(samples[0].key)
        return samples

    monkeypatch.setattr(extract, "capture_documents", capture)
    found = extract.run(line)
    (reason,) = found.manifest.about["dropped"]
    noted = found.manifest.about["dropped"][reason]
    assert reason == "sample has an all-zero state in layer 2"
    assert noted["count"] == 1
    assert noted["first"].split(":")[0] in ("train.jsonl", "eval.jsonl")
    assert noted["first"].endswith(f"document {spoiled[0]}")
    assert any(f"hidden: dropped: 1 x {reason} (first: " in text for text in said(line))
    rows = json.loads((found / "index.json").read_text())
    assert spoiled[0] not in {row["key"] for split in rows.values() for row in split}
    assert found.manifest.about["tokens"] == sum(row["tokens"] for split in rows.values() for row in split)


def norm_twice(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = line.target.head.norm
    line.target.head.norm = nn.Sequential(norm, norm)


def norm_left_out(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.target.head.norm = nn.Identity()


def layer_off_by_one(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken for the state after all layers is the one before the last layer."""
    real = extract.capture_documents
    assert line.layer_ids[-1] == line.target.spec.num_layers - 1

    def capture(*args: object) -> list[HiddenSample]:
        return [replace(s, last=s.aux[s.last_positions, -1]) for s in real(*args)]  # type: ignore[arg-type]

    monkeypatch.setattr(extract, "capture_documents", capture)


def softcap_left_out(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.target.model.lm_head.register_forward_hook(lambda module, given, logits: 0.05 * torch.tanh(logits / 0.05))


def scale_left_out(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.target.model.lm_head.register_forward_hook(lambda module, given, logits: 0.5 * logits)


@pytest.mark.parametrize("spoil", [None, norm_twice, norm_left_out, layer_off_by_one, softcap_left_out, scale_left_out])
@pytest.mark.parametrize(("store", "codec"), [("disk", "fp32"), ("stream", "fp32"), ("disk", "fp8")])
def test_states_that_do_not_give_the_targets_own_probabilities_are_refused(
    make_line: MakeLine,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    codec: str,
    spoil: Callable[[Line, pytest.MonkeyPatch], None] | None,
) -> None:
    line = answered(make_line(target={"layer_ids": [1, 2, 3]}, hidden={"store": store, "codec": codec}))
    with torch.no_grad():  # a norm with weight 1 is the same applied twice
        line.target.head.norm.get_parameter("weight").copy_(torch.linspace(0.3, 2.0, 32))
    if spoil is None:
        assert extract.run(line).manifest.about["worst_total_variation"] < (1e-3 if codec == "fp32" else 0.02)
        return
    spoil(line, monkeypatch)
    with pytest.raises(HiddenStateError, match="recomputed from stored states") as e:
        extract.run(line)
    assert "hidden.logits_tolerance=0.02 and rounding" in e.value.message
    assert not (line.folder / "hidden").exists()
