"""A small HTTP server that stands for a target, for tests and benchmarks: `POST /sample` with a key answers with that sample's bytes, at a set rate.

    python sample_server.py PORT FOLDER [--rate TOKENS_PER_SECOND] [--corrupt SHARE] [--seed N]

Serves the files of a `DiskStore` as they are; a share of the answers has a byte flipped. `GET /memory` says what the process
holds. One request is worked on at a time, like a target with one GPU; the others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
from pathlib import Path
from typing import Any


class SampleServer:
    """Reads `FOLDER/KEY.safetensors`; `status` other than 200 is answered without a sample."""

    def __init__(self, folder: Path, *, rate: float = 0.0, corrupt: float = 0.0, seed: int = 0) -> None:
        self.folder, self.rate, self.corrupt, self.status = folder, rate, corrupt, 200
        self.served = 0
        self._chance = random.Random(seed)

    async def start(self, port: int = 0) -> int:
        self._turn = asyncio.Lock()  # a lock belongs to one event loop; started again, the server has another
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 22)
        return self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")), 0)
                body = await reader.readexactly(length)
                status, answer = (200, self._tell(head)) if head.startswith(b"GET") else await self._sample(json.loads(body))
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _tell(self, head: bytes) -> bytes:
        """What a GET is answered, whatever its path."""
        return _memory()

    async def _sample(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        if self.status != 200:
            return self.status, b"out of order"
        async with self._turn:
            if self.rate:
                await asyncio.sleep(int(str(asked["tokens"])) / self.rate)
        data = bytearray((self.folder / f"{asked['key']}.safetensors").read_bytes())
        if self._chance.random() < self.corrupt:
            data[len(data) // 2] ^= 1
        self.served += 1
        return 200, bytes(data)


def _memory() -> bytes:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return json.dumps({"rss": pages * resource.getpagesize()}).encode()


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--corrupt", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    server = SampleServer(a.folder, rate=a.rate, corrupt=a.corrupt, seed=a.seed)
    print(await server.start(a.port), flush=True)
    await server.server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
