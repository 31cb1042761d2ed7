"""A service with a quick worker, and Chromium to look at its page. For tests and for the screenshots in docs."""

from __future__ import annotations

import base64
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from lockstep.launch import LocalLauncher
from lockstep.service.app import create_app
from lockstep.service.jobs import JobManager
from lockstep.service.schemas import JobRequest
from lockstep.service.settings import ServiceSettings

HERE = Path(__file__).parent
HAS_CHROMIUM = bool(shutil.which("chromium") and shutil.which("chromedriver"))
DEADLINE_S = 60.0
ROWS = [{"prompt": f"say {i}", "completion": f"the number {i}"} for i in range(24)]


class Service:
    """The real application and scheduler; jobs run `dashboard_worker`."""

    def __init__(self, folder: Path, *, port: int = 0, **settings: Any) -> None:
        chosen = ServiceSettings(data_dir=folder, procs=4, port=port, **settings)
        launcher = LocalLauncher(worker_module="dashboard_worker", grace_s=3.0)
        options = {"procs": 4, "launcher": launcher, "allowed": chosen.allowed}
        self.manager = JobManager(folder, **options)
        config = uvicorn.Config(
            create_app(chosen, self.manager), port=port, log_level="error", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Service:
        self._thread.start()
        wait_for(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """With its jobs: nothing outlives a test."""
        if not self._thread.is_alive():
            return
        for job in self.jobs():
            self.manager.cancel(job.id)
        wait_for(lambda: all(job.finished_at for job in self.jobs()))
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)

    @property
    def port(self) -> int:
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def jobs(self) -> list[Any]:
        return self.manager.list()[0]

    def submit(self, name: str, *, steps: int = 20, kind: str = "sft", **request: Any) -> str:
        """The job's id. What its worker does follows from the name."""
        if "rows" not in [dataset.name for dataset in self.manager.datasets.list()]:
            self.manager.datasets.add_rows("rows", ROWS)
        config = {
            "name": name,
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "algorithm": kind,
            "data": {"train": "dataset:rows"},
            "optim": {"max_steps": steps},
            **request.pop("config", {}),
        }
        return self.manager.submit(JobRequest(config=config, **request)).id

    def wait(self, job_id: str, *states: str) -> None:
        wait_for(lambda: self.manager.get(job_id).state in states)


@contextmanager
def worker_on_path() -> Iterator[None]:
    """Processes that the launcher starts can import the worker."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def wait_for(condition: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s in vain {what}"
        time.sleep(0.05)
    return found


class Browser:
    """Headless Chromium on one address, 1280 pixels wide unless told otherwise."""

    def __init__(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--lang=en-GB",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        self.url = url
        self.resize(width, height, dark=dark)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, path: str = "/") -> None:
        self.driver.get(self.url + path)

    def find(self, selector: str) -> Any:
        """The first that is shown, as soon as there is one."""
        return wait_for(lambda: next((e for e in self.all(selector) if e.is_displayed()), None), f"for {selector}")

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def named(self, selector: str, text: str) -> Any:
        """The shown element with exactly this text."""
        script = """return [...document.querySelectorAll(arguments[0])].find(
            (element) => element.checkVisibility() && element.textContent.trim() === arguments[1])"""
        return wait_for(lambda: self.driver.execute_script(script, selector, text), f"for {selector} {text!r}")

    def text(self, selector: str = "main") -> str:
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def wait_for_text(self, text: str, selector: str = "main") -> None:
        wait_for(lambda: text in self.text(selector), f"for {text!r}; there is {self.text(selector)!r}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the browser had to say, Content-Security-Policy included."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path, *, max_height: int = 1500) -> None:
        """The page from its top, up to a height."""
        height = min(int(self.run("return document.documentElement.scrollHeight")), max_height)
        width = int(self.run("return innerWidth"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))
