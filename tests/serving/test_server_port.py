"""A port that another server has, or is about to have; and addresses as clients write them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from server_toys import SERVED, Brake, reusing, toy_engine

from firesteel.errors import TargetError
from firesteel.recipe import Serve
from firesteel.serving.server import Server
from firesteel.serving.service import Service
from firesteel.target import server as other_server
from firesteel.target.server import ServerPlan, local_url

LOCAL = "127.0.0.1"
linux = pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="only Linux tells what has a port")


@linux
def test_a_port_that_is_bound_and_not_yet_listened_at_is_found_out() -> None:
    with reusing() as taken:
        taken.bind((LOCAL, 0))
        with pytest.raises(TargetError, match=r"cannot be listened at(.|\n)*set serve\.port to a free port"):
            Server(LOCAL, taken.getsockname()[1])
    first = Server(LOCAL, 0)
    try:
        with pytest.raises(TargetError, match="cannot be listened at"):
            Server(LOCAL, first.port)
    finally:
        first.close()


def test_what_an_earlier_server_left_is_no_obstacle() -> None:
    with reusing() as earlier:
        earlier.bind((LOCAL, 0))
        earlier.listen()
        port = earlier.getsockname()[1]
        with socket.create_connection((LOCAL, port)) as client:
            accepted, _ = earlier.accept()
            accepted.close()  # by the server first: its end waits on for a minute
            assert client.recv(1) == b""
    server = Server(LOCAL, port)
    assert server.port == port
    server.close()


def test_a_server_that_listens_first_is_told_of() -> None:
    server = Server(LOCAL, 0)
    with reusing() as quicker:
        quicker.bind((LOCAL, server.port))
        quicker.listen()
        with pytest.raises(TargetError, match=rf"{LOCAL}:{server.port} cannot be listened at(.|\n)*serve\.port"):
            server.run(Service(SERVED, toy_engine(Brake()), Serve()))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("::", "http://[::1]:8000")],
)
def test_a_url_has_brackets_around_what_has_colons(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


def test_a_host_that_makes_no_url_is_named(tmp_path: Path) -> None:
    plan = ServerPlan(["true"], {}, "http://localhost:80x", setting="serve")
    with pytest.raises(TargetError, match=r"http://localhost:80x is no address(.|\n)*serve\.host"), other_server.Server(plan, tmp_path, 1.0):
        pass
