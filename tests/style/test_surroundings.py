"""How tests run: with closed sockets (conftest.py), and those of a group on one worker."""

from __future__ import annotations

import socket

import pytest


def test_other_machines_are_out_of_reach() -> None:
    with pytest.raises(PermissionError, match="without network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(PermissionError, match="without network"):
        socket.getaddrinfo("example.org", 443)


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=1).close()


@pytest.mark.xdist_group("surroundings")
def test_a_group_is_kept_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist deals tests out by what follows the @ of their names."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("no worker of `--dist loadgroup`")
    assert request.node.nodeid.endswith("@surroundings")
