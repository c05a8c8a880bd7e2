"""The page in a real browser: text streams, drafts are coloured, it can be stopped, errors show, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from server_toys import EOS, Brake, Running, alone, decode, running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: the page cannot be looked at")
IDLE = "!document.querySelector('#send').disabled && document.querySelector('#stop').disabled"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(brake=Brake(0.002)) as found:
        yield found


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as found:
        yield found


def send(browser: Browser, text: str) -> None:
    browser.type("#prompt", text)
    browser.click("#send")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_an_answer_streams_and_shows_what_was_drafted(server: Running, browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    browser.open(f"{server.url}/", width=width, dark=dark)
    browser.wait("document.querySelector('#model').textContent !== ''")
    assert browser.text("#model") == "toys/target"
    browser.type("#tokens", "120")
    send(browser, "f5 j9 r17")
    browser.wait(f"{IDLE} && document.querySelectorAll('#out span').length > 20")
    wanted = [t for t in alone([3, 5, 9, 17], 120) if t != EOS]
    assert browser.text("#out") == decode(wanted)
    assert browser.text("#count") == str(len(wanted))
    drafted = browser.run("document.querySelectorAll('#out .drafted').length")
    assert 0 < drafted < len(wanted)
    assert browser.text("#share") == f"{round(100 * drafted / len(wanted))}%"
    assert 1 < float(browser.text("#length")) <= 4
    assert float(browser.text("#speed")) > 0
    titles = browser.run("[...new Set([...document.querySelectorAll('#out .drafted')].map(e => e.title))].sort()")
    assert titles == ["drafted, 100% sure", "drafted, 25% sure", "drafted, 50% sure"]
    own, drafts = (browser.run(f"getComputedStyle(document.querySelector('#out span{kind}')).backgroundColor") for kind in (":not(.drafted)", ".drafted"))
    assert own != drafts
    grounds = browser.run("[...new Set([...document.querySelectorAll('#out .drafted')].map(e => getComputedStyle(e).backgroundColor))].length")
    assert grounds == 3, "the surer, the stronger"
    # Plain decoding writes the same, with nothing coloured, and stands beside the run with drafts.
    browser.click("#draft")
    browser.click("#send")
    browser.wait(f"{IDLE} && document.querySelector('#without') !== null")
    assert browser.text("#out") == decode(wanted)
    assert browser.run("document.querySelectorAll('#out .drafted').length") == 0
    assert browser.text("#length") == "–"
    assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 2
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("[...document.querySelectorAll('button, input, textarea, #out, dd')].every(e => e.getBoundingClientRect().right <= innerWidth + 1)")
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requests)
    assert browser.complaints == []
    browser.click("#draft")
    browser.click("#send")
    browser.wait(f"{IDLE} && document.querySelectorAll('#out .drafted').length > 0")
    folder = Path(os.environ.get("FIRESTEEL_PICTURES", tmp_path))
    browser.picture(folder / f"page-{width}.png")
    assert (folder / f"page-{width}.png").stat().st_size > 10_000


def test_an_answer_can_be_stopped(browser: Browser) -> None:
    with running(brake=Brake(0.05)) as slow:
        browser.open(f"{slow.url}/")
        browser.run("document.querySelector('#mode').value = 'text'")
        browser.type("#tokens", "200")
        send(browser, "f5 j9 r17")
        browser.wait("document.querySelectorAll('#out span').length > 3")
        assert slow.service.thread.open == 1
        browser.click("#stop")
        browser.wait(IDLE)
        slow.settle()
        seen = browser.text("#out")
        time.sleep(0.2)
        assert browser.text("#out") == seen != ""
        assert browser.run("document.querySelector('#error').hidden")


def test_errors_show(browser: Browser) -> None:
    brake = Brake(0.02)
    with running(brake=brake, api_key="sesame") as locked:
        browser.open(f"{locked.url}/")
        browser.wait("!document.querySelector('#error').hidden")
        assert "API key is wrong or missing" in browser.text("#error")
        browser.type("#key", "sesame")
        browser.run("document.querySelector('#key').blur()")
        browser.wait("document.querySelector('#model').textContent !== ''")
        browser.type("#tokens", "200")
        send(browser, "<img src=x onerror=alert(1)>")
        browser.wait(f"{IDLE} && !document.querySelector('#error').hidden")
        assert "the toy has no word '<img'" in browser.text("#error")
        send(browser, "f5 j9 r17")
        browser.wait("document.querySelectorAll('#out span').length > 3")
        assert browser.run("document.querySelector('#error').hidden")
        brake.broken = True
        browser.wait(f"{IDLE} && !document.querySelector('#error').hidden")
        assert "a wire came loose" in browser.text("#error")
    send(browser, "f5")
    browser.wait(f"{IDLE} && document.querySelector('#error').textContent.includes('connection')")
