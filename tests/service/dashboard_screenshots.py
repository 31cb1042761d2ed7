"""Pictures of every state of the page for docs: `python tests/service/dashboard_screenshots.py [FOLDER]`.

Jobs are real ones of a real service, run by a worker that only writes what training would.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from dashboard_driver import Browser, Service, wait_for, worker_on_path

from lockstep.service.admission import Allowed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
PHONE = 390


def main(folder: Path) -> None:
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as temporary, worker_on_path():
        os.environ["HF_HUB_OFFLINE"] = "1"
        models = Path(temporary, "models")
        model = tiny.write_model(models / "tiny-llama")
        with (
            Service(Path(temporary, "data"), allowed=Allowed(read=(models,))) as service,
            Browser(service.url) as browser,
        ):
            browser.open()
            browser.wait_for_text("No jobs yet")
            browser.screenshot(folder / "list-empty.png", max_height=640)
            jobs = submit_jobs(service)
            show_jobs(browser, jobs, folder)
            show_submit(browser, model, folder)
            show_phone(browser, jobs, folder)
            show_dark(browser, jobs, folder)
            browser.open()
            browser.find("table.jobs")
            service.stop()
            browser.wait_for_text("does not answer", "#banner")
            browser.screenshot(folder / "service-down.png", max_height=640)
    shrink(folder)


def submit_jobs(service: Service) -> dict[str, str]:
    """By state. Those that run take all four processes, so that others wait."""
    jobs = {}
    jobs["completed"] = service.submit("short-answers-warned", steps=60)
    jobs["other"] = service.submit("short-answers-lr-2e-4", steps=60, config={"batch": {"samples": 8}})
    jobs["pairs"] = service.submit("pairs-of-answers", steps=40, kind="dpo")
    jobs["failed"] = service.submit("failing-high-rate")
    for name in ("completed", "other", "pairs", "failed"):
        service.wait(jobs[name], "completed", "failed")
    jobs["cancelled"] = service.submit("halfway-cancelled")
    wait_for(lambda: service.manager.get(jobs["cancelled"]).progress.step == 12)
    service.manager.cancel(jobs["cancelled"])
    service.wait(jobs["cancelled"], "cancelled")
    jobs["running"] = service.submit("halfway-pairs-warned", steps=200, kind="dpo")
    jobs["paced"] = service.submit("paced-run", steps=2000)
    service.submit("paced-other", steps=4000)
    jobs["preparing"] = service.submit("preparing-large-model")
    for number in range(2):
        jobs[f"queued-{number}"] = service.submit(f"nightly-{number}")
    for name in ("running", "paced"):
        service.wait(jobs[name], "running")
    service.wait(jobs["preparing"], "preparing")
    return jobs


def show_jobs(browser: Browser, jobs: dict[str, str], folder: Path) -> None:
    browser.open()
    browser.wait_for_text("preparing-large-model")
    browser.wait_for_text("next to start")
    browser.wait_for_text("of 2,000")
    browser.screenshot(folder / "list.png", max_height=900)
    for state in ("running", "failed", "completed"):
        browser.open(f"/jobs/{jobs[state]}")
        wait_for_charts(browser)
        browser.screenshot(folder / f"job-{state}.png", max_height=1500)
    browser.open(f"/compare?jobs={jobs['completed']},{jobs['other']},{jobs['pairs']}")
    wait_for_charts(browser)
    browser.screenshot(folder / "compare.png", max_height=1300)
    browser.open(f"/jobs/{jobs['paced']}")
    browser.named("button", "Cancel").click()
    browser.find("#confirm[open]")
    browser.screenshot(folder / "job-cancel.png", max_height=640)


def show_submit(browser: Browser, model: Path, folder: Path) -> None:
    browser.open("/submit")
    browser.find("#field-model").send_keys(str(model))
    browser.find("#field-data-train").send_keys("dataset:rows")
    browser.find("#field-optim-learning_rate").send_keys("-1")
    browser.find("#field-data-validation_fraction").send_keys("0.1")
    browser.find("#field-data-max_length").send_keys("128")
    browser.find("#field-batch-samples").send_keys("4")
    browser.named("button", "Plan").click()
    browser.find("#refusal")
    browser.screenshot(folder / "submit-error.png", max_height=1100)
    rate = browser.find("#field-optim-learning_rate")
    rate.clear()
    rate.send_keys("3e-4")
    browser.named("button", "Plan").click()
    browser.find("#plan")
    browser.screenshot(folder / "submit-plan.png", max_height=1300)


def show_phone(browser: Browser, jobs: dict[str, str], folder: Path) -> None:
    browser.resize(PHONE, 844)
    browser.open()
    browser.wait_for_text("preparing-large-model")
    browser.screenshot(folder / "phone-list.png", max_height=1200)
    browser.open(f"/jobs/{jobs['failed']}")
    wait_for_charts(browser)
    browser.screenshot(folder / "phone-job.png", max_height=1200)
    browser.open("/submit")
    browser.find("#field-model")
    browser.screenshot(folder / "phone-submit.png", max_height=1200)


def show_dark(browser: Browser, jobs: dict[str, str], folder: Path) -> None:
    browser.resize(1280, 900, dark=True)
    browser.open()
    browser.wait_for_text("preparing-large-model")
    browser.screenshot(folder / "dark-list.png", max_height=900)
    browser.open(f"/jobs/{jobs['running']}")
    wait_for_charts(browser)
    browser.screenshot(folder / "dark-job.png", max_height=1100)
    browser.resize(1280, 900)


def shrink(folder: Path) -> None:
    """Few colours are enough for a page, and a repository keeps pictures for ever."""
    from PIL import Image

    for path in sorted(folder.glob("*.png")):
        Image.open(path).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.stat().st_size:>8,} {path.name}")


def wait_for_charts(browser: Browser) -> None:
    """Those in sight, drawn and at rest."""
    wait_for(lambda: len(browser.all(".plot .trace")) >= 2, "for curves")
    time.sleep(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "service")
