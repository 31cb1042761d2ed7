"""What goes over the wire: requests, views of jobs and data sets, lists, errors.

Pydantic alone: clients and providers import this.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JobState = Literal["queued", "preparing", "running", "completed", "failed", "cancelled"]
Role = Literal["read", "submit", "admin"]
FINISHED: frozenset[str] = frozenset({"completed", "failed", "cancelled"})
ID_PATTERN = r"^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,63}$"
Identifier = Annotated[str, Field(pattern=ID_PATTERN)]


class Wire(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


class JobRequest(Wire):
    model_config = ConfigDict(extra="forbid")

    id: Identifier | None = None
    """Yours, if you want to submit the same job again without doubling it. Otherwise the service makes one."""
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """For people. Default: the configuration's name."""
    config: dict[str, Any] | str
    """The run's configuration: sections, or the YAML text. A data set of the service is `dataset:NAME`."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Higher ones start first; of the same priority, the older ones. Submitters may ask for what the operator allows
    (10 unless told otherwise), administrators for any."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a job that failed, not by its configuration or data, goes on from its last checkpoint."""


class RunProgress(Wire):
    phase: str | None = None
    step: int | None = None
    total_steps: int | None = None
    fraction: float = 0.0
    eta_s: float | None = None


class JobMetrics(Wire):
    """The last record of each split."""

    train: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None


class Compilations(Wire):
    """Of layers and kernels, on a GPU. Their time is part of what they were for. `engine_seconds`: of the engine that
    compiled longest, in a process of its own."""

    count: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0


class JobView(Wire):
    id: str
    name: str
    state: JobState
    reason: str = ""
    """Why it failed or was started again; the first line is a sentence, a traceback may follow."""
    owner: str = ""
    priority: int = 0
    kind: str
    """sft, dpo, ...: the configuration's algorithm."""
    model: str
    procs: int
    num_slots: int = 1
    """What it takes of the service's `procs`: its ranks, and the engines beside them."""
    devices: list[str] = []
    """GPUs that the job has; empty on CPU and while it waits."""
    created_at: float
    """Times are seconds since 1970. created_at is when it was submitted."""
    queued_at: float
    """When it began to wait for its present or last start."""
    prepared_at: float | None = None
    """When its processes were last started."""
    started_at: float | None = None
    """When training began."""
    finished_at: float | None = None
    restarts: int = 0
    max_restarts: int = 0
    restart_at: float | None = None
    """After a failure: not started again before then. Longer after each, up to five minutes."""
    cancelling: bool = False
    """Asked to end, and not yet ended."""
    queue_position: int | None = None
    """1 is next. None unless queued."""
    progress: RunProgress = RunProgress()
    metrics: JobMetrics = JobMetrics()
    seconds: dict[str, float] = {}
    """Where the time of its last start went so far: start, sampling, training, evaluating, checkpoints, export, ..."""
    compilations: Compilations = Compilations()
    layout: str = ""
    """How its ranks share the work, where `parallel: auto` has chosen it."""
    plan: str = ""
    """On GPUs: memory and time of a step as planned, beside those of its last step. Before it starts: what its plan
    warns of."""


class JobList(Wire):
    jobs: list[JobView]
    total: int
    """How many there are in the state asked for, on all pages."""
    counts: dict[str, int] = {}
    """How many there are in each state, of those that were searched for."""


class DatasetView(Wire):
    name: str
    owner: str = ""
    rows: int
    bytes: int
    sha256: str
    created_at: float


class DatasetList(Wire):
    datasets: list[DatasetView]


class DatasetPreview(Wire):
    rows: list[dict[str, Any]]
    """The first rows as they were uploaded."""
    sheet: dict[str, Any] | None = None
    """What would be learned of them, if a model was named: what `lockstep data --json` prints."""


class MetricsPage(Wire):
    records: list[dict[str, Any]]
    next: int
    """Give it as `after` to go on from here."""


class EventList(Wire):
    events: list[dict[str, Any]]


class SampleList(Wire):
    samples: list[dict[str, Any]]


class CheckpointView(Wire):
    step: int
    path: str
    """Below the job's artifacts."""
    bytes: int
    created_at: float
    validation_loss: float | None = None


class CheckpointList(Wire):
    checkpoints: list[CheckpointView]


class ArtifactView(Wire):
    path: str
    bytes: int
    modified_at: float


class ArtifactList(Wire):
    artifacts: list[ArtifactView]


class ConfigView(Wire):
    yaml: str
    config: dict[str, Any]


class PlanRequest(Wire):
    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] | str


class PlanView(Wire):
    config: dict[str, Any]
    """Resolved, every default written out."""
    plan: dict[str, Any]


class Health(Wire):
    status: Literal["ok"] = "ok"
    version: str
    procs: int
    free: int
    devices: list[str]
    launcher: Literal["local", "slurm"] = "local"
    """Where jobs run: on this machine, or as jobs of Slurm."""
    jobs: dict[str, int]
    """How many there are in each state."""
    user: str = ""
    role: str = "admin"
    """Of who asks."""


class Alive(Wire):
    status: Literal["healthy"] = "healthy"


class ErrorDetail(Wire):
    code: str
    message: str


class ErrorView(Wire):
    error: ErrorDetail
