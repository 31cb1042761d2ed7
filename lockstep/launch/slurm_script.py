"""The batch script of a run on Slurm: what sbatch is told, and how the ranks of one turn of the job are started.

A job may have several turns: it goes back to the queue when its time is up, it is preempted or loses a rank.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.config import RunConfig, SlurmEngines, SlurmLaunch
from lockstep.processes.hosts import HOSTS_FILE, SECRET_VARIABLE
from lockstep.processes.stop_notice import SAVE_ON_SIGTERM_VARIABLE

SCRIPT_FILE = "slurm.sh"
FAILURES_FILE = "slurm-failures"
LOG_FILE = "launcher.log"
_WORKER = "lockstep.train.worker"
_HOST = "lockstep.processes.hosts"
_RAY_DRIVER = "lockstep.launch.ray_driver"
_SEEN_WITHIN_S = 20
_RAY = "ray.scripts.scripts"  # the module behind the command, of the same Python

_BODY = """
run_dir={run_dir}
{setup}
export LOCKSTEP_LAUNCH_ID={launch_id} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"
# Where rank 0 will be: the first node, by the address that Slurm itself uses.
nodes="${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}"
first_node="$(scontrol show hostnames "$nodes" | head -n 1)"
MASTER_ADDR="$(scontrol --oneliner show node "$first_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')"
# A port there on which nobody listens: this script runs on that node.
for MASTER_PORT in $(shuf -i 20000-32000 -n 20); do
  (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null || break
done
export MASTER_ADDR MASTER_PORT
echo "job $SLURM_JOB_ID on $nodes, turn $((${{SLURM_RESTART_COUNT:-0}} + 1))"

{start}"""
_SEEN = """# Every node must see the run directory; a network file system may take a moment to show a new one.
blind="$({looks} | sort -u | paste -sd,)"
if [ -n "$blind" ]; then
  failure={failure}
  echo "${{failure//NODES/$blind}}"
  [ ! -d "$run_dir/logs" ] || echo "${{failure//NODES/$blind}}" > "$run_dir/logs/rank-0.error.json"
  exit 2
fi

"""
_LOOK = (
    """bash -c 'for second in {{1..{patience_s}}}; do [ -e {file} ] && exit; sleep 1; done; echo "$SLURMD_NODENAME"'"""
)
_RANKS = """# One task is one rank. USR1 is ignored until the rank listens to it.
{srun} bash -c 'trap "" USR1
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={procs_per_node}
  exec {command}'
code=$?
"""
# Ranks get USR1 from Slurm itself; Ray's own processes must not be ended by it.
_ON_RAY = """# Ray on every node, for the pools of the run. It obeys those who know its token, and ends with this turn.
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
RAY_FOLDER="/tmp/ray-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \\n')"
export RAY_AUTH_TOKEN RAY_FOLDER RAY_AUTH_MODE=token RAY_ADDRESS="$MASTER_ADDR:$MASTER_PORT" RAY_USAGE_STATS_ENABLED=0
srun --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'trap "" USR1
  address="$(scontrol --oneliner show node "$SLURMD_NODENAME" | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p")"
  where=(--address="$RAY_ADDRESS")
  [ "$SLURM_PROCID" -ne 0 ] || where=(--head --port="$MASTER_PORT" --include-dashboard=false)
  exec {ray} start "${{where[@]}}" --node-ip-address="$address" --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus={gpus} \\
    --temp-dir="$RAY_FOLDER" --disable-usage-stats --block > /dev/null' > >(sed -u 's/^srun: /ray: /') 2>&1 &
