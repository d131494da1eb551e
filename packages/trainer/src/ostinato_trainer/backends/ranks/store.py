"""The store at which ranks meet: one that only those can reach who are meant to."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented as public

from ostinato_trainer.errors import BackendError

__all__ = ["listening_store"]


def listening_store(host: str, timeout_s: float) -> TCPStore:
    """A store of this process that listens at one address. By itself torch's listens at all of the machine's, and asks nobody for a key.

    Args:
        host: The address: 127.0.0.1 for processes of this host, this host's own for those of others.
        timeout_s: Longest wait for a value.

    Raises:
        BackendError: The address is not one of this host's.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise BackendError(
            f"the store of ranks must listen at an address of this host, got {host}: {error}; see how the host is named in its network"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
