"""What a run says about NCCL, from what a host was found to have."""

from __future__ import annotations

import pytest

from lockstep.parallel.group import NcclSetup, find_nccl


def test_everything_that_decides_how_gpus_talk_is_in_one_line() -> None:
    setup = NcclSetup(
        version=(2, 27, 3),
        interfaces=("eth0", "eth1"),
        infiniband=("mlx5_0", "mlx5_1"),
        variables={"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"},
        peers={(0, 1): True, (0, 2): False, (1, 2): False},
    )
    assert setup.describe() == (
        "NCCL 2.27.3: interfaces eth0, eth1, InfiniBand mlx5_0, mlx5_1, no peer access between GPUs 0-2, 1-2; "
        "NCCL_ALGO=Ring NCCL_DEBUG=INFO"
    )


def test_a_host_with_one_gpu_and_nothing_set() -> None:
    setup = NcclSetup(version=(2, 27, 3), interfaces=(), infiniband=(), variables={}, peers={})
    assert setup.describe() == "NCCL 2.27.3: interfaces none but loopback, no InfiniBand; no NCCL_* variable"


def test_the_interface_that_is_set_is_the_one_that_is_used() -> None:
    setup = NcclSetup((2, 27), ("eth0", "eth1"), (), {"NCCL_SOCKET_IFNAME": "eth1"}, {(0, 1): True})
    line = setup.describe()
    assert "interface eth1, no InfiniBand, GPUs reach each other's memory; NCCL_SOCKET_IFNAME=eth1" in line


@pytest.mark.gpu
def test_this_host() -> None:
    assert find_nccl().describe().startswith("NCCL 2.")