ray=$!
for second in {{1..120}}; do
  (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null && break
  sleep 1
done
{driver}
code=$?
kill "$ray" 2> /dev/null && wait "$ray"
srun --overlap --ntasks={nodes} --ntasks-per-node=1 rm -rf "$RAY_FOLDER"
"""
_ENGINES = """# The second component has a host for each engine. It takes its work from rank 0, and ends with the turn.
{secret}="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
export {secret}
{srun} bash -c 'trap "" USR1 TERM
{gpu}  for attempt in 1 2 3 4 5 6 7 8; do {command} && break; sleep 2; done' > >(sed -u 's/^srun: /engines: /') 2>&1 &
hosts=$!

"""
# Slurm gives all GPUs of the job on a node to each of its tasks, or says nothing of them.
_OWN_GPU = """  IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-}"
  export CUDA_VISIBLE_DEVICES="${gpus[SLURM_LOCALID % (${#gpus[@]} > 0 ? ${#gpus[@]} : 1)]:-$SLURM_LOCALID}"
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
    options = [*_options(config, launch, output, launch_id)]
    if launch.engines is not None:
        options += ["hetjob", *_engine_options(config, launch, launch.engines, launch_id)]
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    body = _BODY.format(
        run_dir=shlex.quote(str(run_dir)),
        setup="\n".join(launch.setup),
        launch_id=launch_id,
        threads=launch.cpus_per_proc or 1,
        start=(_start_on_ray if config.cluster else _start_ranks)(config, launch, run_dir, config_file),
    )
    again = _ANOTHER_TURN.format(max_restarts=launch.max_restarts, failures_file=FAILURES_FILE)
    return f'#!/bin/bash\n{directives}{body}{again if launch.requeue else ""}exit "$code"\n'


def _start_ranks(config: RunConfig, launch: SlurmLaunch, run_dir: Path, config_file: Path | None) -> str:
    python = _python(launch)
    with_config = f" --config {shlex.quote(str(config_file))}" if config_file is not None else ""
    ranks = _RANKS.format(
        srun=" ".join(_srun(launch)),
        procs_per_node=launch.procs_per_node,
        command=_quoted(f"{python} -m {_WORKER} {shlex.quote(str(run_dir))}{with_config}"),
    )
    after = 'kill "$hosts" 2>/dev/null\n' if launch.engines is not None else ""
    # SIGTERM, too, asks ranks to save, and hosts to end once rank 0 has no more work for them.
    before = _check_nodes(launch, run_dir, config_file) + f"export {SAVE_ON_SIGTERM_VARIABLE}=1\n"
    return before + _hosts(config, launch, run_dir, python) + ranks + after


def _start_on_ray(config: RunConfig, launch: SlurmLaunch, run_dir: Path, config_file: Path | None) -> str:
    """Its driver is in the batch script itself, and looks whether the nodes see the run directory."""
    python = _python(launch)
    words = [str(run_dir), _WORKER, *([str(config_file)] if config_file is not None else [])]
    return _ON_RAY.format(
        nodes=launch.nodes,
        ray=_quoted(f"{python} -m {_RAY}"),
        gpus=_gpus(launch) or 0,
        driver=f"{python} -m {_RAY_DRIVER} {shlex.join(words)}",
    )


def _check_nodes(launch: SlurmLaunch, run_dir: Path, config_file: Path | None) -> str:
    """Where there is but one node, the output of this script would not be where it is looked for."""
    groups = {"": launch.nodes} if launch.engines is None else {" --het-group=0": launch.nodes}
    if launch.engines is not None:
        groups[" --het-group=1"] = launch.engines.nodes
    if sum(groups.values()) == 1:
        return ""
    file = config_file or run_dir / "config.yaml"
    look = _LOOK.format(patience_s=_SEEN_WITHIN_S, file=_quoted(shlex.quote(str(file))))
    looks = [f"srun{group} --overlap --ntasks={nodes} --ntasks-per-node=1 {look}" for group, nodes in groups.items()]
    message = (
        f"NODES cannot see {file}: with launch.kind slurm it must be on a file system that all nodes share; choose "
        "another --run-dir"
    )
    failure = json.dumps({"time": 0, "rank": 0, "message": message, "exit_code": 2})
    joined = looks[0] if len(looks) == 1 else "{ " + "; ".join(looks) + "; }"
    return _SEEN.format(looks=joined, failure=shlex.quote(failure))


def _python(launch: SlurmLaunch) -> str:
    return "python3" if launch.container else shlex.quote(sys.executable)


