"""Answer: from an engine's pieces to text that may be shown, token by token. Lives in the engine's thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firesteel.decoding.batched.protocol import Finish, Piece
from firesteel.decoding.endings import AnswerText
from firesteel.decoding.logprobs import TokenLogprob

_INCOMPLETE = "\ufffd"  # what a tokenizer shows for a character whose last bytes are still to come
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """A token whose text no later one takes back. `drafted`: the drafter proposed it and said `confidence` of it (None: nothing)."""

    token: int
    text: str
    drafted: bool
    confidence: float | None
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class Delta:
    """What has become known of an answer since the last one.

    Attributes:
        shown: tokens whose text may be streamed, in order.
        tokens: tokens that were generated, also those without text (an end-of-text token, a stop string).
        drafted: of these, proposed by the drafter.
        submitted: drafts that were verified for them.
        steps: steps of the engine that made them, `rounds` of which verified drafts.
        finish: why the answer is complete.
        error: why there will be none.
        at: `time.perf_counter()` when it became known.
    """

    shown: list[Shown] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    submitted: int = 0
    steps: int = 0
    rounds: int = 0
    finish: Finish | None = None
    error: str | None = None
    at: float = field(default_factory=time.perf_counter)

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


class Answer:
    """One answer. `stop` goes into the request that is asked of the engine, `take` is given its pieces.

    Streamed text is cut between tokens: a token waits until all of its text is certain and its last character whole, because
    log-probabilities and drafts are told token by token.

    Args:
        decode: token ids -> text, without special tokens.
        stops: stop strings.
        include_stop: they belong to the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decode, self._decoded = decode, ""
        self._text = AnswerText(self._listen, stops, include_stop=include_stop)
        # Of each token that `stop` was told of and no piece has brought yet: characters of the text up to it, and whether the last is half.
        self._ends: deque[tuple[int, bool]] = deque()
        self._held: deque[tuple[int, bool, Shown]] = deque()  # tokens that were not shown yet; their text is still to come
        self._shown = 0
        self._error: str | None = None

    def stop(self, token: int) -> bool:
        """Take the next token; True where it completes a stop string. Never raises: an engine's step must not break in its middle."""
        try:
            done = self._text.add(token)
        except Exception as e:  # a tokenizer may raise anything; it ends this answer, not the others
            _log.exception("token %d cannot be decoded", token)
            self._error, done = f"token {token} cannot be decoded: {e}", True
        self._ends.append((len(self._text.text), self._decoded.endswith(_INCOMPLETE)))
        return done

    def take(self, piece: Piece) -> Delta:
        """What a piece adds."""
        for k, token in enumerate(piece.tokens[: len(self._ends)]):  # an end-of-text token has no text, and `stop` is not told of it
            logprob = piece.logprobs[k] if piece.logprobs else None
            self._held.append((*self._ends.popleft(), Shown(token, "", piece.drafted[k], piece.confidences[k], logprob)))
        return Delta(
            self._show(last=piece.finish is not None),
            tokens=len(piece.tokens),
            drafted=sum(piece.drafted),
            submitted=piece.submitted,
            steps=1 if piece.tokens else 0,
            rounds=1 if piece.submitted else 0,
            finish=piece.finish,
            error=self._error,
        )

    def _listen(self, ids: list[int]) -> str:
        self._decoded = self._decode(ids)
        return self._decoded

    def _show(self, *, last: bool) -> list[Shown]:
        text = self._text.finish() if last and self._error is None else self._text.text
        certain = len(text) if last else len(self._text.streamable())
        ready = len(self._held) if last else max((k + 1 for k, (end, half, _) in enumerate(self._held) if end <= certain and not half), default=0)
        found = []
        for _ in range(ready):
            end, _, token = self._held.popleft()
            # What was held back may have become a stop string; half a character at the end shows with the last token.
            end = certain if last and not self._held else min(end, certain)
            found.append(Shown(token.token, text[self._shown : end], token.drafted, token.confidence, token.logprob))
            self._shown = max(self._shown, end)
        return found
