"""How tests run: with closed sockets (conftest.py), and those of a group on one worker.

And that the tests which docs/security.md names are there.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_other_machines_are_out_of_reach() -> None:
    with pytest.raises(PermissionError, match="without network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with pytest.raises(PermissionError, match="without network"):
        socket.getaddrinfo("example.org", 443)


def test_every_test_that_security_promises_name_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`([^`]*test_\w+\.py)`", page)
    assert len(set(named)) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
