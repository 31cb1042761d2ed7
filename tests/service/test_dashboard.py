"""The page in real Chromium, on a real service whose worker only writes: submit, watch, cancel, compare, mishaps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_driver import HAS_CHROMIUM, ROWS, Browser, Service, wait_for, worker_on_path
from dashboard_worker import HOSTILE_KEY, HOSTILE_LINE, train_record, validation_record

from lockstep.service.access import make_token
from lockstep.service.admission import Allowed

HOSTILE = "hostile <img src=x onerror=alert(1)>"
PHONE = 390
MARKUP = "return document.querySelectorAll('main img, main script').length"
in_chromium = pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium and chromedriver")


@pytest.fixture(scope="module", autouse=True)
def worker() -> Iterator[None]:
    with worker_on_path():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("served-models")
    shutil.copytree(tiny_model, folder / "tiny")
    return folder


@pytest.fixture
def service(tmp_path: Path, models: Path) -> Iterator[Service]:
    with Service(tmp_path / "data", allowed=Allowed(read=(models,))) as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    pytest.importorskip("selenium")
    with Browser("") as opened:
        yield opened


@pytest.fixture
def browser(chromium: Browser, service: Service) -> Iterator[Browser]:
    """On this test's service. What Chromium complains about fails the test."""
    chromium.url = service.url
    chromium.driver.get("about:blank")  # a page that is left open goes on asking its service
    chromium.complaints()
    yield chromium
    complaints = chromium.complaints()
    chromium.resize(1280)
    assert not complaints


def points(browser: Browser) -> int:
    """Of the longest curve drawn so far."""
    return int(
        browser.run("return Math.max(0, ...[...document.querySelectorAll('.plot')].map(p => p.dataset.points ?? 0))")
    )


def state(browser: Browser) -> str:
    return browser.text("main .chip")


# --- what a person does -----------------------------------------------------------------------------------------------


@in_chromium
def test_submit_in_the_form_watch_the_curve_grow_and_cancel(browser: Browser, service: Service, tmp_path: Path) -> None:
    file = tmp_path / "short answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    browser.open("/submit")
    browser.find("#field-model").send_keys("org/model")
    browser.find("#field-name").send_keys("paced-by-form")
    browser.find("#upload-file").send_keys(str(file))
    browser.wait_for_text("24 rows as short-answers")
    browser.named("button", "Look at the rows").click()
    browser.wait_for_text("the number 1")
    browser.find("#field-optim-max_steps").send_keys("400")
    browser.find("#field-optim-learning_rate").send_keys("3e-4")
    browser.named("button", "Submit").click()

    browser.named("h1", "paced-by-form")
    (job,) = service.jobs()
    assert (job.name, job.model) == ("paced-by-form", "org/model")
    config = browser.run("return fetch(`/api/jobs/${arguments[0]}/config`).then(r => r.json())", job.id)["config"]
    assert config["optim"] | {"learning_rate": 3e-4, "max_steps": 400} == config["optim"]
    assert config["lora"]["rank"] == 16
    assert config["data"]["train"][0]["path"] == "dataset:short-answers"

    seen = wait_for(lambda: points(browser), "for a first point")
    wait_for(lambda: points(browser) > seen + 5, "for the curve to grow")
    asked = browser.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert any(re.search(r"/metrics\?after=[1-9]", address) for address in asked), "what is known is read again"
    assert state(browser) == "running"
    wait_for(lambda: "step 3 of 400" in browser.text(".log"))
    browser.named("button", "Cancel").click()
    browser.named("#confirm button", "Keep it").click()
    assert not service.manager.get(job.id).cancelling
    browser.named("button", "Cancel").click()
    browser.named("#confirm button", "Cancel the job").click()
    wait_for(lambda: state(browser) == "cancelled")
    assert service.manager.get(job.id).state == "cancelled"


