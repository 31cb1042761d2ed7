"""The batch script of a run on Slurm: what sbatch is told, and how the ranks of one turn of the job are started.

A job may have several turns: it goes back to the queue when its time is up, it is preempted or loses a rank.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from lockstep.config import RunConfig, SlurmLaunch
from lockstep.processes.stop_notice import SAVE_ON_SIGTERM_VARIABLE

SCRIPT_FILE = "slurm.sh"
FAILURES_FILE = "slurm-failures"
LOG_FILE = "launcher.log"
_WORKER = "lockstep.train.worker"

_BODY = """
run_dir={run_dir}
{setup}
export LOCKSTEP_LAUNCH_ID={launch_id} {save_on_sigterm}=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
# Where rank 0 will be: the first node, by the address that Slurm itself uses.
first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_ADDR="$(scontrol --oneliner show node "$first_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))"
export MASTER_ADDR MASTER_PORT
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, turn $((${{SLURM_RESTART_COUNT:-0}} + 1))"

# One task is one rank. USR1 is ignored until the rank listens to it.
{srun} bash -c 'trap "" USR1
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={procs_per_node}
  exec {command}'
code=$?
"""
_ANOTHER_TURN = """
# Another turn: after a checkpoint that was asked for, always; after a failure {max_restarts} times, unless it would
# repeat itself (a mistake in the configuration, training that must not continue).
again=false
if grep -q '"state": "interrupted"' "$run_dir/status.json"; then
  again=true
elif [ "$code" -ne 0 ] && ! grep -qE '"exit_code": (2|3)' "$run_dir"/logs/rank-*.error.json 2>/dev/null; then
  failures="$(cat "$run_dir/{failures_file}" 2>/dev/null || echo 0)"
  echo "$((failures + 1))" > "$run_dir/{failures_file}"
  [ "$failures" -lt {max_restarts} ] && again=true
fi
if [ "$again" = true ]; then
  echo "back to the queue"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # which Slurm ends
fi
"""


def batch_script(config: RunConfig, run_dir: Path, launch_id: str, config_file: Path | None = None) -> str:
    """`config_file`: the ranks make the run directory from it, where that is not there."""
    launch = config.launch
    assert isinstance(launch, SlurmLaunch)
    # A folder that is not there yet cannot take the output.
    output = Path("slurm-%j.out") if config_file is not None else run_dir / "logs" / LOG_FILE
    directives = "".join(f"#SBATCH {option}\n" for option in _options(config, launch, output, launch_id))
    python = "python3" if launch.container else shlex.quote(sys.executable)
    with_config = f" --config {shlex.quote(str(config_file))}" if config_file is not None else ""
    # Inside the single quotes of bash -c.
    command = f"{python} -m {_WORKER} {shlex.quote(str(run_dir))}{with_config}".replace("'", "'\\''")
    body = _BODY.format(
        run_dir=shlex.quote(str(run_dir)),
        setup="\n".join(launch.setup),
        launch_id=launch_id,
        save_on_sigterm=SAVE_ON_SIGTERM_VARIABLE,
        threads=launch.cpus_per_proc or 1,
        srun=" ".join(_srun(launch)),
        procs_per_node=launch.procs_per_node,
        command=command,
    )
    again = _ANOTHER_TURN.format(max_restarts=launch.max_restarts, failures_file=FAILURES_FILE)
    return f'#!/bin/bash\n{directives}{body}{again if launch.requeue else ""}exit "$code"\n'


def _options(config: RunConfig, launch: SlurmLaunch, output: Path, launch_id: str) -> list[str]:
    gpus = launch.gpus_per_node
    if gpus is None and launch.device == "cuda":
        gpus = launch.procs_per_node
    chosen = {
        "job-name": config.name,
        "comment": f"lockstep:{launch_id}",
        "nodes": launch.nodes,
        "ntasks-per-node": launch.procs_per_node,
        "cpus-per-task": launch.cpus_per_proc,
        "gpus-per-node": gpus or None,
        "mem": launch.memory,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": launch.time,
        # To the ranks, not to this script.
        "signal": f"USR1@{launch.notice_s}",
        "output": output,
        "open-mode": "append",
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in chosen.items() if value is not None]
    return [*options, "--requeue" if launch.requeue else "--no-requeue", *launch.extra]


def _srun(launch: SlurmLaunch) -> list[str]:
    """All that a rank needs is on the command line: not every version of srun takes it over from sbatch."""
    options = ["srun", "--kill-on-bad-exit=1", f"--ntasks={launch.procs}", f"--ntasks-per-node={launch.procs_per_node}"]
    if launch.cpus_per_proc is not None:
        options.append(f"--cpus-per-task={launch.cpus_per_proc}")
    if launch.container is not None:
        options.append(f"--container-image={shlex.quote(launch.container)}")
    return options
