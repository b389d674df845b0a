"""Where the server listens: found to be free before anything is loaded, and named where it is not."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Final

from ..state.errors import ConfigError

__all__ = ["address_error", "check_address"]

_CURES: Final = {
    errno.EADDRINUSE: ("a free port", "end what listens there, or choose another --port; 0 takes a free one"),
    errno.EACCES: ("a port that this user may open", "choose a --port from 1024 on"),
}


def check_address(host: str, port: int) -> None:
    """Find out whether an address can be listened on, and leave it free.

    Args:
        host: name or number.
        port: 0 for any.
    Raises:
        ConfigError: it cannot.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        failures = [error for family, *_, address in found if (error := _bind_error(family, address))]
        for error in failures:
            # Of a name's addresses some may be of a family that this machine has not.
            if error.errno in _CURES or len(failures) == len(found):
                raise error
    except OSError as error:
        raise address_error(host, port, error) from error


def _bind_error(family: int, address: tuple[Any, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            # As the server does: connections that have just ended keep no port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        return error
    return None


def address_error(host: str, port: int, error: OSError) -> ConfigError:
    """Say why an address cannot be listened on, and what to do.

    Args:
        host: name or number.
        port: that was asked for.
        error: what the system said.
    """
    field = "port" if error.errno in _CURES else "host"
    expected, cure = _CURES.get(
        error.errno or 0, ("an address of this machine", "choose another --host, such as 127.0.0.1, or 0.0.0.0 for all")
    )
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ConfigError(
        f"{field}: expected {expected}, got {host}:{port}: {reason}; {cure}", field=field, expected=expected, got=port
    )
