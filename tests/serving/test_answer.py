"""Pieces of an answer become shown tokens whose texts add up, whole characters only, and never a part of a stop string."""

from __future__ import annotations

import random

import pytest
from server_toys import EOS, SERVED, decode

from firesteel.decoding.batched.protocol import Piece
from firesteel.decoding.endings import find_stop
from firesteel.serving.answer import Answer, Delta


def play(tokens: list[int], stops: list[str], cuts: list[int], *, include: bool = False) -> list[Delta]:
    """What an engine would tell: the tokens in pieces of these sizes, an end where a stop string or an end-of-text token comes."""
    answer, deltas, rest = Answer(SERVED.decode, stops, include_stop=include), [], list(tokens)
    for size in cuts:
        taken, finish = [], None
        for token in rest[:size]:
            taken.append(token)
            if token == EOS or answer.stop(token):
                finish = "stop"
                break
        rest = rest[size:]
        if finish is None and not rest:
            finish = "length"
        deltas.append(answer.take(Piece(taken, [False] * len(taken), [None] * len(taken), finish=finish)))  # type: ignore[arg-type]
        if finish is not None:
            return deltas
    raise AssertionError("the cuts do not reach the end")


@pytest.mark.parametrize("seed", range(60))
def test_shown_texts_add_up_to_the_text_before_the_stop(seed: int) -> None:
    dice = random.Random(seed)
    # Words from few, so that beginnings of stop strings come often; the halves of a character are among them.
    tokens = [dice.choice((1, 1, 2, 2, 3, 4, 5)) for _ in range(20)] + ([EOS] if seed % 3 == 0 else [])
    full = decode([t for t in tokens if t != EOS])
    begin = dice.randrange(len(full) - 4)
    stops = [dice.choice((full[begin : begin + dice.randrange(1, 5)], "d3 d3 d3 d3", "é\ufffd")) for _ in range(dice.randrange(3))]
    stops = [s for s in stops if "\ufffd" not in s]
    found = find_stop(full, stops)
    cuts = [dice.randrange(1, 5) for _ in range(30)]
    deltas = play(tokens, stops, cuts)
    shown = [s for d in deltas for s in d.shown]
    wanted = full if found is None else full[: found.begin]
    assert "".join(s.text for s in shown) == wanted
    assert [s.token for s in shown] == [t for t in tokens if t != EOS][: len(shown)]
    told = ""
    for delta in deltas[:-1]:
        part = "".join(s.text for s in delta.shown)
        assert not part.endswith("\ufffd") or full[: len(told + part)] == told + part
        told += part
        assert wanted.startswith(told)
    whole = "".join(s.text for d in play(tokens, stops, cuts, include=True) for s in d.shown)
    assert whole == (full if found is None else full[: found.end])


def test_half_a_character_waits_for_its_other_half() -> None:
    deltas = play([3, 1, 2, 4], [], [2, 1, 1])
    assert [[s.text for s in d.shown] for d in deltas] == [["d3 "], ["", "é"], ["e4 "]]
    cut = play([3, 1], [], [1, 1])
    assert [[s.text for s in d.shown] for d in cut] == [["d3 "], ["\ufffd"]], "where no more comes it shows as what it is"


def test_a_token_waits_while_it_may_begin_a_stop_string() -> None:
    deltas = play([3, 4, 5, 3], ["e4 x"], [1, 1, 1, 1])
    assert [[s.text for s in d.shown] for d in deltas] == [["d3 "], [], ["e4 ", "f5 "], ["d3 "]]
    stopped = play([3, 4, 5, 3], ["4 f"], [1, 1, 1, 1])
    assert [[s.text for s in d.shown] for d in stopped] == [["d3 "], [], ["e", ""]]
    assert [d.tokens for d in stopped] == [1, 1, 1]
