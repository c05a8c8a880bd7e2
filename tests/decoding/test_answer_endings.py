"""Stop strings, streamed text and log-probabilities: what a server says of an answer, however it came."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, random_table

from firesteel.decoding.decode import Decoded, decode_plain, decode_speculative
from firesteel.decoding.endings import AnswerText, Stop, find_stop, held_back
from firesteel.decoding.logprobs import IMPOSSIBLE, token_logprobs
from firesteel.decoding.sampling import RandomChance
from firesteel.decoding.verify import Rejection
from firesteel.errors import RecipeError

# Token ids 0.. are pieces of bytes, as in a byte-level tokenizer; 6 to 8 are the bytes of a euro sign.
PIECES = [b"a", b"b", b"ab", b"c\nU", b"ser:", b" x", b"\xe2", b"\x82", b"\xac", b"END"]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[t] for t in tokens).decode(errors="replace")


def read(tokens: Sequence[int], stops: Sequence[str], **options: bool) -> tuple[AnswerText, int]:
    """The answer's text, and tokens read until it ended."""
    text = AnswerText(decode, stops, **options)
    for n, token in enumerate(tokens, 1):
        if text.add(token):
            return text, n
    return text, len(tokens)


@pytest.mark.parametrize(
    ("stops", "found"),
    [
        (["bc"], Stop(1, 3, "bc")),
        (["x"], None),
        (["cab", "bc"], Stop(1, 3, "bc")),  # completed first, though listed second
        (["c", "abc", "bc"], Stop(0, 3, "abc")),  # end together: the longest
        (["abcabd", "bca"], Stop(1, 4, "bca")),
        ([], None),
    ],
)
def test_the_first_completed_stop_string_counts(stops, found):
    assert find_stop("abcabc", stops) == found


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RecipeError, match="empty"):
        AnswerText(decode, ["a", ""])


def test_what_may_begin_a_stop_string_is_held_back():
    assert held_back("hello\nUs", ["\nUser:"]) == 3
    assert held_back("hello\nUser:", ["\nUser:"]) == 0  # complete: found, not held
    assert held_back("aaa", ["aab"]) == 2
    assert held_back("xa", ["abc", "xab"]) == 2
    assert held_back("x", []) == 0


def test_text_does_not_depend_on_how_it_is_cut():
    """All ways to cut a text into pieces end at the same place, and what was streamed is never taken back."""
    text, stops = "ab\ncUUser", ["cUU", "b\n\n", "Use"]
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = ["".join(c) for c in _cut(text, cuts)]
        answer = AnswerText(lambda tokens, pieces=pieces: "".join(pieces[t] for t in tokens), stops)
        streamed = ""
        for n in range(len(pieces)):
            ended = answer.add(n)
            assert answer.streamable().startswith(streamed)
            streamed = answer.streamable()
            if ended:
                break
        assert (answer.finish(), answer.stop, streamed) == ("ab\n", "cUU", "ab\n")


def _cut(text: str, cuts: Sequence[bool]) -> list[list[str]]:
    parts = [[text[0]]]
    for character, cut in zip(text[1:], cuts, strict=True):
        if cut:
            parts.append([])
        parts[-1].append(character)
    return parts


def test_stop_across_tokens_ends_with_the_token_that_completes_it():
    text, used = read([0, 3, 4, 5, 0], ["\nUser:"])
    assert (text.text, text.stop, used) == ("ac", "\nUser:", 3)
    assert read([0, 3, 4, 5], ["\nUser:"], include_stop=True)[0].text == "ac\nUser:"
    # A stop string that ends within a token: what follows it in the token does not belong to the answer.
    assert read([0, 4, 5], ["se"])[0].text == "a"
    assert read([0, 4, 5], ["se"], include_stop=True)[0].text == "ase"


def test_characters_of_several_tokens_appear_when_they_are_whole():
    text = AnswerText(decode)
    seen = []
    for token in [0, 6, 7, 8, 1]:
        text.add(token)
        seen.append(text.streamable())
    assert seen == ["a", "a", "a", "a€", "a€b"]
    cut, _ = read([0, 6, 7], [])
    assert cut.text == "a"
    assert cut.finish() == "a\ufffd"
    assert read([0, 6, 7, 8, 1], ["€b"])[0].text == "a"


def test_bytes_that_never_become_a_character_are_not_decoded_again_and_again():
    """A long run of them keeps the window short, and shows each byte once."""
    widest = 0

    def watched(tokens: Sequence[int]) -> str:
        nonlocal widest
        widest = max(widest, len(tokens))
        return decode(tokens)

    text = AnswerText(watched, ["END"])
    run = [0, *[7] * 100, 1, 6, 7, 8]
    for token in run:
        text.add(token)
    assert text.finish() == decode(run)
    assert widest <= 20


