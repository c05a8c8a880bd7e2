"""BlockPool: which blocks of the caches belong to whom, and which of them hold a beginning that a later request may share.

A block holds the keys and values of `size` consecutive positions, of the target and of the drafter alike: one table of blocks per request
serves both caches, and a shared beginning is shared in both. A block is published under a digest of all tokens up to its end once the target's
cache holds it; it stays usable after its last owner has left, until its room is needed (least recently used first). Where the drafter has not
observed it, it is deaf: only for requests that go without the drafter, until another or a later owner's is not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from firesteel.errors import RecipeError


class BlockPool:
    """Blocks by number, 0 to `blocks` - 1.

    Raises:
        RecipeError: no blocks, or blocks of no size.
    """

    def __init__(self, blocks: int, size: int, *, share: bool = True) -> None:
        if blocks < 1 or size < 1:
            raise RecipeError(f"a cache of {blocks} blocks of {size} positions holds nothing", mend="give the server more memory (serve.cache_gb)")
        self.blocks, self.size, self.share = blocks, size, share
        self._free = list(range(blocks - 1, -1, -1))
        self._owners = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks
        self._published: dict[bytes, int] = {}
        self._deaf = [False] * blocks  # of published ones
        self._idle: OrderedDict[int, None] = OrderedDict()  # published blocks without an owner, the longest unused first
        self.queried = self.hit = 0  # tokens that beginnings were looked up for, and found

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks with an owner."""
        return self.blocks - self.available

    def needed(self, positions: int) -> int:
        """Blocks that hold this many positions."""
        return -(-positions // self.size)

    def grow(self, held: list[int], positions: int) -> bool:
        """Give `held` blocks for `positions` in all; False, and nothing taken, where there are not enough."""
        missing = self.needed(positions) - len(held)
        if missing > self.available:
            return False
        held += [self._take() for _ in range(missing)]
        return True

    def release(self, held: list[int]) -> None:
        """Give all of `held` back and empty it."""
        for block in reversed(held):  # so that of a beginning the last blocks go first
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None
        held.clear()

    def share_prefix(self, tokens: Sequence[int], *, deaf: bool = False) -> list[int]:
        """Blocks, now owned by the caller too, of the longest published beginning of `tokens` that leaves at least one token over.

        Args:
            deaf: take those as well that the drafter has not observed.
        """
        found: list[int] = []
        if not self.share:
            return found
        self.queried += len(tokens)
        digest = b""
        for begin in range(0, len(tokens) - self.size, self.size):
            digest = _digest(digest, tokens[begin : begin + self.size])
            block = self._published.get(digest)
            if block is None or (self._deaf[block] and not deaf):
                break
            self._idle.pop(block, None)
            self._owners[block] += 1
            found.append(block)
        self.hit += len(found) * self.size
        return found

    def heard(self, held: Sequence[int]) -> int:
        """How many of these published blocks, from the first on, the drafter has observed."""
        return next((i for i, block in enumerate(held) if self._deaf[block]), len(held))

    def publish(self, tokens: Sequence[int], held: Sequence[int], positions: int, done: int, heard: int | None = None) -> int:
        """Let others share the blocks of `held` that are full up to `positions`.

        Args:
            tokens: the text, from its first token on.
            done: what the last call for this text returned, 0 at first and after the drafter has observed what had been published without it.
            heard: positions that the drafter has observed; None: all of them.

        Returns:
            blocks that are published or need not be, for the next call.
        """
        full = positions // self.size
        if not self.share or full <= done:
            return max(done, full)
        digest = b"" if done == 0 else self._digests[held[done - 1]]
        for number in range(done, full):
            if digest is None:  # the same beginning is published by another block already, and so are ours up to there
                digest = _chain(tokens, number, self.size)
            digest = _digest(digest, tokens[number * self.size : (number + 1) * self.size])
            block, deaf = self._published.get(digest), heard is not None and (number + 1) * self.size > heard
            if block == held[number]:
                self._deaf[block] = self._deaf[block] and deaf
            elif block is None or (self._deaf[block] and not deaf):
                if block is not None:
                    self._withdraw(block)
                self._published[digest] = held[number]
                self._digests[held[number]], self._deaf[held[number]] = digest, deaf
        return full

    def _withdraw(self, block: int) -> None:
        """What it holds is published by a better one."""
        self._digests[block] = None
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None, "idle blocks are published"
            del self._published[digest]
            self._digests[block] = None
        self._owners[block] = 1
        return block


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def _chain(tokens: Sequence[int], blocks: int, size: int) -> bytes:
    digest = b""
    for number in range(blocks):
        digest = _digest(digest, tokens[number * size : (number + 1) * size])
    return digest
