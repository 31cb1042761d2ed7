"""One rank on a node of a Ray cluster: an actor that starts it as a process of its own, and says how that stands.

The rank is what it is anywhere else, `python -m lockstep.launch.worker`, only that it never outlives its actor.
Must not know the other ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.launch.local import process_stat

PARENT_VARIABLE = "LOCKSTEP_PARENT"
_PR_SET_PDEATHSIG = 1
# What a user sets for a run goes with it to the nodes; everything else is the node's own.
_LIBRARIES = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_")
_CARRIED = ("LOCKSTEP_", "PYTHONPATH", "PYTHONHASHSEED", *_LIBRARIES)


class RankHost:
    """The actor. Its calls are short and made one after another, so that it answers while its rank computes."""

    def __init__(self) -> None:
        self._rank: subprocess.Popen[bytes] | None = None
        self._polled_at = 0.0

    def describe(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "gpus": [str(gpu) for gpu in ray.get_gpu_ids()],
            "cluster": context.gcs_address,
        }

    def find_port(self) -> int:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def can_read(self, path: str, expected: str, patience_s: float) -> bool:
        """Whether this node sees the same file. A network's file system may take a moment to show what is new."""
        deadline = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                if Path(path).read_text() == expected:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)

    def start(self, module: str, run_dir: str, working_dir: str, environment: Mapping[str, str], lease_s: float) -> int:
        """The process id. The rank is ended when nobody polls for `lease_s`: this node may be cut off from the others,
        and the run go on elsewhere."""
        own = {name: value for name, value in os.environ.items() if not _is_of_the_actor(name)}
        here = os.getcwd()
        with Path(run_dir, "logs", f"rank-{environment['RANK']}.log").open("ab") as log:
            self._rank = subprocess.Popen(
                [sys.executable, "-m", __name__, module, run_dir],
                env={**own, **environment, PARENT_VARIABLE: str(os.getpid())},
                cwd=working_dir if Path(working_dir).is_dir() else here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._polled_at = time.monotonic()
        threading.Thread(target=self._keep_lease, args=(lease_s,), daemon=True).start()
        return self._rank.pid

    def _keep_lease(self, lease_s: float) -> None:
        assert self._rank is not None
        while self._rank.returncode is None:
            if time.monotonic() - self._polled_at > lease_s:
                self._rank.kill()
                return
            time.sleep(min(lease_s / 4, 1.0))

    def poll(self) -> tuple[int | None, bool]:
        """(exit code, None while it runs; whether it is stopped by a signal)."""
        assert self._rank is not None
        self._polled_at = time.monotonic()
        code = self._rank.poll()
        state = process_stat(self._rank.pid) if code is None else None
        return code, state is not None and state[0] == "T"

    def stop(self, grace_s: float) -> None:
        if self._rank is None or self._rank.poll() is not None:
            return
        self._rank.terminate()
        self._rank.send_signal(signal.SIGCONT)
        try:
            self._rank.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._rank.kill()
            self._rank.wait()


def _is_of_the_actor(name: str) -> bool:
    """A rank may join the cluster itself: as one of its own, but with the same right to."""
    return name.startswith("RAY_") and not name.startswith("RAY_AUTH_")


def carried_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}


def main(arguments: list[str] | None = None) -> int:
    """In the rank's process: tie it to its actor, then be an ordinary rank."""
    module, run_dir = sys.argv[1:] if arguments is None else arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):
        return 1  # the actor ended before the line above
    sys.argv = [module, run_dir]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