def test_tokenizers_that_swallow_the_first_space_are_read_right():
    words = [" one", " two", " three"]
    text = AnswerText(lambda tokens: "".join(words[t] for t in tokens).removeprefix(" "))
    for token in [0, 1, 2]:
        text.add(token)
    assert text.finish() == "one two three"


def texts_of(stops: Sequence[str], eos: set[int], limit: int, drafts: int | None, right: int = 99) -> tuple[list[int], str, str, str | None]:
    """Tokens, finish reason, text and stop string of a fixed answer, decoded plainly (`drafts` None) or in blocks."""
    answer = [2, 0, 3, 4, 5, 9, 0, 1]  # "ab" "a" "c\nU" "ser:" " x" "END" "a" "b"

    def table(context: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(answer[len(context) - 1]), len(PIECES)).double()

    def guess(context: tuple[int, ...]) -> torch.Tensor:
        return table(context).roll(0 if len(context) % (right + 1) else 1)

    text = AnswerText(decode, stops)
    if drafts is None:
        done = decode_plain(ToyTarget(table), [5], max_new_tokens=limit, eos_ids=eos, stop=text.add)
    else:
        drafter = ToyDrafter(guess, Enumerated([]), deterministic=True)
        done = decode_speculative(ToyTarget(table), drafter, [5], draft_tokens=drafts, max_new_tokens=limit, eos_ids=eos, stop=text.add)
    return done.tokens, done.finish_reason, text.finish(), text.stop


@pytest.mark.parametrize(
    ("stops", "eos", "limit", "tokens", "reason", "text"),
    [
        (["\nUser:"], set(), 8, 4, "stop", "abac"),  # across tokens, inside an accepted block
        (["\nUser:"], set(), 4, 4, "stop", "abac"),  # completed by the last token that there is room for
        (["\nUser:"], set(), 3, 3, "length", "abac\nU"),
        (["zzz"], {9}, 8, 6, "stop", "abac\nUser: x"),  # the end-of-text token has no text
        (["x"], {9}, 8, 5, "stop", "abac\nUser: "),  # before the end-of-text token of the same block
        ([], set(), 8, 8, "length", "abac\nUser: xENDab"),
        (["ab"], set(), 8, 1, "stop", ""),  # the first token, which comes from the prompt's pass
    ],
)
def test_answers_end_alike_with_and_without_drafts(stops, eos, limit, tokens, reason, text):
    plain = texts_of(stops, eos, limit, None)
    assert (len(plain[0]), plain[1], plain[2]) == (tokens, reason, text)
    for drafts, right in itertools.product([1, 3, 7], [1, 2, 99]):
        assert texts_of(stops, eos, limit, drafts, right) == plain


def sampled(seed: int, rule: Rejection, *, deterministic: bool, logprobs: int | None = None) -> Decoded:
    chance = RandomChance(torch.Generator().manual_seed(seed))
    drafter = ToyDrafter(random_table(4, 8), chance, deterministic=deterministic)
    return decode_speculative(
        ToyTarget(random_table(4, 3)),
        drafter,
        [0, 1],
        draft_tokens=3,
        max_new_tokens=9,
        eos_ids=(),
        temperature=0.7,
        top_k=3,
        rejection=rule,
        chance=chance,
        logprobs=logprobs,
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_same_seed_same_text(rule):
    texts = [tuple(sampled(seed, rule, deterministic=False).tokens) for seed in range(6)]
    assert texts == [tuple(sampled(seed, rule, deterministic=False).tokens) for seed in range(6)]
    assert len(set(texts)) > 3


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_the_targets_whatever_the_sampling_and_the_drafter(rule, deterministic):
    target = random_table(4, 3)
    for seed in range(5):
        done = sampled(seed, rule, deterministic=deterministic, logprobs=2)
        assert [e.token for e in done.logprobs] == done.tokens
        for k, entry in enumerate(done.logprobs):
            row = target((0, 1, *done.tokens[:k]))
            assert entry.logprob == pytest.approx(math.log(row[entry.token]))
            assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(row.topk(2).values.log().tolist())


def test_plain_decoding_has_logprobs_too():
    target = random_table(4, 3)
    plain = decode_plain(ToyTarget(target), [0, 1], max_new_tokens=3, eos_ids=(), logprobs=0)
    assert [e.top for e in plain.logprobs] == [()] * 3
    assert decode_plain(ToyTarget(target), [0, 1], max_new_tokens=3, eos_ids=()).logprobs == []


def test_logprobs_of_rows():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])
    first, second = token_logprobs(logits, [1, 2], 5)
    assert first.logprob == IMPOSSIBLE  # JSON knows no infinity
    assert sorted(first.top) == [(0, pytest.approx(-math.log(2))), (1, IMPOSSIBLE), (2, pytest.approx(-math.log(2)))]
    assert second.top[0] == (2, pytest.approx(3 - math.log(sum(map(math.exp, (1, 2, 3))))))
    with pytest.raises(RecipeError, match="negative"):
        token_logprobs(logits, [0], -1)
