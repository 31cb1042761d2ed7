"""The entry of a machine that somebody else started: `python -m lockstep.launch.node RUN_DIR --config FILE`.

Starts the ranks of this machine, or the driver of a Ray cluster, prints what they write, and ends with their exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.config import RunConfig, load_config
from lockstep.launch.local import WORKER_MODULE, launch_lock
from lockstep.launch.run_echo import RunEcho
from lockstep.launch.run_store import RunStore
from lockstep.launch.start import reopen
from lockstep.processes.rank_environment import NodePlace, Place, RankPlace, read_place
from lockstep.processes.tree import catch_signals, child_processes, describe_exit, read_environment, signal_all
from lockstep.rundir import EXIT_INTERRUPTED, FINISHED_STATES, RunDir

_DRIVER_MODULE = "lockstep.launch.ray_driver"
_INTERVAL_S = 0.5
_STORE_INTERVAL_S = 5.0
_STORE_ATTEMPTS = 5
_STORE_PATIENCE_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        place, config = read_place(os.environ), load_config(options.config)
        store = RunStore(options.store) if options.store else None
        if store is not None:
            _restore(store, options.run_dir)
        if _node_number(place) == 0:
            _prepare(RunDir(options.run_dir), config)
    except ValueError as error:
        print(f"error: {error}", flush=True)
        return 2
    with _claimed(options.run_dir, place):
        return Machine(RunDir(options.run_dir), options.config, config, place, store).run()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(f"python -m {__spec__.name if __spec__ else 'node'}", description="One machine.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="Make the run from this file, or go on with it.")
    parser.add_argument("--store", help="Where the run is kept, as an address that fsspec knows.")
    return parser.parse_args(arguments)


def _restore(store: RunStore, run_dir: Path) -> None:
    step = store.restore(run_dir)
    if step is not None:
        print(f"going on from step {step} of {store.address}", flush=True)


def _prepare(run: RunDir, config: RunConfig) -> None:
    """A run that is there goes on with what may change within a run. The ranks make one that is not, where they are."""
    if not run.config_path.exists():
        if config.launch.kind == "ray":
            RunDir.create(run.path, config)
    elif run.config() != config and run.status().get("state") != "completed":
        reopen(run.path, settings=config)
    if config.launch.kind == "ray":
        run.clear_failures()  # of an earlier start; ranks on machines of their own clear theirs


@contextlib.contextmanager
def _claimed(run_dir: Path, place: Place) -> Iterator[None]:
    """On the first machine, where the file system knows locks: a pod that lives on without its node keeps the run."""
    if _node_number(place) > 0:
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(launch_lock(run_dir))
        yield


def _node_number(place: Place) -> int:
    return place.node if isinstance(place, NodePlace) else place.rank


class Machine:
    """The processes of a run on this machine, from their start to their end."""

    def __init__(
        self, run: RunDir, config_file: Path, config: RunConfig, place: Place, store: RunStore | None = None
    ) -> None:
        self._run, self._config_file, self._config, self._place = run, config_file, config, place
        self._store, self._is_first = store, _node_number(place) == 0
        self._started = time.time()
        self._finished = threading.Event()

    def run(self) -> int:
        echo = RunEcho(self._run, self._ranks(), is_first=self._is_first, say=lambda line: print(line, flush=True))
        keeper = threading.Thread(target=self._keep, daemon=True)
        with catch_signals() as received:
            child = subprocess.Popen(self._command())
            if self._store is not None:
                keeper.start()
            num_told = 0
            while child.poll() is None:
                if len(received) > num_told:
                    self._ask_to_stop(child, again=num_told > 0)
                    num_told = len(received)
                echo.show()
                time.sleep(_INTERVAL_S)
            code = self._finish(child.returncode)
            echo.show()
            self._finished.set()
            if keeper.is_alive():
                keeper.join(_STORE_PATIENCE_S)
            return code if self._store is None or self._keep_results() else code or 1

    def _command(self) -> list[str]:
        worker = [str(self._run.path), "--config", str(self._config_file)]
        if self._config.launch.kind == "ray":
            return [sys.executable, "-m", _DRIVER_MODULE, str(self._run.path), WORKER_MODULE]
        if isinstance(self._place, RankPlace):
            return [sys.executable, "-m", WORKER_MODULE, *worker]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *self._place.torchrun_options()]
        return [*torchrun, "-m", WORKER_MODULE, *worker]

    def _ranks(self) -> list[int] | None:
        """Those whose logs are this machine's to show; None: all."""
        if isinstance(self._place, RankPlace):
            return [self._place.rank] if self._config.launch.kind != "ray" else None
        if not self._place.procs.isdecimal():
            return None if self._is_first else []
        procs = int(self._place.procs)
        return list(range(self._place.node * procs, (self._place.node + 1) * procs))

    def _ask_to_stop(self, child: subprocess.Popen[bytes], *, again: bool) -> None:
        """The ranks save and end. Torchrun would give them half a minute, and is not asked."""
        ranks = [pid for pid in child_processes(child.pid) if "LOCAL_RANK" in read_environment(pid)]
        if self._config.launch.kind == "ray" or again:
            child.terminate()
        else:
            signal_all(ranks or [child.pid], signal.SIGUSR1)

    def _finish(self, child_code: int) -> int:
        """The exit code, by what the ranks recorded; the first machine also writes what they could not."""
        run, state = self._run, self._run.status().get("state")
        if child_code == 0 and state != "interrupted":
            return 0
        if state == "interrupted":
            return EXIT_INTERRUPTED
        failures = [failure for failure in run.failures() if failure["time"] >= self._started]
        if self._is_first and run.config_path.exists() and state not in FINISHED_STATES:
            reason = failures[0]["message"] if failures else describe_exit("a process of the run", child_code)
            RunDir(run.path, owner=True).write_status(state="failed", error=reason, phase=None)
        if failures:
            return int(failures[0].get("exit_code", 1))
        return child_code if child_code > 0 else 128 - child_code

    def _keep(self) -> None:
        assert self._store is not None
        while not self._finished.wait(_STORE_INTERVAL_S):
            try:
                self._store.keep(self._run.path)
            except Exception as error:  # of whatever storage it is: the next pass tries again
                print(f"could not copy the run to {self._store.address}: {error}", flush=True)

    def _keep_results(self) -> bool:
        assert self._store is not None
        for attempt in range(_STORE_ATTEMPTS):
            try:
                self._store.finish(self._run.path)
                return True
            except Exception as error:
                print(f"error: could not copy the run to {self._store.address}: {error}", flush=True)
                time.sleep(2**attempt)
        return False


if __name__ == "__main__":
    sys.exit(main())
