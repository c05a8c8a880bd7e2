"""The list of endpoints: fixed, or a file of a run that may be edited while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from firesteel.artifact import write_atomic
from firesteel.errors import RecipeError

FILE, STATUS = "endpoints.txt", "endpoints.json"
Action = Literal["add", "remove", "list"]
HEAD = "# One endpoint a line. Edited while a run goes on, it is read again within a second: `firesteel endpoints RECIPE add URL`.\n"


class Roster:
    """Names of endpoints, in order.

    Args:
        urls: the endpoints to begin with.
        file: where the list is kept: if it is there it counts and `urls` does not; otherwise it is written. None: the list never changes.
        part: (number, count): of the list, cut into `count` groups in its order, only that group; all where the group has none.
    """

    def __init__(self, urls: Sequence[str], file: Path | None = None, part: tuple[int, int] = (0, 1)) -> None:
        self.file, self.part = file, part
        self._urls = list(dict.fromkeys(urls))
        self._stamp: tuple[int, int] | None = None
        if file is not None and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_urls(file, self._urls)

    def read(self) -> list[str]:
        """The endpoints now. A file that has just gone, or cannot be read, leaves the list as it was."""
        if self.file is not None:
            try:
                stat = self.file.stat()
                stamp = (stat.st_mtime_ns, stat.st_size)
                if stamp != self._stamp:
                    self._urls, self._stamp = read_urls(self.file), stamp
            except OSError:
                pass
        number, count = self.part
        return self._urls[number * len(self._urls) // count : (number + 1) * len(self._urls) // count] or self._urls

    @property
    def where(self) -> str:
        """What to edit, for errors."""
        return "the list of endpoints" if self.file is None else str(self.file)

    def report(self, rows: list[dict[str, Any]]) -> None:
        """Leave the state of the endpoints beside the file, for `firesteel endpoints RECIPE list`."""
        if self.file is not None:
            write_atomic(self.file.with_name(STATUS), json.dumps(rows))


def read_urls(path: Path) -> list[str]:
    """Endpoints of a file, each once, in order; empty lines and `#` comments are left out."""
    lines = (line.split("#")[0].strip().rstrip("/") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def write_urls(path: Path, urls: Sequence[str]) -> None:
    """Replace the list; a reader sees the old or the new one."""
    write_atomic(path, HEAD + "".join(f"{url}\n" for url in urls))


def edit(path: Path, action: Literal["add", "remove"], url: str) -> list[str]:
    """Add an endpoint to a run's file, or remove one; returns the new list.

    Raises:
        RecipeError: not a URL, there already, or not there.
    """
    url = url.strip().rstrip("/")
    urls = read_urls(path) if path.is_file() else []
    if action == "add":
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RecipeError(f"{url!r} is not the URL of an endpoint", mend="for example http://HOST:8000")
        if url in urls:
            raise RecipeError(f"{url} is in {path} already")
        urls.append(url)
    elif url in urls:
        urls.remove(url)
    else:
        raise RecipeError(f"{url} is not in {path}", mend=f"there: {', '.join(urls) or 'none'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_urls(path, urls)
    return urls


def read_status(folder: Path) -> dict[str, dict[str, Any]]:
    """What a run last said of its endpoints, by URL; empty if it said nothing."""
    try:
        return {row["url"]: row for row in json.loads((folder / STATUS).read_text())}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
