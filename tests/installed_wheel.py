"""`make release` runs this with the wheel's own Python, away from the checkout: a whole run with what was installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

import tiny

import lockstep


def main() -> None:
    home = Path(lockstep.__file__).resolve()
    assert home.is_relative_to(Path(sys.prefix).resolve()), f"this is not the wheel: {home}"
    assert lockstep.__version__ == metadata.version("lockstep"), "the package and its metadata name different versions"
    for path in ("py.typed", "service/dashboard/static/index.html", "service/dashboard/static/app.js"):
        assert resources.files("lockstep").joinpath(path).is_file(), f"the wheel has no {path}"
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
    print(f"lockstep {lockstep.__version__} from {home.parent}: installed, trained and exported")


def train(folder: Path) -> None:
    """Twelve steps on a random model on one process, by the command, and the export read by plain transformers."""
    config = tiny.write_config(folder, tiny.write_model(folder / "model"))
    run = folder / "run"
    command(folder, "train", config, "--run-dir", run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert len(losses) == 12, f"{len(losses)} steps instead of 12"
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    command(folder, "export", run, "--to", folder / "exported")

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "exported")


def command(folder: Path, *arguments: object) -> None:
    """The command as pip installed it."""
    script = Path(sys.executable).parent / "lockstep"
    subprocess.run([script, *map(str, arguments)], cwd=folder, check=True, timeout=600)


if __name__ == "__main__":
    main()
