"""`lockstep verify` as a person runs it, on real gloo processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from lockstep.cli.verify import verify_and_show
from lockstep.config import ConfigError, load_config
from lockstep.verification import checking
from lockstep.verification.checking import Report, StepErrors, Verdict
from lockstep.verification.layouts import ONE


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    model = tiny.write_model(folder / "model", num_hidden_layers=5, hidden_size=64)
    return tiny.write_config(folder, model, lora={"rank": 4, "dropout": 0.1}, batch={"samples": 6})


def test_verify_prints_a_table_and_answers_in_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load_config(config, ["optim.max_grad_norm=null"])
    assert verify_and_show(settings, "pipeline=2,schedule=interleaved; tensor=2", as_json=True) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in err.splitlines()]
    rows = rows[max(n for n, row in enumerate(rows) if row[:2] == ["the", "plain"]) :]  # the first is of the progress
    assert [" ".join(row[:2]) for row in rows[:4]] == ["the plain", "one rank", "pipeline 2", "tensor 2"]
    assert [row[-1] for row in rows[1:4]] == ["PASS"] * 3
    assert "dropout is 0 where numbers are compared, and checked by itself" in err
    assert "reads a checkpoint of the first" in err
    assert "not covered: rounding in fp32, CUDA kernels and compiled code" in err
    assert "all within 1e-10" in err
    assert "2/3 pipeline 2 (interleaved)" in err

    report = json.loads(out)
    assert report["passed"] is True
    assert report["tolerance"] == 1e-10
    assert [row["layout"] for row in report["layouts"]] == ["one rank", "pipeline 2 (interleaved)", "tensor 2"]
    row = report["layouts"][2]
    assert row["processes"] == 2
    assert row["problem"] is None
    assert row["loss"] == pytest.approx(report["reference"]["loss"], rel=1e-10)
    assert max(row["errors"]["by_parameter"].values()) < 1e-10
    assert any("lora_A" in name for name in row["errors"]["by_parameter"])
    assert not any("clipped" in note for note in report["notes"])
    assert any("schedule" in limit for limit in report["not_covered"])


@pytest.mark.slow
def test_a_script_needs_no_guard(config: Path, tmp_path: Path) -> None:
    """Ranks are new processes, and none of them runs the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "from lockstep.config import load_config\n"
        "from lockstep.verification import verify\n"
        "print('once')\n"
        f"report = verify(load_config({str(config)!r}), layouts='shard=2')\n"
        "print(report.passed, len(report.verdicts), __name__)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "True", "2", "__main__"]


def test_a_layout_that_the_model_cannot_have_is_a_bad_request(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor 3: parallel\.tensor 3 does not divide the model's 4 .* heads"):
        verify_and_show(load_config(config), "tensor=3", as_json=False)


def test_a_layout_that_fails_is_exit_code_1_and_its_sentence(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Verdict(ONE, 1.0, "", 2.0, 3.0, StepErrors()), Verdict(ONE, 1.0, "rank 1: it broke [here]")
    report = Report("Model", 1e-10, 2.0, 3.0, [good, bad], ["a note"])
    monkeypatch.setattr(checking, "verify", lambda *given, **options: report)
    assert verify_and_show(load_config(config), None, as_json=True) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["passed"] is False
    assert "FAIL one rank: rank 1: it broke [here]" in found.err
    assert "1 of 2 layouts do not make the step" in found.err
    report.verdicts.pop()
    assert verify_and_show(load_config(config), None, as_json=True) == 0


@pytest.mark.slow
def test_the_default_set_passes_and_begins_with_the_own_layout(config: Path) -> None:
    code, out, err = tiny.run_lockstep("verify", config, "--json", "launch.procs=2", "parallel.offload=true")
    report = json.loads(out)
    assert code == 0, err
    names = [row["layout"] for row in report["layouts"]]
    assert names[:3] == ["one rank", "shard 2 (offload)", "replicate 2"]
    assert {"shard 2", "tensor 2", "context 2", "pipeline 2 (1f1b)", "pipeline 2 (interleaved)"} <= set(names)


@pytest.mark.slow
def test_three_axes_at_once_on_eight_processes(config: Path) -> None:
    code, out, err = tiny.run_lockstep("verify", config, "--layouts", "shard=2,tensor=2,pipeline=2", "--json")
    assert code == 0, (out, err)
    assert json.loads(out)["layouts"][1]["layout"] == "shard 2 x tensor 2 x pipeline 2 (1f1b)"


@pytest.mark.slow
def test_a_model_with_float32_inside_is_held_to_the_same_and_what_it_refuses_is_left_out(tmp_path: Path) -> None:
    import transformers
    from equivalence.plain import FAMILIES

    gemma = FAMILIES["gemma"]()
    gemma.vocab_size = tiny.VOCABULARY
    transformers.AutoModelForCausalLM.from_config(gemma).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    config = load_config(tiny.write_config(tmp_path, tmp_path / "model"))
    report = checking.verify(config)
    assert report.passed, [(v.layout.name, v.problem) for v in report.verdicts]
    assert report.tolerance == 1e-10
    assert "tensor 2" in [verdict.layout.name for verdict in report.verdicts]
    assert any("left out: pipeline 2 (interleaved) (4 stages need" in note for note in report.notes)
    with pytest.raises(ConfigError, match=r"pipeline 4 .* 4 stages need as many layers, and the model has 2"):
        checking.verify(config, layouts="pipeline=4")
