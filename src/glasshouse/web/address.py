"""The address of a server: a listening socket, and the Host headers it answers to."""

from __future__ import annotations

import ipaddress
import socket

from glasshouse.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, which does not listen yet; raise where that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sets TCP_NODELAY by protocol; without it small responses are delayed by 40 ms.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"cannot listen on {host}, port {port} ({error}); use another port, or 0 for a free one."
        ) from None
    return made


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_host(host: str) -> str:
    """Return an address as it stands in a URL and a Host header.

    >>> url_host("::1"), url_host("Example.org")
    ('[::1]', 'example.org')
    """
    return (f"[{host}]" if ":" in host else host).lower()


def host_headers(host: str, port: int) -> set[str]:
    """Return the Host headers of requests that were meant for a server, not for a name that was rebound to it.

    >>> sorted(host_headers("127.0.0.1", 80))
    ['127.0.0.1', '127.0.0.1:80', '[::1]', '[::1]:80', 'localhost', 'localhost:80']
    """
    names = {f"{name}:{port}" for name in (*LOOPBACK, url_host(host))}
    return names | {name.removesuffix(":80") for name in names}  # clients omit the default port
