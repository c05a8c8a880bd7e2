"""Decoding of every family: each engine equals the whole pass, and speculative text is the text that Transformers writes."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from target_families import FAMILIES, LAYERS, PROMPT, VOCABULARY, check_close, family, own_states

from firesteel.decoding.decode import decode_plain, decode_speculative
from firesteel.target import generic
from firesteel.target.session import TargetSession

IDS = (0, 2, LAYERS)
RECURRENT = [name for name, kind in FAMILIES.items() if kind.engine == "recurrent"]


@cache
def session_of(name: str) -> TargetSession:
    """Made once, as the evaluation makes it; whoever decodes rewinds it first."""
    session = TargetSession(family(name).model, IDS, max_length=64)
    assert session.engine_name == FAMILIES[name].engine
    return session


class Guesser:
    """Knows the text and drafts it right for `right` tokens of a block, 0, 1, ... of them in turn where that is None."""

    def __init__(self, text: list[int], right: int | None) -> None:
        self.text, self.right, self.rounds = text, right, 0
        self.aux: list[torch.Tensor] = []

    def observe(self, *seen: torch.Tensor) -> None:
        self.aux.append(seen[-1])

    def draft(self, anchor: int, count: int, *, temperature: float, generator: object) -> SimpleNamespace:
        at = sum(len(a) for a in self.aux) + 1
        right = self.rounds % (count + 1) if self.right is None else self.right
        self.rounds += 1
        tokens = (self.text[at:] + [0] * count)[:count]
        return SimpleNamespace(tokens=[t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(tokens)], probs=None, confidences=None)

    def rewind(self, length: int) -> None:
        self.aux = [torch.cat(self.aux)[:length]] if self.aux else []


@pytest.mark.lossless
@pytest.mark.parametrize("right", [0, None, 99])
@pytest.mark.parametrize("name", FAMILIES)
def test_speculative_text_is_what_transformers_writes(name, right):
    tiny = family(name)
    text = tiny.text.tolist()
    session = session_of(name)
    guesser = Guesser(text, right)
    done = decode_speculative(session, guesser, text[:PROMPT], draft_tokens=4, max_new_tokens=len(text) - PROMPT, eos_ids=())
    assert done.tokens == text[PROMPT:]
    if right is not None:
        assert all(r.accepted == min(right, r.drafted) for r in done.rounds)
    # The drafter was shown the states of exactly the text, in order.
    states, _ = own_states(tiny.model, tiny.text)
    aux = torch.cat(guesser.aux)
    assert len(aux) > PROMPT + 20
    check_close(aux, torch.cat([states[i] for i in IDS], -1)[: len(aux)])


@pytest.mark.lossless
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_text_is_what_transformers_writes(name):
    tiny = family(name)
    text = tiny.text.tolist()
    session = session_of(name)
    assert decode_plain(session, text[:PROMPT], max_new_tokens=len(text) - PROMPT, eos_ids=()).tokens == text[PROMPT:]
    eos = text[PROMPT + 6]
    first = text[PROMPT:].index(eos)
    done = decode_plain(session, text[:PROMPT], max_new_tokens=20, eos_ids=(eos,))
    assert (done.tokens, done.finish_reason) == (text[PROMPT : PROMPT + first + 1], "stop")


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_and_rewinds_equal_the_whole_pass(name):
    """Prefill, single steps, wrong drafts, short and far rewinds, and a second text in the same session."""
    tiny = family(name)
    session = session_of(name)
    for text in (tiny.text, tiny.text.flip(0)):
        states, logits = own_states(tiny.model, text)
        aux = torch.cat([states[i] for i in IDS], -1)
        session.rewind(0)
        for begin, end in ((0, 9), (9, 10), (10, 14), (12, 20), (16, 17), (17, 25), (3, 8), (8, 30), (30, 40)):
            session.rewind(min(begin, session.length))
            session.forward((text[begin : begin + 4] + 1) % VOCABULARY)
            session.rewind(begin)
            step = session.forward(text[begin:end], keep=2 if end - begin > 2 else None)
            check_close(step.logits, logits[begin:end][-len(step.logits) :], f"{begin}:{end}")
            check_close(step.aux, aux[begin:end], f"{begin}:{end}")


@pytest.mark.parametrize("name", RECURRENT)
def test_going_back_reads_only_what_was_accepted(name, monkeypatch):
    tiny = family(name)
    session = TargetSession(tiny.model, IDS, max_length=64)
    read = []
    plain = generic.GenericDecoder._run
    monkeypatch.setattr(generic.GenericDecoder, "_run", lambda self, tokens, keep: (read.append(len(tokens)), plain(self, tokens, keep))[1])
    session.forward(tiny.text[:20])
    session.forward(tiny.text[20:25])
    session.rewind(22)
    session.forward(tiny.text[22:27])
    session.forward(tiny.text[27:30])
    assert read == [20, 5, 2, 5, 3]
    session.rewind(4)  # before the last pass began: the text is read anew
    session.forward(tiny.text[4:6])
    assert read[5:] == [4, 2]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_is_not_put_back_is_noticed(name, monkeypatch):
    """Without the copies the probe must refuse the target: nothing else would tell."""
    monkeypatch.setattr(generic, "copy", SimpleNamespace(deepcopy=lambda layer: layer))
    with pytest.raises(generic.TargetError, match="differs from its forward pass"):
        TargetSession(family(name).model, IDS, max_length=64)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt_oss", "mistral"])
def test_sliding_windows_bind(name):
    """The tests above see them: the first layer looks 6 tokens back, and the start of a text of 40 is out of its sight at the end."""
    tiny = family(name)
    other = torch.cat([(tiny.text[:3] + 1) % VOCABULARY, tiny.text[3:]])
    states, changed = own_states(tiny.model, tiny.text)[0], own_states(tiny.model, other)[0]
    torch.testing.assert_close(changed[1][-1], states[1][-1])
    assert not torch.allclose(changed[1][4], states[1][4], atol=1e-3)
    if name != "mistral":  # the second layer has full attention
        assert not torch.allclose(changed[2][-1], states[2][-1], atol=1e-4)
