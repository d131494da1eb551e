"""Addresses and interfaces of this host are those that lead to the other one, whatever this host's name stands for."""

from __future__ import annotations

import socket

import pytest

from ostinato_engines.network import address_towards, interface_towards

ELSEWHERE = "192.0.2.77"
"""Set aside for examples; nothing is sent there."""


def test_the_loopback_leads_to_this_host() -> None:
    """The own address towards the loopback is on it, and so is its interface."""
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert interface_towards("127.0.0.1", 80) in {name for _, name in socket.if_nameindex()}


def test_the_address_for_others_is_none_of_the_loopback() -> None:
    """Also where this host's own name stands for 127.0.0.1 or 127.0.1.1; and an interface that is named has that address."""
    try:
        own = address_towards(ELSEWHERE, 9)
    except OSError:
        pytest.skip("this host has no way to others")
    assert not own.startswith("127.")
    with socket.create_server((own, 0)) as server:  # it is one of this host's
        assert address_towards(own, server.getsockname()[1]) == own
    loopback = interface_towards("127.0.0.1", 9)
    assert interface_towards(ELSEWHERE, 9) != loopback


def test_an_unknown_host_is_an_error() -> None:
    """It is told, not taken for another."""
    with pytest.raises(OSError, match=r".+"):
        address_towards("no-such-host.invalid", 80)
