"""The store of ranks listens where it is told to, and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_trainer.backends.ranks.store import listening_store
from ostinato_trainer.errors import BackendError


def listening_at(port: int) -> set[str]:
    """The addresses at which this network listens at a port, as Linux tells them, in hexadecimal."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    ends = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    return {address for address, at in ends if int(at, 16) == port}


@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="only Linux tells in files who listens where")
def test_a_store_listens_at_one_address_and_answers_there() -> None:
    """Of this process's listening sockets the one with the store's port is at the loopback; a client reads what was written."""
    store = listening_store("127.0.0.1", 30.0)
    assert listening_at(store.port) == {"0100007F"}
    client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))
    client.set("name", "value")
    assert store.get("name") == b"value"


def test_an_address_of_another_host_is_refused() -> None:
    """203.0.113.0/24 is for documentation: no host has it."""
    with pytest.raises(BackendError, match=r"an address of this host, got 203\.0\.113\.7"):
        listening_store("203.0.113.7", 1.0)


def test_its_port_is_free_when_it_is_gone() -> None:
    """Nothing of it stays behind."""
    store = listening_store("127.0.0.1", 30.0)
    port = store.port
    del store
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