@in_chromium
def test_the_list_is_live_filters_and_loads_no_chart_script(browser: Browser, service: Service) -> None:
    browser.open()
    browser.wait_for_text("No jobs yet")
    ended = service.submit("quick")
    service.wait(ended, "completed")
    running = service.submit("paced-one", steps=1000)
    browser.wait_for_text("paced-one")
    wait_for(lambda: re.search(r"step \d+ of 1,000", browser.text()))
    wait_for(lambda: "min" in browser.text("td[data-label='Time left']"))
    counts = "all 2 running 1 preparing 0 queued 0 completed 1 failed 0 cancelled 0"
    assert " ".join(browser.text(".filters").split()) == counts
    browser.find("#search").send_keys("SFT quick")
    wait_for(lambda: "quick" in browser.text() and "paced-one" not in browser.text())
    assert browser.run("return [location.search, document.activeElement.id]") == ["?search=SFT+quick", "search"]
    browser.find(".filters a[href*=failed]").click()
    browser.wait_for_text("No failed job matches “SFT quick”.")
    assert browser.text(".filters").split()[:2] == ["all", "1"]
    browser.named("a", "All jobs").click()
    browser.wait_for_text("paced-one")
    browser.find(".filters a[href*=completed]").click()
    wait_for(lambda: "quick" in browser.text() and "paced-one" not in browser.text())
    browser.find(".filters a[href*=failed]").click()
    browser.wait_for_text("No job is failed.")
    browser.find(".filters a").click()
    browser.find("button[aria-label='Cancel paced-one']").click()
    browser.named("#confirm button", "Cancel the job").click()
    service.wait(running, "cancelled")
    browser.wait_for_text("cancelled", "table.jobs")
    loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name).join()")
    assert "app.js" in loaded
    assert "plotly" not in loaded


@in_chromium
def test_a_failed_job_says_why_first(browser: Browser, service: Service) -> None:
    job = service.submit("failing-warned")
    service.wait(job, "failed")
    browser.open(f"/jobs/{job}")
    browser.wait_for_text("the loss is nan at step 7: lower optim.learning_rate", ".failure .sentence")
    assert "RuntimeError" in browser.text(".failure pre")
    browser.wait_for_text("12 answers do not fit", ".warnings")
    assert browser.run(
        "return document.querySelector('.failure').compareDocumentPosition(document.querySelector('.charts')) & 4"
    )


@in_chromium
def test_a_completed_job_has_curves_files_checkpoints_and_samples(browser: Browser, service: Service) -> None:
    job = service.submit("pairs", kind="dpo")
    service.wait(job, "completed")
    browser.open(f"/jobs/{job}")
    wait_for(lambda: points(browser) == 20)
    titles = [title.text for title in browser.all("figure h3")]
    assert titles[:4] == ["Loss", "Rewards", "Accuracy", "Learning rate"]
    assert {"Speed (tokens/s)", "Memory (GiB)", "Communication (MiB a step)"} <= set(titles)
    last = [f"{record('pairs', 20, 20)['loss']:.4g}" for record in (train_record, validation_record)]
    assert browser.text("figure .legend").split() == ["train", last[0], "validation", last[1]]
    link = browser.find("a[href$='export/adapter/adapter_config.json']")
    fetched = browser.run("return fetch(arguments[0].href).then(r => r.json())", link)
    assert fetched == {"r": 16}
    spent = "training 3 min 10 s, checkpoints 17 s, start 8 s, of these 42 s compiling, 3 times"
    assert spent in browser.text("main")
    assert "20" in browser.text(".pair table")
    assert "Air scatters blue light most." in browser.text(".sample")
    browser.named("summary", "Configuration").click()
    browser.wait_for_text("max_steps: 20", "pre.yaml")


@in_chromium
def test_compare_shows_a_curve_of_each_run_and_what_differs(browser: Browser, service: Service) -> None:
    jobs = [service.submit("one"), service.submit("other", config={"batch": {"samples": 3}})]
    for job in jobs:
        service.wait(job, "completed")
    browser.open()
    browser.find("input[aria-label='Compare one']").click()
    browser.find("input[aria-label='Compare other']").click()
    browser.named("button", "Compare 2 runs").click()
    wait_for(lambda: points(browser) == 20)
    assert browser.all("figure h3")[0].text == "Loss"
    assert len(browser.all("figure:first-child .trace")) == 4  # training and validation of both
    row = next(row.text for row in browser.all(".differences tr") if row.text.startswith("batch.samples"))
    assert row.split() == ["batch.samples", "null", "3"]
    browser.all(".chooser input")[0].click()
    wait_for(lambda: len(browser.all("figure:first-child .trace")) == 2)


