"""A training job of Amazon SageMaker: what the platform gives a container below /opt/ml, and what it expects there.

Hosts share no file system. The first one keeps the run where the platform saves checkpoints, and delivers the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, RunConfig, check_config, load_config, resolve_config
from lockstep.config.reach import texts_of
from lockstep.config.yaml_text import read_yaml
from lockstep.launch.launcher import Launcher, Resources, RunHandle, RunState
from lockstep.launch.local import LocalLauncher, exit_codes
from lockstep.launch.start import reopen
from lockstep.rundir import EXIT_INTERRUPTED, RunDir, damage, read_json_object

BASE_DIR = "/opt/ml"
MAX_SHOWN = 1024  # characters of the failure file that the platform shows
GRACE_S = 90.0  # to save after SIGTERM: the platform's SIGKILL comes after 120
DATA_CHANNELS = {"train": "train", "training": "train", "validation": "validation", "test": "test"}
HANDLER = Path(__file__).parents[1] / "inference" / "sagemaker_handler.py"
_RECORDS = ("config*.yaml", "*.json", "*.jsonl", "logs", "tensorboard")
# Of the platform's own tools, which put them among the hyperparameters.
_FOREIGN = ("sagemaker_", "_tuning_objective_metric", "default_user_module_name")


@dataclass(frozen=True)
class SageMakerJob:
    """The job as this host's container sees it. `hosts` are in the same order on every host."""

    base: Path
    hyperparameters: Mapping[str, object]
    channels: Mapping[str, Path]
    hosts: tuple[str, ...]
    current_host: str
    interface: str | None
    num_gpus: int
    model_dir: Path
    output_data_dir: Path

    @property
    def host_rank(self) -> int:
        return self.hosts.index(self.current_host)

    @property
    def is_first(self) -> bool:
        return self.host_rank == 0

    @property
    def scratch(self) -> Path:
        """Of this host alone; nothing of it outlives the container."""
        return self.base / "lockstep"

    @property
    def run_dir(self) -> Path:
        """On the first host where the platform saves checkpoints, if the job has a place for them. All hosts would
        save to that place, so that the others keep away from it."""
        saved = self.base / "checkpoints"
        return (saved if self.is_first and saved.is_dir() else self.scratch) / "run"


# --- what the platform gives ------------------------------------------------------------------------------------------


def base_dir(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("SAGEMAKER_BASE_DIR", BASE_DIR))


def read_job(environment: Mapping[str, str]) -> SageMakerJob:
    """Raises ValueError with a sentence for whatever is missing or not as the platform writes it."""
    base = base_dir(environment)
    folder = base / "input" / "config"
    resources = _read(folder / "resourceconfig.json")
    hosts, current = _read_hosts(resources, folder / "resourceconfig.json")
    interface = resources.get("network_interface_name")
    return SageMakerJob(
        base=base,
        hyperparameters=_read(folder / "hyperparameters.json"),
        channels=_read_channels(base, environment, len(hosts)),
        hosts=hosts,
        current_host=current,
        interface=str(interface) if interface else None,
        num_gpus=_count_gpus(environment),
        model_dir=Path(environment.get("SM_MODEL_DIR", base / "model")),
        output_data_dir=Path(environment.get("SM_OUTPUT_DATA_DIR", base / "output" / "data")),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise ValueError(
            f"there is no {path}: the platform writes it into the container of a training job; elsewhere, set "
            "SAGEMAKER_BASE_DIR to a folder that has it"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_hosts(resources: Mapping[str, Any], path: Path) -> tuple[tuple[str, ...], str]:
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f"{path}: hosts must be a list of names, and is {hosts!r:.100}")
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"{path}: hosts names one host twice: {', '.join(hosts)}")
    if current not in hosts:
        raise ValueError(f"{path}: current_host {current!r:.100} is none of the hosts {', '.join(hosts)}")
    groups = resources.get("instance_groups") or []
    if len(groups) > 1:
        raise ValueError(
            f"{path}: the job has {len(groups)} instance groups, and every rank needs the same kind of machine: use one"
        )
    return tuple(sorted(hosts)), str(current)


