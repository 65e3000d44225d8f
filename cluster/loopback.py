"""Hosts: how an address is written, and whether it can be reached from other machines, so that TLS is demanded."""

import ipaddress
import socket

from cluster.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches a listener on this host. A name counts by every address it has.

    ConfigError for a name that has none: nobody could listen there, and nothing is known of it.
    """
    if not host:
        return False  # every interface
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {host!r} has no address: {getattr(error, 'strerror', error)}") from error
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
