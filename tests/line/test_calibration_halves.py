"""Calibration is judged on documents of the same kinds as those that it was fitted on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from firesteel.cli.runner import LINE
from firesteel.stages import calibrate, extract
from firesteel.stages.extract import Listed
from firesteel.stages.line import Line


@pytest.mark.parametrize("domains", ["ab", "abc", "abcd"])
@pytest.mark.parametrize("each", [2, 3])
def test_both_halves_have_every_domain(domains: str, each: int) -> None:
    dealt = [Listed(f"{domain}{i}", 10, 5, domain) for i in range(each) for domain in domains]
    fitted, judged = calibrate.split_in_domains(dealt)
    assert {d.domain for d in fitted} == {d.domain for d in judged} == set(domains)
    assert sorted(d.key for d in [*fitted, *judged]) == sorted(d.key for d in dealt)
    assert 0 <= len(fitted) - len(judged) <= 1


def test_documents_of_a_domain_each_are_shared_out_and_one_alone_is_fitted_on() -> None:
    one, two = Listed("a", 10, 5, "a"), Listed("b", 10, 5, "b")
    assert calibrate.split_in_domains([one, two]) == ([one], [two])
    assert calibrate.split_in_domains([one]) == ([one], [])


def test_the_stage_fits_and_judges_on_two_domains(make_line: Callable[..., Line], monkeypatch: pytest.MonkeyPatch) -> None:
    line = make_line()
    halves: list[list[str]] = []
    real = calibrate.held_out_batches

    def noting(store: object, keys: list[str], layout: object, *, batch_tokens: int) -> object:
        halves.append(keys)
        return real(store, keys, layout, batch_tokens=batch_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate, "held_out_batches", noting)
    for _, stage in LINE[:5]:
        stage(line)
    domains = {d.key: d.domain for d in extract.read_index(line.input("hidden"), "validation")}
    assert [{domains[key] for key in half} for half in halves] == [{"even", "odd"}] * 2
    assert not set(halves[0]) & set(halves[1])