@in_chromium
def test_the_plan_and_the_mistakes_are_shown_where_they_belong(
    browser: Browser, service: Service, models: Path
) -> None:
    service.manager.datasets.add_rows("rows", ROWS)
    browser.open("/submit")
    browser.find("#field-model").send_keys(str(models / "tiny"))
    browser.find("#field-data-train").send_keys("dataset:rows")
    browser.find("#field-batch-samples").send_keys("0")
    browser.named("button", "Plan").click()
    browser.wait_for_text("greater than 0", "#field-batch-samples-problem")
    assert browser.find("#field-batch-samples").get_attribute("aria-invalid") == "true"
    assert browser.run("return document.activeElement.id") == "field-batch-samples"

    browser.find("#field-batch-samples").clear()
    browser.find("#field-batch-samples").send_keys("4")
    browser.named("button", "Plan").click()
    browser.wait_for_text("LlamaForCausalLM", "#plan")
    assert re.search(r"steps\s+6\b", browser.text("#plan"))
    assert not browser.all("[aria-invalid]")

    yaml = browser.find("#yaml")
    yaml.clear()
    yaml.send_keys("model: org/model\ndata:\n  train: org/rows\noptim:\n  learning_rat: 1\n")
    browser.named("button", "Plan").click()
    browser.wait_for_text("did you mean optim.learning_rate?", "#refusal")
    assert browser.run("return getSelection().toString()").strip() == "learning_rat: 1"
    assert not browser.find("#field-model").is_enabled()
    browser.named("button", "Use the form instead").click()
    assert "dataset:rows" in yaml.get_attribute("value")
    assert service.jobs() == []
    assert len(browser.complaints()) == 2  # two refusals, which Chromium notes


@in_chromium
def test_a_job_whose_answer_was_lost_is_not_submitted_twice(browser: Browser, service: Service) -> None:
    browser.open("/submit")
    browser.find("#field-model").send_keys("org/model")
    browser.find("#field-data-train").send_keys("org/rows")
    browser.run(
        """const honest = window.fetch;
        window.fetch = async (...given) => {
            const answer = await honest(...given);
            if (given[1].method !== "POST") return answer;
            window.fetch = honest;
            throw new TypeError("the connection broke");
        }"""
    )
    browser.named("button", "Submit").click()
    browser.wait_for_text("the same job is not submitted twice")
    assert len(service.jobs()) == 1
    browser.named("button", "Submit").click()
    browser.named("h1", "run")
    assert len(service.jobs()) == 1


@in_chromium
def test_submit_again_starts_from_the_configuration_of_a_job(browser: Browser, service: Service) -> None:
    job = service.submit("first")
    service.wait(job, "completed")
    browser.open(f"/submit?from={job}")
    wait_for(lambda: "dataset:rows" in browser.find("#yaml").get_attribute("value"))
    browser.named("button", "Submit").click()
    browser.named("h1", "first")
    assert len(service.jobs()) == 2


# --- hostile, small, away, locked -------------------------------------------------------------------------------------


