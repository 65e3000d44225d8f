"""Whether a host can be reached from other machines: what decides if TLS is demanded."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches a listener on this host.

    A name counts by every address it has; one that has none cannot be listened on, and whoever tries will say so.
    """
    if not host:
        return False  # every interface
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
