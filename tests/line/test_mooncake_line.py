"""The whole line with states from a server through Mooncake: one client at a time, and none is left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hidden"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
from mooncake_fake import Fake, install
from states_program import make_server

from firesteel.cli.runner import LINE
from firesteel.errors import RecipeError
from firesteel.hidden.exchange import MooncakeExchange
from firesteel.hidden.mooncake import MooncakeSettings
from firesteel.stages import train
from firesteel.stages.line import Line

MakeLine = Callable[..., Line]
MIB = 1 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install(monkeypatch)


@pytest.fixture
def url(base_folder: Path, fake: Fake) -> Iterator[str]:
    """A server of the tiny target, in this process."""
    exchange = MooncakeExchange(MooncakeSettings("master:1", segment=MIB))
    server, writer = make_server(str(base_folder / "target"), [1, 2, 4], 256, exchange, 60.0, ("127.0.0.1", 0))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    writer.close()


def served(make_line: MakeLine, url: str, **feed: object) -> Line:
    mooncake = {"master": "master:1", "segment_gb": 1.0}
    return make_line(
        target={"engine": "vllm", "endpoints": [url]},
        hidden={"store": "stream", "transport": "mooncake", "mooncake": mooncake, "feed": feed},
    )


def test_a_process_is_one_client_and_none_once_its_line_is_done(make_line: MakeLine, fake: Fake, url: str) -> None:
    line = served(make_line, url)
    for number, (_, stage) in enumerate(LINE[:6]):
        stage(line)
        assert fake.joined == [MIB], f"stage {number} has left all that it joined"
    assert fake.most == 1
    assert fake.setups.count(0) == 5, "the stage `hidden` to capture and to compare; train, calibrate and package"
    assert (line.folder / "package" / "model.safetensors").is_file()
    assert not any(t.name == "feed" for t in threading.enumerate())


def test_what_is_refused_or_fails_on_the_way_leaves_no_client(make_line: MakeLine, fake: Fake, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, stage in LINE[:3]:
        stage(served(make_line, url))
    for feed, words in (({"low_tokens": 1}, "low_tokens=1 is below"), ({"groups": 2}, "groups=2 does not divide")):
        with pytest.raises(RecipeError, match=words):
            LINE[3][1](served(make_line, url, **feed))

    def broken(*args: object) -> None:
        raise RuntimeError("no weights to begin with")

    monkeypatch.setattr(train, "begin_as_target", broken)
    with pytest.raises(RuntimeError, match="no weights"):
        LINE[3][1](served(make_line, url))
    monkeypatch.setattr(train, "make_tables", broken)
    with pytest.raises(RuntimeError, match="no weights"):
        LINE[3][1](served(make_line, url))
    assert fake.joined == [MIB]
