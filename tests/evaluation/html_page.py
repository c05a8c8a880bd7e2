"""How tests read a page: nesting, text, addresses; and how it lies in a browser window."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if p), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=3000",
]  # fmt: skip
VOID = {"meta", "img", "source", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks nesting, collects text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "action", "data", "poster")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def look_at(page: str, folder: Path, width: int) -> tuple[int, ...]:
    """What Chromium makes of a page: its width, that of its window, images shown, tables that scroll, and parts that stick out."""
    assert CHROMIUM is not None
    # The page stands in a frame of the wanted width, as a window cannot be made as narrow as a phone. The probe replaces the
    # policy that forbids scripts; it reports the page's width, that of its window, and how many plots and tables were laid out.
    probe = (
        "<script>addEventListener('load', () => { const d = document.documentElement; parent.document.title = ["
        "d.scrollWidth, innerWidth, [...document.images].filter(i => i.complete && i.naturalWidth > 0).length,"
        "[...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth + 1).length,"
        "[...document.querySelectorAll('p, h1, h2, h3, dd, dt, figure, .table')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
        "].join(' ') })</script>"
    )
    (folder / "page.html").write_text(
        re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</head>", probe + "</head>"), encoding="utf-8"
    )
    (folder / "frame.html").write_text(f'<!doctype html><body style="margin:0"><iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>')
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files", "--window-size=1400,1000", "--dump-dom"]
    found = subprocess.run([*command, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>([^<]*)</title>", found)
    assert title is not None, found[:500]
    return tuple(map(int, title[1].split()))