@in_chromium
def test_what_comes_from_outside_is_shown_as_text(browser: Browser, service: Service) -> None:
    job = service.submit(HOSTILE)
    service.wait(job, "completed")
    for path, expected in [
        ("/", HOSTILE),
        (f"/jobs/{job}", HOSTILE_LINE),
        (f"/jobs/{job}", HOSTILE_KEY),
        (f"/compare?jobs={job}", HOSTILE_KEY),
        (f"/submit?from={job}", ""),
    ]:
        browser.open(path)
        browser.wait_for_text(expected)
    browser.open(f"/jobs/{job}")
    browser.wait_for_text(HOSTILE_LINE, ".log")
    browser.wait_for_text(HOSTILE_LINE, ".warnings")
    assert browser.run(MARKUP) == 0
    deceiving = "exe\u202egnp \x1b[31m"  # of a database that is older than the rule against such names
    service.manager.store.change(service.manager.store.get(job), name=deceiving)
    for path in ("/", f"/jobs/{job}", f"/compare?jobs={job}"):
        browser.open(path)
        browser.wait_for_text(r"exe\u202egnp \u001b[31m")
        assert "\u202e" not in browser.run("return document.title + document.documentElement.outerHTML")
    service.manager.store.change(service.manager.store.get(job), name=HOSTILE)
    browser.open(f"/compare?jobs={job}")  # here curves are named after runs, and plotly reads markup in names
    browser.find("figure .trace")
    browser.run("Plotly.Fx.hover(document.querySelector('.plot'), [{curveNumber: 0, pointNumber: 3}])")
    wait_for(lambda: HOSTILE in browser.run("return document.querySelector('.hoverlayer').textContent"))
    assert browser.run(MARKUP) == 0


@in_chromium
def test_nothing_is_wider_than_a_phone(browser: Browser, service: Service) -> None:
    long = "failing-" + "averylongnamewithoutanyspace" * 5
    job = service.submit(long)
    service.wait(job, "failed")
    browser.resize(PHONE, 844)
    for path in ("/", f"/jobs/{job}", f"/compare?jobs={job}", "/submit"):
        browser.open(path)
        browser.find("h1")
        if path.startswith(("/jobs", "/compare")):
            wait_for(lambda: points(browser))
        for details in browser.all("summary"):
            details.click()
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE, path


@in_chromium
def test_every_control_has_a_name_and_is_reached_by_keyboard(browser: Browser, service: Service) -> None:
    from selenium.webdriver.common.keys import Keys

    job = service.submit("paced-named", steps=1000)
    for path in ("/", f"/jobs/{job}", "/compare", "/submit"):
        browser.open(path)
        browser.find("main a, main input, main button")
        assert unnamed_controls(browser) == [], path
    browser.open()
    browser.wait_for_text("paced-named")
    for _ in range(40):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        if browser.run("return document.activeElement.textContent") == "paced-named":
            break
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.named("h1", "paced-named")


@in_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), pytest.param(PHONE, True, marks=pytest.mark.slow)])
def test_axe_finds_nothing(browser: Browser, service: Service, width: int, dark: bool) -> None:
    """Contrast, names, headings, landmarks, what the keyboard reaches: in both colours."""
    jobs = [service.submit("pairs", kind="dpo"), service.submit("failing-warned")]
    for job in jobs:
        service.wait(job, "completed", "failed")
    service.wait(service.submit("paced-one", steps=1000), "running")
    browser.resize(width, dark=dark)
    for path, awaited in [
        ("/", "table.jobs tr:nth-child(3)"),
        ("/?search=nothing", ".empty p"),
        (f"/jobs/{jobs[0]}", ".sample"),
        (f"/jobs/{jobs[1]}", ".failure .sentence"),
        (f"/compare?jobs={','.join(jobs)}", ".differences tr"),
        ("/jobs/nothing", "main h1"),
        ("/submit", "#field-model"),
    ]:
        browser.open(path)
        browser.find(awaited)
        for summary in browser.all("summary"):
            summary.click()
        assert axe_problems(browser) == [], path
    for field, text in (("model", "org/model"), ("data-train", "org/rows"), ("batch-samples", "0")):
        browser.find(f"#field-{field}").send_keys(text)
    browser.named("button", "Plan").click()
    browser.find("[aria-invalid]")
    assert axe_problems(browser) == []
    browser.open()
    browser.find("button[aria-label='Cancel paced-one']").click()
    assert axe_problems(browser) == []
    browser.named("#confirm button", "Keep it").click()
    browser.complaints()  # a job that is not there, and a refused plan, are noted by Chromium


