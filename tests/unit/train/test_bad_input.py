"""Nothing is silently wrong: what cannot run ends with one sentence that says what, where and what to do.

Exit code 2 for what the user can put right in configuration or data, 1 for a run that failed; never a traceback on the
terminal. Where the sentence comes from a worker, a worker is really started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from ranks import newest_step, start_ranks

from lockstep.cli import main
from lockstep.config import load_config
from lockstep.rundir import RunDir
from lockstep.train.describe import describe


def refuse(arguments: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a command, run in this process, that ends with exit code 2 and prints nothing else."""
    capsys.readouterr()  # what making the model printed
    monkeypatch.setattr(sys, "argv", ["lockstep", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2, err
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("error: ").rstrip()


def fail(folder: Path, model: Path, **changes: Any) -> tuple[int, str, RunDir]:
    """(exit code, sentence, run) of a worker that fails."""
    run = RunDir.create(folder / "run", load_config(tiny.write_config(folder, model, **changes)))
    with start_ranks(run, 1) as ranks:
        (code,) = ranks.wait()
    (failure,) = run.failures()
    assert run.status()["state"] == "failed"
    assert run.status()["error"] == failure["message"]
    assert failure["exit_code"] == code
    return code, failure["message"], run


# --- before anything starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "optim.learning_rat=1",
            "unknown key 'optim.learning_rat'; did you mean optim.learning_rate?",
        ),
        ("optim.learning_rate=fast", "optim.learning_rate: .*fast"),
        ("batch.samples=0", "batch.samples: .*greater than 0"),
        ("data.train=missing.jsonl", r"data.train: there is no file .*missing.jsonl"),
        ("parallel.shard=3", "replicate 1 x shard 3 = 3 ranks, but the run has 1"),
        ("data.max_length=100000", "data.max_length 100000 does not fit into batch.micro_batch_tokens 256"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path,
    tiny_model: Path,
    override: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny.write_config(tmp_path, tiny_model)
    assert re.search(sentence, refuse(["train", config, override, "--run-dir", tmp_path / "r"], monkeypatch, capsys))
    assert not (tmp_path / "r").exists()


def test_a_run_directory_that_cannot_be_made(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.write_config(tmp_path, tiny_model)
    (tmp_path / "file").write_text("not a folder")
    sentence = refuse(["train", config, "--run-dir", tmp_path / "file" / "run"], monkeypatch, capsys)
    assert sentence == f"cannot create the run directory {tmp_path}/file/run: Not a directory"


def test_a_run_directory_in_use_is_left_alone(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.write_config(tmp_path, tiny_model)
    run = RunDir.create(tmp_path / "run", load_config(config))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    sentence = refuse(["train", config, "--run-dir", run.path], monkeypatch, capsys)
    assert sentence == f"{run.path} already holds a run: choose another --run-dir, or continue it with --resume"
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


# --- data and models: the same sentence from a dry run and from a worker --------------------------------------------


def _leave_empty(folder: Path) -> None:
    (folder / "train.jsonl").write_text("\n\n")


def _break_line_1743(folder: Path) -> None:
    lines = tiny.write_rows(folder / "train.jsonl", 2000).read_text().splitlines()
    lines[1742] = '{"messages": [{"role": "user"'
    (folder / "train.jsonl").write_text("\n".join(lines))


def _leave_two_rows(folder: Path) -> None:
    tiny.write_rows(folder / "train.jsonl", 2)


def _answer_nothing(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')


def _remove_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def _pickle_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def _remove_model_config(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def _cut_weights(folder: Path) -> None:
    os.truncate(folder / "model" / "model.safetensors", 5000)


@pytest.mark.parametrize(
    ("break_it", "procs", "sentence"),
    [
        (_leave_empty, 1, r"train.jsonl: no rows: remove the file from the configuration or fill it$"),
        (_break_line_1743, 1, r"train.jsonl:1743: not valid JSON \(the line ends too early\): fix or remove the line$"),
        (_answer_nothing, 1, r"train.jsonl:1: "),
        (_leave_two_rows, 3, r"^3 ranks for 2 training rows: use at most one rank per row$"),
        (_remove_weights, 1, r"model has no weights \(\*.safetensors\)$"),
        (_pickle_weights, 1, r"model has only pickled weights \(\*.bin\), .*: convert them to safetensors$"),
        (_remove_model_config, 1, r"model is not a model folder: it has no config.json$"),
    ],
)
def test_bad_data_and_bad_models_are_refused(
    tmp_path: Path,
    break_it: Any,
    procs: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny.write_model(tmp_path / "model")
    break_it(tmp_path)
    config = tiny.write_config(tmp_path, model)
    assert re.search(sentence, refuse(["train", config, "--dry-run", "--procs", procs], monkeypatch, capsys))
    if procs == 1:
        code, message, _ = fail(tmp_path, model)
        assert code == 2
        assert re.search(sentence, message)


def test_more_ranks_than_rows(tmp_path: Path, tiny_model: Path) -> None:
    tiny.write_rows(tmp_path / "train.jsonl", 1)
    config = load_config(tiny.write_config(tmp_path, tiny_model, launch={"procs": 2}))
    run = RunDir.create(tmp_path / "run", config)
    with start_ranks(run, 2) as ranks:
        assert ranks.wait() == [2, 2]
    assert run.failures()[0]["message"] == "2 ranks for 1 training rows: use at most one rank per row"


def test_ranks_that_share_their_rows_need_none_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    tiny.write_rows(tmp_path / "train.jsonl", 2)
    changes: dict[str, Any] = {"parallel": {"tensor": 2, "pipeline": 2}, "launch": {"procs": 4}}
    about = describe(load_config(tiny.write_config(tmp_path, tiny_model, batch={"samples": 2}, **changes)))
    assert (about["steps"], about["ranks"], about["micro_batches"]) == (1, 4, 1)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    _cut_weights(tmp_path)
    code, message, _ = fail(tmp_path, model)
    assert code == 2
    assert message.startswith(f"model.path {model}: ")


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    from safetensors.torch import load_file, save_file

    model = tiny.write_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, message, _ = fail(tmp_path, model)
    assert code == 2
    assert message == (
        f"model.path {model}: its weights lack 1 tensors of the model, first 'model.layers.1.mlp.up_proj.weight'"
    )


def test_the_command_shows_a_workers_sentence_and_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    _break_line_1743(tmp_path)
    config = tiny.write_config(tmp_path, tiny_model)
    code, out, err = tiny.run_lockstep("train", config, "--run-dir", tmp_path / "run")
    assert code == 2
    first, second = err.splitlines()
    assert re.fullmatch(rf"error: {tmp_path}/train.jsonl:1743: not valid JSON .*: fix or remove the line", first)
    assert second.strip() == f"more in {tmp_path}/run/logs/rank-0.log"
    assert "Traceback" not in out
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "Traceback" in log
    assert log.splitlines()[-1] == "error: rank 0: " + first.removeprefix("error: "), "what to do stands last"


# --- while training -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_names_the_step_and_the_rows(tmp_path: Path, tiny_model: Path) -> None:
    code, message, run = fail(tmp_path, tiny_model, optim={"learning_rate": 1e30, "schedule": "constant"})
    assert code == 3
    found = re.match(r"the (?:loss|gradient norm) is (?:nan|-?inf) at step (\d+), .*in .*/train.jsonl:\d+", message)
    assert found
    assert "lower optim.learning_rate" in message
    assert newest_step(run) == int(found[1]) - 1, "the bad step is not in the metrics"


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    import torch

    model = tiny.build_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    code, message, _ = fail(tmp_path, tmp_path / "model")
    assert code == 2
    assert message == (
        "LlamaForCausalLM gives log-probs that are not numbers: its weights hold nan or inf, or overflow"
    )


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: float) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_ends_the_run_and_spares_the_last_good_checkpoint(
    tmp_path: Path, tiny_model: Path, asynchronous: bool
) -> None:
    settings = {"every_steps": 3, "keep_last": 100, "asynchronous": asynchronous}
    config = load_config(tiny.write_config(tmp_path, tiny_model, checkpoint=settings, optim={"epochs": 3}))
    with small_disk(tmp_path / "disk", 2) as disk:
        run = RunDir.create(disk / "run", config)
        with start_ranks(run, 1) as ranks:
            assert ranks.wait() == [1]
        (failure,) = run.failures()
        last = run.list_checkpoints()[-1].step
        assert failure["message"].endswith(f"No space left on device; the last good checkpoint is of step {last}")
        assert run.status()["error"] == failure["message"]
        assert not list(run.checkpoints.glob("writing-*")), "what could not be finished gives its room back"

        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        with start_ranks(run, 1) as ranks:
            assert ranks.wait() == [0]
        assert [e["step"] for e in run.events() if e["event"] == "resumed"] == [last]
        assert run.status()["state"] == "completed"


@pytest.mark.slow
def test_the_command_says_that_the_disk_is_full(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"every_steps": 3, "keep_last": 100}
    config = tiny.write_config(tmp_path, tiny_model, checkpoint=settings, optim={"epochs": 3})
    with small_disk(tmp_path / "disk", 2) as disk:
        code, out, err = tiny.run_lockstep("train", config, "--run-dir", disk / "run")
    assert code == 1
    assert re.match(r"error: .*No space left on device; the last good checkpoint is of step \d+\n", err)
    assert "Traceback" not in out + err
    assert f"lockstep train --resume {disk}/run" in out


@pytest.mark.parametrize(
    ("parallel", "procs", "sentence"),
    [
        (
            {"tensor": 3},
            3,
            "parallel.tensor 3 does not divide the model's num_attention_heads 4: choose one of 1, 2, 4",
        ),
        ({"pipeline": 5}, 5, "parallel.pipeline 5 is more than the model's 2 layers: lower it to 2 or less"),
    ],
)
def test_a_dry_run_refuses_a_layout_that_the_model_cannot_have(
    tmp_path: Path,
    tiny_model: Path,
    parallel: dict[str, int],
    procs: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny.write_config(tmp_path, tiny_model, parallel=parallel)
    assert refuse(["train", config, "--dry-run", "--procs", procs], monkeypatch, capsys) == sentence


# --- nothing waits forever ------------------------------------------------------------------------------------------


def make_run_on_two(folder: Path, model: Path, **changes: Any) -> RunDir:
    settings = {"launch": {"procs": 2, "timeout_s": 5}, "optim": {"epochs": 20}, **changes}
    return RunDir.create(folder / "run", load_config(tiny.write_config(folder, model, **settings)))


@pytest.mark.parametrize(
    ("parallel", "stopped"),
    [
        ({"shard": 2}, 1),
        pytest.param({"shard": 2}, 0, marks=pytest.mark.slow),
        pytest.param({"replicate": 2, "shard": 1}, 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_when_the_deadline_has_passed(
    tmp_path: Path, tiny_model: Path, parallel: dict[str, int], stopped: int
) -> None:
    run = make_run_on_two(tmp_path, tiny_model, parallel=parallel)
    waiting = 1 - stopped
    with start_ranks(run, 2) as ranks:
        assert ranks.wait_until(lambda: newest_step(run) >= 3)
        ranks.signal(signal.SIGSTOP, [stopped])
        start = time.monotonic()
        ranks.processes[waiting].join(120)
        assert ranks.processes[waiting].exitcode == 1
        assert time.monotonic() - start < 60  # of a deadline of 5 s, on a busy machine
    (failure,) = run.failures()
    assert failure["message"] == (
        f"rank {waiting} waited 5 s on the other ranks, and got no sign of life from rank {stopped}: "
        "see what blocks it, or raise launch.timeout_s if it is only slow"
    )


def test_a_rank_that_never_joins(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run_on_two(tmp_path, tiny_model)
    with start_ranks(run, 2) as ranks:
        ranks.signal(signal.SIGSTOP, [1])
        ranks.processes[0].join(120)
        assert ranks.processes[0].exitcode == 1
    assert re.match(r"rank 0 waited \d+ s at .* for all 2 ranks to join", run.failures()[0]["message"])


def test_a_rank_whose_peer_dies_says_so_at_once(tmp_path: Path, tiny_model: Path) -> None:
    run = make_run_on_two(tmp_path, tiny_model, launch={"procs": 2, "timeout_s": 600})
    with start_ranks(run, 2) as ranks:
        assert ranks.wait_until(lambda: newest_step(run) >= 3)
        ranks.signal(signal.SIGKILL, [1])
        assert ranks.wait(120) == [1, -signal.SIGKILL]
    assert run.failures()[0]["message"] == "rank 0 lost its connection to rank 1, which ended first"


@pytest.mark.slow
def test_the_command_ends_a_run_that_hangs(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"launch": {"procs": 2, "timeout_s": 600, "max_restarts": 0}, "optim": {"epochs": 500}}
    config = tiny.write_config(tmp_path, tiny_model, **settings)
    run = RunDir(tmp_path / "run")
    command = tiny.start_lockstep("train", config, "--run-dir", run.path)
    try:
        while newest_step(run) < 3:
            assert command.poll() is None
            time.sleep(0.05)
        stopped = tiny.pid_of_rank(run, 1)
        os.kill(stopped, signal.SIGSTOP)
        out, err = command.communicate(timeout=300)  # before any collective's deadline
    finally:
        command.terminate()
    assert command.returncode == 1
    assert err.startswith(f"error: rank 1 (process {stopped}) was stopped by a signal and did not go on within 4 s")
    assert "Traceback" not in out + err
    assert json.loads((run.path / "status.json").read_text())["state"] == "failed"
