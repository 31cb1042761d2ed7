"""Fixtures for every kind of test. What they are made of is in tests/tiny.py, which tests may import."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder to read; a test that changes it writes its own with tiny.write_model."""
    return tiny.write_model(tmp_path_factory.mktemp("models") / "tiny")