def axe_problems(browser: Browser) -> list[str]:
    axe = pytest.importorskip("axe_core_python")
    browser.run((Path(axe.__file__).parent / "axe.min.js").read_text())
    look = "const done = arguments[0]; axe.run({resultTypes: ['violations']}).then((found) => done(found.violations))"
    return [
        f"{problem['id']}: {node['html'][:100]} {node['failureSummary']}"
        for problem in browser.driver.execute_async_script(look)
        for node in problem["nodes"]
    ]


def unnamed_controls(browser: Browser) -> list[Any]:
    """As a screen reader sees the page."""
    roles = {"button", "link", "textbox", "checkbox", "combobox", "spinbutton", "progressindicator"}
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert len(controls) > 5
    return [node["role"] for node in controls if not node.get("name", {}).get("value")]


@in_chromium
@pytest.mark.slow
def test_a_page_in_the_background_rests_and_then_misses_nothing(browser: Browser, service: Service) -> None:
    job = service.submit("paced-background", steps=1000)
    browser.open()
    hide = "Object.defineProperty(document, 'hidden', {get: () => globalThis.away ?? true, configurable: true})"
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": hide})
    browser.open(f"/jobs/{job}")
    browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    browser.wait_for_text("Learning rate")
    assert (points(browser), browser.text(".log")) == (0, "")
    for steps in (5, 20):
        set_away(browser, False)
        wait_for(lambda steps=steps: points(browser) > steps and last_line(browser) > steps)
        set_away(browser, True)
        seen = service.manager.get(job).progress.step
        wait_for(lambda seen=seen: service.manager.get(job).progress.step > seen + 4)
    lines = [int(number) for number in re.findall(r"^step (\d+)", browser.text(".log"), re.MULTILINE)]
    assert lines == list(range(1, len(lines) + 1))


def set_away(browser: Browser, away: bool) -> None:
    browser.run("globalThis.away = arguments[0]; document.dispatchEvent(new Event('visibilitychange'))", away)


def last_line(browser: Browser) -> int:
    return max(map(int, re.findall(r"^step (\d+)", browser.text(".log"), re.MULTILINE)), default=0)


@in_chromium
def test_a_service_that_goes_away_and_comes_back(chromium: Browser, tmp_path: Path) -> None:
    chromium.resize(1280)
    with Service(tmp_path / "data") as first:
        chromium.url, port = first.url, first.port
        first.wait(first.submit("kept"), "completed")
        chromium.open()
        chromium.wait_for_text("kept")
    chromium.wait_for_text("The service does not answer", "#banner")
    assert "kept" in chromium.text()
    with Service(tmp_path / "data", port=port):
        chromium.named("button", "Try now").click()
        wait_for(lambda: not chromium.all("#banner:not([hidden])"), "for the banner to go")
        chromium.wait_for_text("completed")
    chromium.complaints()


@in_chromium
def test_a_token_is_asked_for_and_kept_in_the_tab(chromium: Browser, tmp_path: Path) -> None:
    token, line = make_token("ann", "submit")
    (tmp_path / "tokens").write_text(line + "\n")
    with Service(tmp_path / "data", token_file=tmp_path / "tokens") as service:
        chromium.url = service.url
        chromium.open("/submit")
        for text, expected in (("wrong", "not known"), (token, "")):
            chromium.find("#token-text").send_keys(text)
            chromium.named("#token button", "Use it").click()
            if expected:
                chromium.wait_for_text(expected, "#token")
        chromium.wait_for_text("ann (submit)", "#service")
        chromium.find("#field-model").send_keys("org/model")
        chromium.find("#field-data-train").send_keys("org/rows")
        chromium.find("#field-name").send_keys("quick")
        chromium.named("button", "Submit").click()
        chromium.named("h1", "quick")
        wait_for(lambda: state(chromium) == "completed")
        chromium.wait_for_text("step 20 of 20", ".log")
        chromium.driver.refresh()
        chromium.named("h1", "quick")
        assert service.jobs()[0].owner == "ann"
        assert not chromium.run("return document.cookie + JSON.stringify(localStorage)").strip("{}")
    assert not [text for text in chromium.complaints() if "Content Security Policy" in text]
