"""Where compiled code is kept between runs."""

from __future__ import annotations

import os
import stat

import pytest

from lockstep.model.compiled_code import compiled_code_folder, keep_compiled_code

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set is taken back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


def test_code_is_kept_in_the_cache_folder_of_this_user():
    keep_compiled_code()
    folder = compiled_code_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [os.environ[name] for name in NAMES] == [str(folder / "torch"), str(folder / "triton")]
    keep_compiled_code()
    assert os.environ[NAMES[0]] == str(folder / "torch")


def test_torch_keeps_it_there():
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    keep_compiled_code()
    assert cache_dir() == str(compiled_code_folder() / "torch")


def test_a_folder_that_the_user_has_named_stays(monkeypatch):
    monkeypatch.setenv(NAMES[0], "/somewhere")
    keep_compiled_code()
    assert os.environ[NAMES[0]] == "/somewhere"
    assert NAMES[1] not in os.environ


@pytest.mark.parametrize("spoil", ["others may write", "a link", "a file", "another's"])
def test_code_that_somebody_else_may_have_put_there_is_not_run(spoil, tmp_path, monkeypatch):
    folder = compiled_code_folder()
    folder.parent.mkdir()
    if spoil == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    elif spoil == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif spoil == "a file":
        folder.touch()
    else:
        folder.mkdir()
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", iter([uid, uid + 1]).__next__)
    keep_compiled_code()
    assert NAMES[0] not in os.environ