def _quoted(command: str) -> str:
    """For inside the single quotes of bash -c."""
    return command.replace("'", "'\\''")


def _hosts(config: RunConfig, launch: SlurmLaunch, run_dir: Path, python: str) -> str:
    engines = launch.engines
    if engines is None:
        return ""
    per_node = config.rollouts.engines // engines.nodes
    srun = ["srun", "--het-group=1", f"--ntasks={config.rollouts.engines}", f"--ntasks-per-node={per_node}"]
    if engines.cpus_per_engine is not None:
        srun.append(f"--cpus-per-task={engines.cpus_per_engine}")
    return _ENGINES.format(
        secret=SECRET_VARIABLE,
        srun=" ".join(srun + _container(launch)),
        gpu=_OWN_GPU if _engine_gpus(config, engines) else "",
        command=_quoted(f"{python} -m {_HOST} {shlex.quote(str(run_dir / HOSTS_FILE))}"),
    )


def _engine_gpus(config: RunConfig, engines: SlurmEngines) -> int:
    """On each node."""
    device = config.launch.device if config.rollouts.device == "auto" else config.rollouts.device
    if engines.gpus_per_node is None:
        return config.rollouts.engines // engines.nodes if device == "cuda" else 0
    return engines.gpus_per_node


def _engine_options(config: RunConfig, launch: SlurmLaunch, engines: SlurmEngines, launch_id: str) -> list[str]:
    """Nothing is taken over from the first component. No signal: engines work until rank 0 has stopped."""
    chosen = {
        "job-name": _job_name(config),
        "comment": f"lockstep:{launch_id}",
        "nodes": engines.nodes,
        "ntasks-per-node": config.rollouts.engines // engines.nodes,
        "cpus-per-task": engines.cpus_per_engine,
        "gpus-per-node": _engine_gpus(config, engines) or None,
        "mem": engines.memory,
        "partition": engines.partition or launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": launch.time,
    }
    return [*_as_options(chosen), "--requeue" if launch.requeue else "--no-requeue", *engines.extra]


def _options(config: RunConfig, launch: SlurmLaunch, output: Path, launch_id: str) -> list[str]:
    chosen = {
        "job-name": _job_name(config),
        "comment": f"lockstep:{launch_id}",
        "nodes": launch.nodes,
        "ntasks-per-node": launch.procs_per_node,
        "cpus-per-task": launch.cpus_per_proc,
        "gpus-per-node": _gpus(launch) or None,
        "mem": launch.memory,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "time": launch.time,
        # To the ranks, not to this script.
        "signal": f"USR1@{launch.notice_s}",
        "output": str(output).replace("%", "%%") if output.is_absolute() else output,
        "open-mode": "append",
    }
    return [*_as_options(chosen), "--requeue" if launch.requeue else "--no-requeue", *launch.extra]


def _gpus(launch: SlurmLaunch) -> int | None:
    """On each node."""
    if launch.gpus_per_node is None and launch.device == "cuda":
        return launch.procs_per_node
    return launch.gpus_per_node


def _job_name(config: RunConfig) -> str:
    """A name is free text, and a directive is one line."""
    return re.sub(r"[^\w.+-]+", "-", config.name)[:64]


def _as_options(chosen: Mapping[str, object]) -> list[str]:
    return [f"--{name}={shlex.quote(str(value))}" for name, value in chosen.items() if value is not None]


def _srun(launch: SlurmLaunch) -> list[str]:
    """All that a rank needs is on the command line: not every version of srun takes it over from sbatch."""
    options = ["srun", "--kill-on-bad-exit=1", f"--ntasks={launch.procs}", f"--ntasks-per-node={launch.procs_per_node}"]
    if launch.cpus_per_proc is not None:
        options.append(f"--cpus-per-task={launch.cpus_per_proc}")
    if launch.engines is not None:
        options.append("--het-group=0")
    return options + _container(launch)


def _container(launch: SlurmLaunch) -> list[str]:
    return [] if launch.container is None else [f"--container-image={shlex.quote(launch.container)}"]
