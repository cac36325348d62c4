"""Names of servers: which a client may use for one, and which of them no DNS server has a say in."""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

ANY = "*"
"""In lists of hosts and origins: any."""


def names_of(address: str) -> list[str]:
    """Names by which clients may call a server that needs no key and listens on an address, beside local ones."""
    try:
        is_loopback = ip_address(address).is_loopback
    except ValueError:
        is_loopback = False
    return [address] if is_loopback else [address, socket.gethostname()]


def name_in(host: str) -> str:
    """The name or address of a `Host` header, without port and brackets; empty for what is neither."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_local(name: str) -> bool:
    """Whether no DNS server has a say in where a name points."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
