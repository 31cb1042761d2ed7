"""Two hosts train together: network namespaces with an address each and a cable between them, torchrun's rendezvous.

Nothing of it goes over the loopback: each host has its own, and neither can reach the other's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from network_hosts import Host, made_hosts
from ranks import exported, run_to_the_end
from safetensors.torch import load_file

from lockstep.config import load_config
from lockstep.rundir import RunDir

PORT = 29511  # free for certain: the hosts are new


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with made_hosts() as hosts:
        yield hosts


def start_torchrun(host: Host, run: RunDir, first: Host) -> subprocess.Popen[str]:
    """What docs/first-steps.md tells people to type on each machine, inside one of them.

    These hosts have no names by which torchrun could find out its own address and that it is the meeting place.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{PORT}"]
    meeting += ["--local-addr", host.address, "--rdzv-conf", f"is_host={host == first}"]
    worker = ["-m", "lockstep.train.worker", str(run.path)]
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, *torchrun, *meeting, *worker],
        env={**os.environ, "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def make_run(folder: Path, model: Path, **changes: Any) -> RunDir:
    folder.mkdir()
    config = load_config(tiny.write_config(folder, model, **changes), ["model.precision=fp64", "optim.max_steps=4"])
    return RunDir.create(folder / "run", config)


def received_bytes(host: Host) -> int:
    counter = f"/sys/class/net/{host.device}/statistics/rx_bytes"
    read = ["ip", "netns", "exec", host.name, "cat", counter]
    return int(subprocess.run(read, check=True, capture_output=True, text=True).stdout)


def test_two_hosts_come_to_what_one_process_does(tmp_path: Path, tiny_model: Path, hosts: list[Host]) -> None:
    run = make_run(tmp_path / "two", tiny_model, parallel={"shard": 2})
    started = [start_torchrun(host, run, hosts[0]) for host in hosts]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert run.status()["state"] == "completed"
    assert run.status()["ranks"] == 2

    alone = make_run(tmp_path / "one", tiny_model)
    run_to_the_end(alone, 1)
    found, expected = (load_file(exported(r) / "model.safetensors") for r in (run, alone))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")
    losses, plain = ([record["loss"] for record in r.metrics()] for r in (run, alone))
    assert losses == pytest.approx(plain, rel=1e-10)
    # Each gathers the other's half of the parameters, twice a step: it went over the cable.
    half = sum(tensor.nbytes for tensor in expected.values()) // 2
    for host in hosts:
        assert received_bytes(host) > 4 * half, f"{host.name} got too little"
