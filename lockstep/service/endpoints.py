"""The servers that jobs may call: those that the operator named, and no other.

A request chooses one of them, and its job gets the operator's own spelling: however a request writes an address, no
other reader can understand it differently.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from lockstep.config import ConfigError, RunConfig
from lockstep.config.reach import ReachingText
from lockstep.service.errors import Forbidden

_PORTS = {"http": 80, "https": 443}
_ADDRESS = re.compile(r"(https?://)?[a-z0-9._\[\]:-]+(/[a-z0-9._/-]*)?", re.IGNORECASE | re.ASCII)
# Where clouds keep the credentials of a machine, besides the link-local addresses.
_METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")))


class Address(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


class Endpoints:
    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = {_read_option(text): text.strip() for text in allowed}

    def settle(self, config: RunConfig, text: ReachingText) -> RunConfig:
        """The configuration with the operator's spelling of its endpoint. Raises Forbidden for all others."""
        address = parse_address(text.value)
        spelling = self._allowed.get(address) if address is not None else None
        if address is None or spelling is None or text.key != "rollouts.endpoint":
            raise Forbidden(
                f"{text.key}: {text.value} is not a server that jobs of this service may call: leave it out, or ask "
                "the operator for --allow-endpoint"
            )
        if (found := _forbidden_address(address)) is not None:
            raise Forbidden(f"{text.key}: {text.value} leads to {found}, which no job may call: tell the operator")
        rollouts = config.rollouts.model_copy(update={"endpoint": spelling})
        return config.model_copy(update={"rollouts": rollouts})


def parse_address(text: str) -> Address | None:
    """None: it is no plain address of a server. Names of users, queries and escapes have no place in one."""
    text = text.strip()
    if not _ADDRESS.fullmatch(text):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or port == 0 or ".." in parts.path:
        return None
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, host.rstrip("."), port or _PORTS[parts.scheme], path)


def _read_option(text: str) -> Address:
    address = parse_address(text)
    if address is None:
        raise ConfigError(f"--allow-endpoint {text}: write an address like http://vllm.example:8000")
    if (found := _literal(address.host)) is not None and _is_never_allowed(found):
        raise ConfigError(
            f"--allow-endpoint {text}: no model is served there, and some machines keep credentials there"
        )
    return address


def _forbidden_address(address: Address) -> str | None:
    """What a name that the operator trusts must not come to mean: this machine itself, or a place of credentials."""
    if _literal(address.host) is not None or address.host == "localhost":
        return None
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
    except OSError:
        return None  # the job will say that there is no such server
    for text in sorted(found):
        number = _literal(text)
        if number is not None and (number.is_loopback or _is_never_allowed(number)):
            return text
    return None


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def _is_never_allowed(number: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return number.is_link_local or number.is_multicast or number.is_unspecified or number in _METADATA