def _read_channels(base: Path, environment: Mapping[str, str], num_hosts: int) -> dict[str, Path]:
    path, data = base / "input" / "config" / "inputdataconfig.json", base / "input" / "data"
    if not path.exists() and not (data.is_dir() and any(data.iterdir())):
        return {}  # a job without channels
    channels = {}
    for name, settings in _read(path).items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"{path}: channel {name} must be an object, and is {settings!r:.100}")
        folder = Path(environment.get(f"SM_CHANNEL_{name.upper()}", data / name))
        if settings.get("TrainingInputMode") == "Pipe":
            raise ValueError(f"channel {name} has input mode Pipe, and files are read: use File or FastFile")
        if settings.get("S3DistributionType") == "ShardedByS3Key" and num_hosts > 1:
            raise ValueError(
                f"channel {name} is ShardedByS3Key, so that every host has other rows, and all need all of them: use "
                "FullyReplicated"
            )
        if not folder.is_dir():
            raise ValueError(f"channel {name} has no folder {folder}, although {path.name} lists it")
        channels[name] = folder.resolve()
    return channels


def _count_gpus(environment: Mapping[str, str]) -> int:
    given = environment.get("SM_NUM_GPUS")
    if given is None:
        return sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal())
    if not given.isdecimal():
        raise ValueError(f"SM_NUM_GPUS is {given!r}, and must be a number")
    return int(given)


# --- the configuration ------------------------------------------------------------------------------------------------


def make_config(job: SageMakerJob) -> RunConfig:
    """The YAML file, then the channels, then the hyperparameters; what is left open is set as suits the job."""
    file = find_config(job)
    text = _read_text(file) if file is not None else ""
    tree = read_yaml(text, str(file))[0] if text.strip() else {}
    given = _given_hyperparameters(job)
    overrides = dict(_channel_overrides(job, tree if isinstance(tree, dict) else {}, given))
    overrides |= {f"{key}={_as_yaml(value)}": f"hyperparameter {key}" for key, value in given.items()}
    config = _load(file, overrides)
    config = _load(file, overrides | dict.fromkeys(_fit(job, config), "what the job needs"))
    _refuse_unused_channels(job, config, file)
    return check_config(config, launch_kinds=("local",))


def find_config(job: SageMakerJob) -> Path | None:
    """The file that the hyperparameter `config` names, or the only one of the channel `config`."""
    name, channel = job.hyperparameters.get("config"), job.channels.get("config")
    if name is not None:
        value = _decode(name)
        folders = [folder for folder in (channel, job.base / "code", Path.cwd()) if folder is not None]
        found = [folder / str(value) for folder in folders if (folder / str(value)).is_file()]
        if not found:
            raise ValueError(f"hyperparameter config: there is no file {value} in {' or '.join(map(str, folders))}")
        return found[0]
    if channel is None:
        return None
    files = sorted(path for path in channel.iterdir() if path.suffix in (".yaml", ".yml"))
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ValueError(
            f"the channel config must hold one YAML file, and has {names}: say which in the hyperparameter config"
        )
    return files[0]


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {error}") from error


def _load(file: Path | None, overrides: Mapping[str, str]) -> RunConfig:
    try:
        if file is not None:
            return load_config(file, list(overrides))
        return resolve_config({}, source="hyperparameters.json", overrides=list(overrides))
    except ConfigError as error:
        message = str(error)
        for override, name in overrides.items():
            message = message.replace(f"override {override!r}", name)
        raise ConfigError(message) from error


def _given_hyperparameters(job: SageMakerJob) -> dict[str, object]:
    ours = {key: value for key, value in job.hyperparameters.items() if not key.startswith(_FOREIGN)}
    return {key: _decode(value) for key, value in ours.items() if key != "config"}


