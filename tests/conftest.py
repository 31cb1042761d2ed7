"""Fixtures for every kind of test. What they are made of is in tests/tiny.py, which tests may import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the environment of `make test-llama-stack` has no property tests
    pass
else:
    # What is tested must not depend on how fast the machine is, or what else runs on it.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


# What imports make stays until the process ends: to look for garbage in it, again and again, takes half of the
# time until all tests are found.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled rows of tests stay out of the user's cache, also those of processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder to read; a test that changes it writes its own with tiny.write_model."""
    return tiny.write_model(tmp_path_factory.mktemp("models") / "tiny")
