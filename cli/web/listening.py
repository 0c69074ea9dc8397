"""A socket on this machine, and the packages that a server needs."""

import ipaddress
import socket
from importlib.util import find_spec

from pyggml.errors import ConfigError, cause_of
from pyggml.extras import how_to_install


def check_packages(extra: str, *names: str) -> None:
    """ConfigError, with the command that installs this extra, if a package of it is missing."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing: {how_to_install(extra)}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to; what it accepts sends at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"{host}:{port}: {cause_of(error)}") from None
    # Otherwise a second small write waits until the client has acknowledged the first, 40 ms on
    # Linux. asyncio sets this only on sockets that name their protocol, which these do not.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listening: socket.socket) -> str:
    """http://127.0.0.1:8080"""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
