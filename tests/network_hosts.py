"""Hosts on this machine: network namespaces with an address each and a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    name: str
    device: str
    address: str


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def made_hosts() -> Iterator[list[Host]]:
    """Two of them; they are gone afterwards. Skips the test where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2) to make network namespaces")
    mark = f"ls{os.getpid()}"
    made = [Host(f"{mark}-{i}", f"{mark}v{i}"[-15:], f"10.77.{os.getpid() % 250}.{i + 1}") for i in range(2)]
    try:
        try:
            for host in made:
                ip("netns", "add", host.name)
            ip("link", "add", made[0].device, "type", "veth", "peer", "name", made[1].device)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for host in made:
            ip("link", "set", host.device, "netns", host.name)
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            ip("-n", host.name, "link", "set", host.device, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)
