"""Hosts without a common file system: folders of their own for ranks that are told they are on other hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_together

from lockstep.config.parallel import Degrees
from lockstep.parallel import host_files
from lockstep.parallel.group import ProcessGroup, choose_device, join

HOSTS = {0: ("first", 0), 1: ("second", 0), 2: ("second", 1)}  # by rank: its host, and its place there


def join_from(folder: Path) -> tuple[ProcessGroup, Path]:
    """As torchrun would start the ranks of HOSTS; the folder is that of this rank's host."""
    host, local_rank = HOSTS[int(os.environ["RANK"])]
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "1" if host == "first" else "2"}
    group = join(choose_device("cpu"), Degrees(replicate=3), timeout_s=60)
    own = folder / host
    own.mkdir(exist_ok=True)
    return host_files.find_remote_ranks(own, group), own


def content_of(rank: int) -> bytes:
    return bytes([rank]) * (1000 + rank)


def exchange(folder: Path) -> None:
    group, own = join_from(folder)
    assert group.remote_ranks == (1, 2)
    assert group.remote_leaders == (1,)
    host_files.CHUNK_BYTES = 300  # several chunks and a rest
    written = own / "written"
    written.mkdir(exist_ok=True)
    if group.rank != 2:  # one that has nothing to write
        (written / f"part-{group.rank}").write_bytes(content_of(group.rank))
    group.barrier()
    host_files.collect(written, lambda rank: f"part-{rank}", group)
    group.barrier()
    if group.rank == 0:
        assert {p.name: p.read_bytes() for p in written.iterdir()} == {f"part-{r}": content_of(r) for r in (0, 1)}
    else:
        assert not written.exists(), "what was collected takes no space where it was written"
    with host_files.local_copy(written, group):
        assert {p.name: p.read_bytes() for p in written.iterdir()} == {f"part-{r}": content_of(r) for r in (0, 1)}
    group.barrier()
    assert written.exists() == (group.rank == 0), "the copies are gone, and the original is not"
    group.leave()


def share(folder: Path) -> None:
    group, _ = join_from(folder)
    assert group.remote_ranks == ()
    group.leave()


def test_files_go_to_the_first_host_and_from_it(tmp_path: Path) -> None:
    run_together(3, exchange, tmp_path)
    assert not list((tmp_path / "first").glob(".seen-*"))


def test_hosts_that_share_a_folder_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").symlink_to(tmp_path / "first")
    run_together(3, share, tmp_path)


def test_a_file_that_changes_on_the_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_together(3, exchange_damaged, tmp_path)
    assert (tmp_path / "refused").read_text() == "came from rank 1 with another digest than it was sent with"


def exchange_damaged(folder: Path) -> None:
    group, own = join_from(folder)
    if group.rank == 1:
        send = dist.send

        def damage(values: torch.Tensor, **where: Any) -> None:
            if values.numel() == 1000:
                values[17] += 1
            send(values, **where)

        dist.send = damage
        (own / "part-1").write_bytes(bytes(1000))
    try:
        host_files.collect(own, lambda rank: f"part-{rank}", group)
    except OSError as error:
        (folder / "refused").write_text(str(error).partition("part-1 ")[2])
        raise
