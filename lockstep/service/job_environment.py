"""The environment that jobs and dry runs get: what programs need to work, and nothing that the service alone knows.

An allow-list, for nobody can list what a deployment keeps in its environment: passwords of databases, tokens of clouds.
The operator passes more by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from lockstep.config import ConfigError

HUB_TOKEN = "HF_TOKEN"
_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "SHELL", "XDG_CACHE_HOME"),
        *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX", "CPATH", "LIBRARY_PATH"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM", "LOCKSTEP_CACHE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    }
)
_FAMILIES = (
    *(
        "LC_",
        "CUDA_",
        "CUDNN_",
        "NVIDIA_",
        "NCCL_",
        "GLOO_",
        "UCX_",
        "FI_",
        "HIP_",
        "HSA_",
        "ROCR_",
        "RCCL_",
        "MIOPEN_",
    ),
    *("TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "RAYON_", "MALLOC_", "DS_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_names(names: Collection[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--job-env {name}: give the name of a variable; its value is the service's own")


def job_environment(more: Collection[str] = ()) -> dict[str, str]:
    """Of this process, what jobs may have, and the variables called `more`.

    The Hub's token also lies in a file of the user's: without leave to use it, jobs are told to leave it alone.
    """
    given = {name: value for name, value in os.environ.items() if name in more or _is_passed(name)}
    return given if HUB_TOKEN in more else {**given, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def _is_passed(name: str) -> bool:
    return name in _NAMES or (name.startswith(_FAMILIES) and not _SECRET.search(name))
