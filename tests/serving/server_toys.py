"""A server on a toy engine: forty words, a target and a drafter with known distributions, and a real uvicorn on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, random_table
from torch import Tensor

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.engine import Engine
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.decoding.decode import decode_plain
from firesteel.errors import DataError
from firesteel.kernels.spans import Span
from firesteel.recipe import Serve
from firesteel.serving.server import Server
from firesteel.serving.service import Served, Service

EOS = 0
# Token 1 and 2 are the halves of a character; the others are words.
WORDS: list[bytes] = [b"", "é".encode()[:1], "é".encode()[1:], *(f"{chr(97 + i % 26)}{i} ".encode() for i in range(3, 40))]
TARGET = random_table(len(WORDS), 1, memory=2)
NAME = "toys/target"
LONGEST = 256
CONFIDENCES = (0.25, 0.5, 1.0)


def decode(ids: list[int]) -> str:
    return b"".join(WORDS[i] for i in ids).decode(errors="replace")


def encode(text: str) -> list[int]:
    known = {w.decode().strip(): i for i, w in enumerate(WORDS) if i > 2}
    try:
        return [known[word] for word in text.split()]
    except KeyError as e:
        raise DataError(f"the toy has no word {e}") from None


def encode_chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> list[int]:
    return [3 + len(tools or ()), *(i for m in messages for i in encode(m["content"]))]


SERVED = Served(
    name=NAME,
    encode=encode,
    encode_chat=encode_chat,
    decode=lambda ids: decode([i for i in ids if i != EOS]),
    token_text=lambda i: "<eos>" if i == EOS else decode([i]),
    token_bytes=lambda i: b"<eos>" if i == EOS else WORDS[i],
    eos_ids=frozenset({EOS}),
    vocab_size=len(WORDS),
    created=1,
)


@dataclass
class Brake:
    """Slows every step, or breaks one."""

    seconds: float = 0.0
    broken: bool = False
    steps: int = field(default=0)


class SlowTarget(SessionTarget):
    def __init__(self, brake: Brake) -> None:
        super().__init__(lambda: ToyTarget(TARGET, max_length=LONGEST))
        self.brake = brake

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.brake.steps += 1
        if self.brake.broken:
            raise RuntimeError("a wire came loose")
        time.sleep(self.brake.seconds)
        return super().forward(tokens, spans, keep)


def toy_engine(brake: Brake, *, draft: bool = True, requests: int = 4, blocks: int = 512) -> Engine:
    """The drafter foresees the target's likeliest tokens most of the time."""

    def drafter() -> ToyDrafter:
        table = random_table(len(WORDS), 9, memory=2)
        return ToyDrafter(
            lambda context: TARGET(context) if sum(context[-2:]) % 4 else table(context),
            Enumerated([]),
            confidence=lambda c, t: CONFIDENCES[c[-1] % 3],
            deterministic=True,
        )

    made = SessionDrafter(drafter, 3) if draft else None
    return Engine(SlowTarget(brake), made, BlockPool(blocks, 4, share=False), draft_tokens=3 if draft else 0, max_requests=requests, max_tokens=64)


def reusing() -> socket.socket:
    """A socket as servers make it."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def alone(prompt: Sequence[int], count: int, *, eos: bool = True) -> list[int]:
    """What the target writes greedily."""
    return decode_plain(ToyTarget(TARGET, max_length=LONGEST), prompt, max_new_tokens=count, eos_ids={EOS} if eos else ()).tokens


@dataclass
class Running:
    service: Service
    url: str
    brake: Brake
    server: Server
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **settings)

    def settle(self) -> None:
        """Wait until nothing is open any more; the test's own time limit ends it where something leaks."""
        while self.service.thread.open or self.service.calls or self.engine.pool.used:
            time.sleep(0.01)


@contextmanager
def running(
    *,
    brake: Brake | None = None,
    draft: bool = True,
    requests: int = 4,
    blocks: int = 512,
    served: Served = SERVED,
    engine: Engine | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server; settings are those of `serve:`."""
    brake = brake or Brake()
    service = Service(served, engine or toy_engine(brake, draft=draft, requests=requests, blocks=blocks), Serve(**settings))
    server = Server("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(service,))
    thread.start()
    server.wait_until_up(60)
    try:
        yield Running(service, server.url, brake, server, thread)
    finally:
        brake.seconds = 0.0
        server.stop()
        thread.join()
        assert brake.broken or service.engine.pool.used == 0, "blocks of the cache are left over"
