"""A real Slurm on this machine: one slurmctld and two slurmd that are nodes n1 and n2, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ranks import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
CONFIG = """
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={port_1} CPUs=4 RealMemory=1000
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={port_2} CPUs=4 RealMemory=1000
PartitionName=debug Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""


def missing_programs() -> list[str]:
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class SlurmCluster:
    """`settings` are more lines of its configuration; node n2 sees nothing of the folder `hidden`."""

    def __init__(self, folder: Path, settings: str = "", hidden: Path | None = None) -> None:
        self.folder, self._hidden = folder, hidden
        self.config = folder / "slurm.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "state").mkdir(parents=True)
        ports = [free_port() for _ in range(3)]
        self.config.write_text(
            CONFIG.format(
                folder=folder,
                host=socket.gethostname().split(".")[0],
                user=pwd.getpwuid(os.getuid()).pw_name,
                port=ports[0],
                port_1=ports[1],
                port_2=ports[2],
            )
            + settings
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """For Slurm's commands."""
        return {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", "n1")
        self._start("slurmd", "-D", "-N", "n2", hidden=self._hidden)
        deadline = time.monotonic() + 120
        while self.query("sinfo", "-h", "-o", "%T %D") != "idle 2":
            assert time.monotonic() < deadline, (self.folder / "slurmctld.log").read_text()[-4000:]
            time.sleep(0.2)

    def query(self, *command: str) -> str:
        answered = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return "\n".join(sorted(set(answered.stdout.strip().splitlines()))) if answered.returncode == 0 else ""

    def stop_controller(self) -> None:
        self._processes[0].terminate()
        self._processes[0].wait(60)

    def start_controller(self) -> None:
        self._processes.pop(0)
        self._start("slurmctld", "-D")
        self._processes.insert(0, self._processes.pop())

    def stop(self) -> None:
        self.query("scancel", "--full", "--signal=KILL", f"--user={pwd.getpwuid(os.getuid()).pw_name}")
        deadline = time.monotonic() + 30
        while self.query("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()

    def _start(self, *command: str, hidden: Path | None = None) -> None:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        program = shutil.which(command[0], path=path)
        assert program is not None
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            environment = {**os.environ, **self.environment}
            words = [program, *command[1:]]
            if hidden is not None:
                script = 'mount -t tmpfs none "$1" && shift && exec "$@"'
                words = ["unshare", "--mount", "sh", "-c", script, "sh", str(hidden), *words]
            self._processes.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
            )


@contextlib.contextmanager
def running_cluster(folder: Path, settings: str = "", hidden: Path | None = None) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, settings, hidden)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def cluster_of_this_process(folder: Path, settings: str = "", hidden: Path | None = None) -> Iterator[SlurmCluster]:
    """Slurm's commands here, and the jobs that are submitted here, know it and this Lockstep."""
    with running_cluster(folder, settings, hidden) as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.config))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield started
