"""What jobs inherit: what programs need, and no secret of the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from service_process import job, processes_of, wait_for

from lockstep.config import ConfigError
from lockstep.launch import LocalLauncher
from lockstep.processes.tree import read_environment
from lockstep.service.job_environment import job_environment
from lockstep.service.jobs import JobManager
from lockstep.service.settings import ServiceSettings

# fmt: off
SECRETS = [
    "LOCKSTEP_DATABASE", "LOCKSTEP_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN",
    "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "WANDB_API_KEY", "PGPASSWORD", "DATABASE_URL", "TORCH_SECRET",
    "NCCL_AUTH", "HF_API_KEY", "KUBECONFIG", "SSH_AUTH_SOCK", "GITHUB_TOKEN", "SOME_SETTING", "HF_TOKEN_PATH",
]
# fmt: on
# fmt: off
NEEDED = [
    "PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "CUDA_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "HF_HOME",
    "HF_HUB_OFFLINE", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "LD_LIBRARY_PATH", "https_proxy",
    "TOKENIZERS_PARALLELISM", "LOCKSTEP_CACHE", "TMPDIR", "SSL_CERT_FILE",
]
# fmt: on


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *NEEDED):
        if name not in ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "LD_LIBRARY_PATH"):
            monkeypatch.setenv(name, f"the-{name}")


def test_jobs_get_what_programs_need_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    given = job_environment()
    assert set(NEEDED) <= given.keys()
    assert not set(SECRETS) & given.keys()
    assert given["HF_HUB_DISABLE_IMPLICIT_TOKEN"] == "1"  # the Hub's library would read the token's file otherwise


def test_the_operator_passes_more_by_name() -> None:
    given = job_environment(["HF_TOKEN", "SOME_SETTING", "NOT_THERE"])
    assert (given["HF_TOKEN"], given["SOME_SETTING"]) == ("the-HF_TOKEN", "the-SOME_SETTING")
    assert not {"HF_HUB_DISABLE_IMPLICIT_TOKEN", "NOT_THERE", "OPENAI_API_KEY"} & given.keys()
    with pytest.raises(ConfigError, match="give the name of a variable"):
        ServiceSettings(Path("data"), job_env=("NAME=value",))


def test_the_process_of_a_job_has_no_secret(make_manager: Callable[..., JobManager], tmp_path: Path) -> None:
    launcher = LocalLauncher("scripted_job", grace_s=1.0, environment=job_environment(["SOME_SETTING"]))
    manager = make_manager(launcher=launcher)
    assert not set(SECRETS) & manager.environment.keys()  # of dry runs, and of the launcher that the service makes
    manager.start()
    manager.submit(job("hangs", id="mine"))
    wait_for((tmp_path / "data" / "jobs" / "mine" / "ready").exists)
    (pid,) = processes_of(tmp_path / "data" / "jobs" / "mine")
    given = read_environment(pid)
    assert given["SOME_SETTING"] == "the-SOME_SETTING"
    assert "LOCKSTEP_LAUNCH_ID" in given
    text = Path(f"/proc/{pid}/environ").read_text()
    for name in set(SECRETS) - {"SOME_SETTING"}:
        assert f"the-{name}" not in text, name