@dataclass(frozen=True)
class _Plain:
    """Text that is not JSON, to be read as on the command line."""

    text: str

    def __str__(self) -> str:
        return self.text


def _decode(value: object) -> object:
    """The platform has texts only; its SDK writes every value as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return _Plain(value)


def _as_yaml(value: object) -> str:
    return value.text if isinstance(value, _Plain) else json.dumps(value)


def _channel_overrides(
    job: SageMakerJob, tree: Mapping[str, Any], given: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """(override, name of it for errors). What hyperparameters say themselves is left to them."""
    if "model" in job.channels and not {"model", "model.path"} & given.keys():
        yield f"model.path={json.dumps(_find_model(job.channels['model']))}", "channel model"
    data = tree.get("data") if isinstance(tree.get("data"), Mapping) else {}
    taken: dict[str, str] = {}
    for name, part in DATA_CHANNELS.items():
        if name not in job.channels or any(key == "data" or key.startswith(f"data.{part}") for key in given):
            continue
        if part in taken:
            raise ValueError(f"the channels {taken[part]} and {name} both are data.{part}: use one of them")
        taken[part] = name
        source = _replace_path((data or {}).get(part), job.channels[name], f"data.{part}", name)
        if source is not None:
            yield f"data.{part}={json.dumps(source)}", f"channel {name}"


def _replace_path(source: object, channel: Path, key: str, name: str) -> object:
    """The source of a YAML file with the channel as its path; None if it names files of the channel already."""
    sources = source if isinstance(source, list) else [] if source is None else [source]
    paths = [str(entry.get("path") if isinstance(entry, Mapping) else entry) for entry in sources]
    if any(Path(path).is_relative_to(channel) for path in paths):
        return None
    if len(sources) > 1:
        raise ValueError(
            f"{key} names {len(sources)} sources, and it is open which of them the channel {name} is: write their "
            f"paths below {channel}"
        )
    return {**sources[0], "path": str(channel)} if sources and isinstance(sources[0], Mapping) else str(channel)


def _find_model(channel: Path) -> str:
    """The folder of the channel that holds a model, or its GGUF file."""
    if (channel / "config.json").exists():
        return str(channel)
    inside = sorted([*(path.parent for path in channel.glob("*/config.json")), *channel.glob("*.gguf")])
    if len(inside) == 1:
        return str(inside[0])
    archive = next(channel.glob("*.tar.gz"), None)
    hint = f"unpack {archive.name} in S3 first" if archive else "upload a model as the Hub has them, with config.json"
    raise ValueError(f"the channel model must hold one model, and {channel} has {len(inside)}: {hint}")


def _fit(job: SageMakerJob, config: RunConfig) -> list[str]:
    """Overrides for what the configuration leaves open."""
    num_hosts, overrides = len(job.hosts), []
    if "procs" not in config.launch.model_fields_set:
        on_cpu = config.launch.device == "cpu"
        overrides.append(f"launch.procs={num_hosts * (1 if on_cpu else max(job.num_gpus, 1))}")
    elif config.launch.procs % num_hosts:
        raise ConfigError(
            f"launch.procs {config.launch.procs} cannot be shared out equally among {num_hosts} hosts: leave it out, "
            "for one process on each GPU, or give a multiple"
        )
    if num_hosts > 1:
        overrides.append("launch.max_restarts=0")  # the platform starts all hosts again, or none
    if config.checkpoint.export == "none":
        raise ConfigError(f"checkpoint.export none leaves nothing for {job.model_dir}: remove it")
    if config.checkpoint.export == "auto" and config.lora is not None:
        overrides.append("checkpoint.export=merged")  # an adapter alone could not be served
    return overrides


def _refuse_unused_channels(job: SageMakerJob, config: RunConfig, file: Path | None) -> None:
    used = [Path(text.value) for text in texts_of(config) if text.value.startswith("/")]
    used += [file.resolve()] if file is not None else []
    for name, folder in job.channels.items():
        if not any(path.is_relative_to(folder) for path in used):
            known = ", ".join([*DATA_CHANNELS, "model", "config"])
            raise ConfigError(
                f"the configuration does not use the channel {name}: give it one of the names {known}, name files of "
                f"{folder} in the configuration, or remove it"
            )


# --- the run ----------------------------------------------------------------------------------------------------------


def prepare(job: SageMakerJob) -> None:
    """What must be possible at the end is tried at the beginning."""
    for folder in (job.base / "output", job.output_data_dir, *_model_dirs(job), job.run_dir.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".writable-{os.getpid()}"
            probe.write_text("x")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"{folder} cannot be written ({error.strerror or error}): the container's user needs the right to, "
                "which root has"
            ) from error


def _model_dirs(job: SageMakerJob) -> list[Path]:
    return [job.model_dir] if job.is_first else []


def open_run(job: SageMakerJob, config: RunConfig) -> tuple[RunDir, RunConfig, bool]:
    """(the run, the configuration it goes on with, whether there was one before)."""
    path = job.run_dir
    if not job.is_first:
        shutil.rmtree(path, ignore_errors=True)
    if not (path / "config.yaml").exists():
        return RunDir.create(path, config), config, False
    _forget_unsaved(RunDir(path, owner=True))
    try:
        run, config = reopen(path, settings=config)
    except ConfigError as error:
        raise ConfigError(f"{error}. For another run, give the job another checkpoint_s3_uri") from error
    return run, config, True


def _forget_unsaved(run: RunDir) -> None:
    """The platform saves a checkpoint file by file: where the job was interrupted before all of the first one were
    saved, there is nothing to go on from. Where there have been more, none that is left is an error."""
    recorded = [event for event in run.events() if event.get("event") == "checkpoint"]
    folders = list(run.checkpoints.glob("step-*"))
    if max(len(recorded), len(folders)) == 1 and all(damage(folder) for folder in folders):
        run.start_over()
        run.log_event("warning", message="the first checkpoint was not saved as a whole: the run begins at step 0")


def set_environment(job: SageMakerJob, environment: dict[str, str]) -> None:
    """For the ranks and for code of the user's: what the platform's own containers set, where it is not set."""
    variables = {
        "SM_MODEL_DIR": job.model_dir,
        "SM_OUTPUT_DATA_DIR": job.output_data_dir,
        "SM_CHANNELS": json.dumps(sorted(job.channels)),
        "SM_HOSTS": json.dumps(list(job.hosts)),
        "SM_CURRENT_HOST": job.current_host,
        "SM_NUM_GPUS": job.num_gpus,
        **{f"SM_CHANNEL_{name.upper()}": path for name, path in job.channels.items()},
        "LOCKSTEP_CACHE": job.scratch / "cache",
    }
    if job.interface and len(job.hosts) > 1:
        _check_interface(job.interface)
        variables |= dict.fromkeys(
            ("SM_NETWORK_INTERFACE_NAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), job.interface
        )
    for name, value in variables.items():
        environment.setdefault(name, str(value))


def _check_interface(name: str) -> None:
    known = sorted(name for _, name in socket.if_nameindex())
    if name not in known:
        raise ValueError(
            f"resourceconfig.json: network_interface_name {name} is none of this host's interfaces: {', '.join(known)}"
        )


def wait_for_first_host(job: SageMakerJob, timeout_s: float) -> None:
    """Names of hosts are known some time after the containers have started."""
    deadline = time.monotonic() + timeout_s
    while len(job.hosts) > 1:
        try:
            socket.getaddrinfo(job.hosts[0], None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"the name of the first host, {job.hosts[0]}, was not known within {timeout_s:.0f} s: {error}"
                ) from error
            time.sleep(1.0)


def launcher_of(job: SageMakerJob, config: RunConfig) -> tuple[Launcher, Resources]:
    launcher = HostLauncher(job) if len(job.hosts) > 1 else LocalLauncher()
    return launcher, Resources(config.launch.procs // len(job.hosts), config.launch.device)


class HostLauncher(LocalLauncher):
    """The ranks of one host of several, which meet at the first of them."""

    meets_others = True

    def __init__(self, job: SageMakerJob) -> None:
        super().__init__()
        self._job = job

    def _meeting(self) -> list[str]:
        place = ["--nnodes", str(len(self._job.hosts)), "--node-rank", str(self._job.host_rank)]
        return [*place, "--master-addr", self._job.hosts[0], "--master-port", os.environ.get("MASTER_PORT", "29500")]

    def _finish(self, handle: RunHandle) -> RunState:
        """Only the first host has rank 0, which writes the status; of the others the exit codes tell."""
        child = self._children.get(handle.pid)
        run = RunDir(handle.run_dir, owner=True)
        if not self._job.is_first and child is not None and not run.failures():
            if child.returncode == 0:
                run.write_status(state="completed", phase="done")
            elif any(code == EXIT_INTERRUPTED for _, code in exit_codes(run)):
                run.write_status(state="interrupted", phase=None)
        return super()._finish(handle)


# --- what the platform expects ----------------------------------------------------------------------------------------


def metric_line(record: Mapping[str, Any]) -> str:
    """`metrics step=3 train:loss=1.25 ...`: one line on stdout, for the regular expressions of the job."""
    split = record.get("split", "train")
    values = {k: v for k, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    shown = [f"{split}:{key}={value:.8g}" for key, value in values.items() if key not in ("step", "time")]
    return " ".join([f"metrics step={record.get('step')}", *shown])


def deliver_model(job: SageMakerJob, run: RunDir) -> Path:
    """The export and the code that serves it, where the platform takes the model from."""
    exported = run.status().get("export")
    if not exported or not Path(exported).is_dir():
        raise ValueError(f"the run has no export to deliver to {job.model_dir}: {run.path / 'export'} is empty")
    try:
        _copy_folder(Path(exported), job.model_dir)
        _add_code(job)
    except OSError as error:
        raise OSError(f"the model cannot be delivered to {job.model_dir}: {error.strerror or error}") from error
    return job.model_dir


def _add_code(job: SageMakerJob) -> None:
    code = job.model_dir / "code"
    code.mkdir(exist_ok=True)
    shutil.copyfile(find_handler(job) or HANDLER, code / "inference.py")
    packages = ["transformers", "safetensors"]
    packages += ["peft"] if (job.model_dir / "adapter_config.json").exists() else []
    pins = [f"{name}=={metadata.version(name)}\n" for name in packages]
    (code / "requirements.txt").write_text("".join(pins))


def find_handler(job: SageMakerJob) -> Path | None:
    """An inference.py of the user's own, in the channel config."""
    own = job.channels["config"] / "inference.py" if "config" in job.channels else None
    return own if own is not None and own.is_file() else None


def _copy_folder(source: Path, target: Path) -> None:
    """Linked where both are on one file system, so that weights take no more space."""
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copyfile(path, copy)


def deliver_records(job: SageMakerJob, run: RunDir) -> None:
    """Metrics, events and logs, but no checkpoints; each host in a folder of its own, as the platform joins them."""
    target = job.output_data_dir / job.current_host
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _RECORDS:
        for path in run.path.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)


def write_failure(environment: Mapping[str, str], reason: str, details: Sequence[str] = ()) -> None:
    """The reason first: of a longer text the platform shows the beginning."""
    folder = base_dir(environment) / "output"
    sentence = re.sub(r"\s+", " ", reason).strip()
    if len(sentence) > MAX_SHOWN:
        sentence = sentence[: MAX_SHOWN - 3] + "..."
    with contextlib.suppress(OSError):  # the disk may be full, or not ours to write: the reason is on stderr, too
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure").write_text("\n".join([sentence, *details]) + "\n", encoding="utf-8")


def clear_failure(environment: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        (base_dir(environment) / "output" / "failure").unlink(missing_ok=True)
