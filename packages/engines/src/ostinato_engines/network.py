"""Which of this host's addresses and interfaces lead to another process. Sends nothing and resolves no name of this host: that name often stands for
an address of the loopback, as where `/etc/hosts` has a line 127.0.1.1, and whoever is told it elsewhere asks itself.
"""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("16s24x")
_ADDRESS = slice(20, 24)
"""Of an IPv4 address in what Linux answers."""


def address_towards(host: str, port: int) -> str:
    """This host's own address on the way to `host`.

    Raises:
        OSError: There is no way there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)  # of datagrams: only looks the way up
        return asking.getsockname()[0]


def interface_towards(host: str, port: int) -> str | None:
    """The interface of that address; None where the system does not name it, as one of IPv6 or a second one of its interface.

    Raises:
        OSError: There is no way there.
    """
    own = address_towards(host, port)
    return next((name for _, name in socket.if_nameindex() if _first_address(name) == own), None)


def _first_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, _REQUEST.pack(interface.encode()))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[_ADDRESS])
