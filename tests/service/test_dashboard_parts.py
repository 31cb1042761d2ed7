"""The page's files as they are served, and its modules asked one by one in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_driver import HAS_CHROMIUM, Browser, Service
from fastapi.testclient import TestClient

from lockstep.service import dashboard
from lockstep.service.app import create_app
from lockstep.service.settings import ServiceSettings

STATIC = Path(dashboard.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))
in_chromium = pytest.mark.skipif(not HAS_CHROMIUM, reason="needs chromium and chromedriver")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(ServiceSettings(data_dir=tmp_path / "data")), base_url="http://127.0.0.1")


@pytest.mark.parametrize("place", ["/", "/jobs/any", "/compare", "/submit"])
def test_every_place_is_the_same_document(client: TestClient, place: str) -> None:
    answer = client.get(place)
    assert answer.status_code == 200
    assert answer.text == (STATIC / "index.html").read_text()
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.head(place).status_code == 200


@pytest.mark.parametrize("name", [path.name for path in STATIC.iterdir()] + ["plotly.min.js"])
def test_files_are_served_with_their_type_and_asked_for_once(client: TestClient, name: str) -> None:
    answer = client.get(f"/static/{name}")
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[Path(name).suffix])
    assert answer.headers["content-encoding"] == "gzip"
    again = client.get(f"/static/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = client.get(f"/static/{name}", headers={"Accept-Encoding": "identity"})
    assert plain.text == answer.text
    if name != "plotly.min.js":
        assert plain.text == (STATIC / name).read_text()


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e", "__init__.py", "%00", ".", "a%2fb.js"])
def test_no_other_file_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("path", [*SCRIPTS, STATIC / "app.css", STATIC / "index.html"], ids=lambda path: path.name)
def test_the_page_is_short_asks_nobody_else_and_never_reads_text_as_markup(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 450
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert set(re.findall(r"https?://[^\"'\s)]*", text)) <= {"https://huggingface.co/"}  # cut off what is pasted
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=\"|javascript:", text)


def test_the_page_imports_what_is_there() -> None:
    for path in SCRIPTS:
        for name in re.findall(r"(?:from |import\()\"\./([^\"]+)\"", path.read_text()):
            assert (STATIC / name).exists(), f"{path.name} imports {name}"


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("selenium")
    with Service(tmp_path_factory.mktemp("service") / "data") as service, Browser(service.url) as opened:
        opened.open("/static/icon.svg")  # of the same origin, and nothing in it runs
        yield opened


def ask(browser: Browser, module: str, expression: str, *given: Any) -> Any:
    """An expression over what a module exports (`m`) and what is given."""
    script = f"const given = arguments; return import('/static/{module}').then((m) => {expression})"
    return browser.run(script, *given)


@in_chromium
def test_the_later_record_of_a_step_counts_and_gaps_stay_gaps(browser: Browser) -> None:
    records = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    again = [{"step": 3, "loss": 30.0}, {"step": 4, "loss": None}, {"step": 4, "split": "validation", "loss": 9.0}]
    expression = """{
        const all = new m.Metrics();
        given[0].forEach((some) => all.add(some));
        return ["train", "validation"].map((split) => all.curve(split, "loss"));
    }"""
    train, validation = ask(browser, "metrics.js", expression, [records, again])
    assert train == {"x": [1, 2, 3, 4], "y": [1, 2, 30, None]}
    assert validation == {"x": [4], "y": [9]}


@in_chromium
def test_no_metric_is_left_without_a_chart(browser: Browser) -> None:
    keys = [
        "loss",
        "loss_sft",
        "loss_scale",
        "reward/format",
        "kl",
        "traffic/shard/send",
        "memory_gib",
        "new",
        "own/a",
        "own/b",
    ]
    groups = ask(browser, "metrics.js", "m.groupKeys(given[0]).map(g => [g.title, g.keys])", keys)
    assert sorted(key for _, found in groups for key in found) == sorted(keys)
    assert groups[0] == ["Loss", ["loss"]]
    assert ["own", ["own/a", "own/b"]] in groups
    assert ["loss_scale", ["loss_scale"]] in groups


@in_chromium
def test_long_curves_are_thinned_without_losing_a_spike(browser: Browser) -> None:
    steps = 20_000
    y = [1.0 + 0.1 * (step % 7) for step in range(steps)]
    y[12_345], y[777] = 99.0, -99.0
    thin = ask(browser, "charts.js", "m.thinOut({x: given[0], y: given[1]})", list(range(steps)), y)
    assert len(thin["x"]) < 2000
    assert thin["x"] == sorted(thin["x"])
    assert {99, -99} <= set(thin["y"])
    assert (thin["x"][0], thin["x"][-1]) == (0, steps - 1)


@in_chromium
def test_what_the_form_writes_is_yaml_that_means_the_same(browser: Browser) -> None:
    import yaml

    texts = [
        "plain",
        "a: b",
        "# no",
        "yes",
        "'quoted'",
        'say "it"',
        "línea",
        "- list",
        "{x}",
        "1_000",
        "two\nlines",
        "a b",
        "@at",
        "01",
        "12:30",
        "1e3",
        ".5",
    ]
    for name in texts:
        values = {"model": "/a b/c", "name": name, "lora": True, "optim.learning_rate": "3e-4", "batch.samples": "8"}
        text = ask(
            browser, "configform.js", "m.toYaml(given[0])", {**values, "algorithm": "dpo", "data.train": "dataset:x"}
        )
        read = yaml.safe_load(text)
        assert read["name"] == name, text
        assert (read["model"], read["algorithm"], read["lora"]) == ("/a b/c", "dpo", True)
        assert read["optim"] == {"learning_rate": 3e-4}
        assert read["data"] == {"train": "dataset:x"}
        assert read["batch"] == {"samples": 8}


@in_chromium
def test_each_part_of_an_error_finds_its_field(browser: Browser) -> None:
    message = (
        "the configuration: optim.epochs: Input should be greater than 0 (given: -1.0); the configuration:4: unknown "
        "key 'lora.size'; did you mean lora.rank?; the configuration: data.train is missing"
    )
    found = ask(browser, "configform.js", "m.readProblems(given[0])", message)
    assert [(part["key"], part["line"]) for part in found] == [
        ("optim.epochs", None),
        ("lora.rank", 4),
        ("data.train", None),
    ]
    assert ask(browser, "configform.js", "m.readProblems(given[0])", "there is no data set x")[0]["key"] is None
