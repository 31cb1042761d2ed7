"""The configuration: what is read, which value wins, and the sentence a user gets for each mistake."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from lockstep.config import (
    ConfigError,
    Degrees,
    LocalLaunch,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    known_keys,
    load_config,
    parse_config,
    validate_config,
)
from lockstep.config.algorithm import KINDS
from lockstep.config.launch import FORMS, LAUNCH_KINDS

DOCS = Path(__file__).resolve().parents[3] / "docs"
MINIMAL = "model: org/model\ndata: {train: train.jsonl}\n"


def parse(text: str = MINIMAL, *overrides: str, **options: Any) -> RunConfig:
    return parse_config(text, source="run.yaml", overrides=overrides, **options)


def paths(sources: Sequence[SourceConfig]) -> list[str]:
    return [source.path for source in sources]


def explain(text: str = MINIMAL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return str(caught.value)


# --- reading --------------------------------------------------------------------------------------------------------


def test_two_keys_are_enough_and_the_rest_has_defaults():
    config = parse()
    assert config.model.path == "org/model"
    assert config.lora is None
    assert config.algorithm.kind == "sft"
    assert config.batch.samples_per_step == 16
    assert config.parallel.degrees(1) == Degrees()


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        parse().seed = 1  # type: ignore[misc]


def test_the_learning_rate_follows_what_is_trained():
    assert parse().learning_rate == 2e-5
    assert parse(MINIMAL, "lora=true").learning_rate == 2e-4
    assert parse(MINIMAL, "lora=true", "optim.learning_rate=1e-3").learning_rate == 1e-3


@pytest.mark.parametrize("spelling", ["1e-4", "1.0e-4", "0.0001"])
def test_a_learning_rate_may_be_written_as_people_write_it(spelling):
    assert parse(f"{MINIMAL}optim: {{learning_rate: {spelling}}}\n").learning_rate == 1e-4
    assert parse(MINIMAL, f"optim.learning_rate={spelling}").learning_rate == 1e-4


def test_rows_in_a_step_are_given_by_samples_or_tokens():
    assert parse(MINIMAL, "batch.samples=3").batch.samples_per_step == 3
    assert parse(MINIMAL, "batch.tokens=5000").batch.samples_per_step is None


def test_short_forms():
    assert parse("model: a/b\ndata: {train: x}\nlora: true\n").lora is not None
    assert parse("model: {path: a/b}\ndata: {train: x}\nlora: {rank: 4}\n").lora.rank == 4  # type: ignore[union-attr]
    assert parse("model: a/b\ndata: {train: x}\nlora: false\n").lora is None
    assert parse(MINIMAL, "lora=true").lora is not None
    assert parse(f"{MINIMAL}lora: {{rank: 4}}\n", "lora=false").lora is None
    assert parse(f"{MINIMAL}lora: {{rank: 4}}\n", "lora=null").lora is None


def test_one_file_or_several():
    assert len(parse("model: a/b\ndata: {train: x.jsonl}\n").data.train) == 1
    assert len(parse("model: a/b\ndata: {train: [x.jsonl, y.jsonl]}\n").data.train) == 2
    assert len(parse(MINIMAL, "data.train=[x.jsonl, y.jsonl]").data.train) == 2


def test_a_source_takes_from_the_data_section_what_it_leaves_out():
    config = parse(
        "model: a/b\n"
        "data:\n"
        "  train: [x.jsonl, {path: y.csv, weight: 0.5, format: alpaca, columns: {output: reply}}]\n"
        "  validation: {path: v.jsonl}\n"
        "  format: text\n"
        "  roles: {bot: assistant}\n"
    )
    first, second = config.data.sources("train")
    assert (first.format, first.columns, first.roles, first.weight) == ("text", {}, {"bot": "assistant"}, 1.0)
    assert (second.format, second.columns, second.roles) == ("alpaca", {"output": "reply"}, {"bot": "assistant"})
    assert second.weight == 0.5
    assert paths(config.data.sources("validation")) == [config.data.validation[0].path]
    assert config.data.sources("test") == ()


# --- which value wins -----------------------------------------------------------------------------------------------


def test_defaults_lose_to_the_file_and_the_file_to_overrides():
    text = MINIMAL + "seed: 1\noptim: {epochs: 2, beta1: 0.8}\n"
    assert (parse().seed, parse(text).seed, parse(text, "seed=2").seed) == (0, 1, 2)
    config = parse(text, "optim.epochs=5")
    assert (config.optim.epochs, config.optim.beta1, config.optim.beta2) == (5, 0.8, 0.999)


def test_the_last_override_of_a_key_wins():
    assert parse(MINIMAL, "seed=1", "seed=2").seed == 2


def test_an_override_of_the_model_keeps_the_other_model_settings():
    config = parse("model: {path: a/b, precision: fp64}\ndata: {train: x}\n", "model=c/d")
    assert (config.model.path, config.model.precision) == ("c/d", "fp64")


def test_an_override_may_give_a_whole_section():
    config = parse(MINIMAL, "optim={epochs: 3, schedule: linear}", "optim.beta1=0.5")
    assert (config.optim.epochs, config.optim.schedule, config.optim.beta1) == (3, "linear", 0.5)


# --- paths ----------------------------------------------------------------------------------------------------------


def test_paths_in_the_file_are_relative_to_the_file_and_those_in_overrides_to_here(tmp_path, monkeypatch):
    folder, here = tmp_path / "configs", tmp_path / "here"
    (folder / "model").mkdir(parents=True)
    here.mkdir()
    (folder / "run.yaml").write_text(
        "model: model\ndata: {train: a.jsonl, validation: [../b.jsonl], chat_template: chat.jinja}\n"
    )
    monkeypatch.chdir(here)
    config = load_config(folder / "run.yaml")
    assert config.model.path == str(folder / "model")
    assert paths(config.data.train) == [str(folder / "a.jsonl")]
    assert paths(config.data.validation) == [str(tmp_path / "b.jsonl")]
    assert config.data.chat_template == str(folder / "chat.jinja")
    changed = load_config(folder / "run.yaml", ["data.train=c.jsonl", "model=./m", "data.chat_template=none"])
    assert paths(changed.data.train) == [str(here / "c.jsonl")]
    assert changed.model.path == str(here / "m")
    assert changed.data.chat_template == "none"
    assert changed.data.validation == config.data.validation


def test_a_source_that_is_no_path_is_a_hub_data_set(tmp_path):
    (tmp_path / "rows").mkdir()
    names = ["a.jsonl", "rows", "b*", "./c", "d.csv.gz", "owner/name", "name"]
    config = parse(f"model: a/b\ndata: {{train: {names}, test: {{path: rows}}}}\n", directory=tmp_path)
    local = [str(tmp_path / name) for name in ("a.jsonl", "rows", "b*", "c", "d.csv.gz")]
    assert paths(config.data.train) == [*local, "owner/name", "name"]
    assert paths(config.data.test) == [str(tmp_path / "rows")]


def test_a_model_that_is_not_on_disk_is_a_hub_id_unless_it_is_written_as_a_path(tmp_path):
    def path_of(name: str) -> str:
        return parse(f"model: {name}\ndata: {{train: x}}\n", directory=tmp_path).model.path

    assert path_of("org/model") == "org/model"
    assert path_of("./org/model") == str(tmp_path / "org/model")
    assert path_of("weights.gguf") == str(tmp_path / "weights.gguf")
    assert path_of("~/model") == str(Path.home() / "model")
    (tmp_path / "org/model").mkdir(parents=True)
    assert path_of("org/model") == str(tmp_path / "org/model")


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("optim: {learning_rte: 1}", "run.yaml:3: unknown key 'optim.learning_rte'; did you mean optim.learning_rate?"),
        ("optm: {epochs: 1}", "run.yaml:3: unknown key 'optm'; did you mean optim?"),
        ("learning_rate: 1", "run.yaml:3: unknown key 'learning_rate'; did you mean optim.learning_rate?"),
        (
            "lora: {zzz: 1}",
            "run.yaml:3: unknown key 'lora.zzz'; lora knows rank, alpha, dropout, targets, dora, rslora, init, "
            "b_learning_rate_ratio, modules_to_save",
        ),
    ],
)
def test_an_unknown_key_names_its_line_and_the_nearest_key(line, message):
    assert explain(f"{MINIMAL}{line}\n") == message


def test_an_unknown_key_deep_in_the_file_names_its_own_line():
    assert explain(MINIMAL + "optim:\n  epochs: 1\n  bta1: 0.9\n").startswith("run.yaml:5: unknown key 'optim.bta1'")


def test_an_unknown_key_in_an_override_names_the_override():
    assert explain(MINIMAL, "optim.epoch=1") == (
        "override 'optim.epoch=1': unknown key 'optim.epoch'; did you mean optim.epochs?"
    )


def test_a_wrong_type_names_the_line_and_what_was_given():
    message = explain(MINIMAL + "optim:\n  epochs: soon\n")
    assert message.startswith("run.yaml:4: optim.epochs: ")
    assert "number" in message
    assert "'soon'" in message


def test_a_union_is_one_sentence():
    message = explain(MINIMAL + "optim: {learning_rate: fast}\n")
    assert message.count("run.yaml:3") == 1
    assert ", or: " in message
    assert message.count("'fast'") == 1


def test_a_bad_override_wins_the_blame_over_the_line_in_the_file():
    assert explain(MINIMAL + "seed: 1\n", "seed=-1").startswith("override 'seed=-1': seed: ")


def test_every_problem_is_named_at_once():
    message = explain(MINIMAL + "seed: -1\noptim: {epochs: 0}\n")
    assert "run.yaml:3: seed" in message
    assert "run.yaml:4: optim.epochs" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml is empty: it needs at least model and data.train"),
        ("- a\n", "run.yaml: expected sections (model:, data:, ...), found list"),
        ("model: a/b\n", "run.yaml: data is missing"),
        ("model: a/b\ndata: {shuffle: true}\n", "run.yaml:2: data.train is missing"),
        ("model: {revision: x}\ndata: {train: x}\n", "run.yaml:1: model.path is missing"),
    ],
)
def test_what_is_missing_is_said(text, message):
    assert explain(text) == message


def test_broken_yaml_names_the_line():
    assert explain("model: a/b\ndata: {train: x\n").startswith("run.yaml:3: not valid YAML: ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed' is not of the form key.path=value"),
        ("=1", "override '=1' is not of the form key.path=value"),
        ("seed=[1", "override 'seed=[1': the value is not valid YAML"),
    ],
)
def test_an_override_that_is_none_is_explained(override, message):
    assert explain(MINIMAL, override) == message


def test_an_override_below_a_plain_value_is_explained():
    assert "seed was already given a plain value" in explain(MINIMAL, "seed=1", "seed.x=2")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.samples=1", "batch.tokens=9000"], "give either samples or tokens, not both"),
        (["data.max_length=5000"], "data.max_length 5000 does not fit into batch.micro_batch_tokens 4096"),
        (
            ["data.max_length=9000", "parallel.context=2"],
            "data.max_length 9000 does not fit into batch.micro_batch_tokens 4096",
        ),
        (["batch.tokens=1000"], "data.max_length 2048 does not fit into batch.micro_batch_tokens 4096 / batch.tokens"),
        (["data.validation=v.jsonl", "data.validation_fraction=0.1"], "give either validation files or"),
        (["data.train=[]"], "train names no file"),
        (["data.test=v.jsonl", "data.test_fraction=0.1"], "give either test files or"),
        (["data.validation_fraction=0.5", "data.test_fraction=0.5"], "leave nothing to train on"),
        (["data.input_template='{a}'"], "input_template and output_template go together"),
        (["data.train={path: x, output_template: y}"], "input_template and output_template go together"),
        (["data.train={path: x, wieght: 2}"], "unknown key 'data.train.wieght'; did you mean data.train.weight?"),
        (["data.train=[{path: x, weight: 0}]"], "data.train: Input should be greater than 0 (given: 0)"),
        (["checkpoint.export=merged"], "checkpoint.export merged needs a lora section"),
        (["evaluation.patience=2"], "evaluation.patience needs validation data"),
        (["evaluation.metrics=[rouge]"], "evaluation.metrics needs validation data"),
        (["parallel.replicate=auto"], "replicate and shard cannot both be auto"),
    ],
)
def test_settings_that_contradict_each_other(overrides, message):
    assert message in explain(MINIMAL, *overrides)


def test_a_mapping_is_validated_like_a_file():
    assert paths(validate_config({"model": {"path": "a/b"}, "data": {"train": "x"}}).data.train) == ["x"]
    with pytest.raises(ConfigError, match="unknown key 'sed'; did you mean seed"):
        validate_config({"model": {"path": "a/b"}, "data": {"train": "x"}, "sed": 1})


# --- degrees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicate", "shard", "num_ranks", "expected"),
    [
        (1, "auto", 1, (1, 1)),
        (1, "auto", 8, (1, 8)),
        (2, "auto", 8, (2, 4)),
        ("auto", 4, 8, (2, 4)),
        (8, 1, 8, (8, 1)),
        ("auto", 1, 1, (1, 1)),
    ],
)
def test_degrees_fill_the_ranks(replicate, shard, num_ranks, expected):
    assert ParallelConfig(replicate=replicate, shard=shard).degrees(num_ranks)[:2] == expected


@pytest.mark.parametrize(
    ("replicate", "shard", "num_ranks", "product"),
    [(2, 2, 2, "replicate 2 x shard 2 = 4"), (3, "auto", 8, "replicate 3 x shard 2 = 6"), (1, 4, 2, "1 x shard 4 = 4")],
)
def test_degrees_that_do_not_multiply_to_the_ranks_show_the_arithmetic(replicate, shard, num_ranks, product):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(replicate=replicate, shard=shard).degrees(num_ranks)
    assert f"{product} ranks, but the run has {num_ranks}" in str(caught.value)
    assert "launch.procs" in str(caught.value)


# --- writing --------------------------------------------------------------------------------------------------------


def test_the_resolved_file_reads_back_as_the_same_configuration(tmp_path):
    text = MINIMAL + "name: Größe\nlora: {rank: 4, targets: [q_proj]}\noptim: {learning_rate: 3.0e-7, eps: 1.0e-12}\n"
    config = parse(text, directory=tmp_path)
    again = parse_config(config.to_yaml(), directory=tmp_path / "elsewhere")
    assert again == config
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("kind", KINDS)
def test_the_resolved_file_writes_every_key_out(kind):
    needed = ["algorithm.reward=numeric"] if kind == "grpo" else []
    tree = yaml.safe_load(parse(MINIMAL, "lora=true", f"algorithm.kind={kind}", *needed).to_yaml())
    others = {f"algorithm.{key}" for known in KINDS.values() for key in known.model_fields}
    others -= {f"algorithm.{key}" for key in KINDS[kind].model_fields}
    others |= {f"launch.{key}" for known in LAUNCH_KINDS.values() for key in known.model_fields}
    others -= {f"launch.{key}" for key in LocalLaunch.model_fields}
    for key in known_keys():
        node, parts = tree, key.split(".")
        if ".".join(parts[:2]) in others:
            continue
        for part in parts:
            assert part in node, f"{key} is not in the resolved configuration"
            node = node[part]


# --- documentation --------------------------------------------------------------------------------------------------


def load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_written_reference_is_that_of_the_classes():
    expected = load_reference().configuration_reference()
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == expected, "run: make docs"


def test_the_reference_names_every_key():
    text = load_reference().configuration_reference()
    sections = {key.rsplit(".", 1)[0] for key in known_keys() if "." in key}
    for key in set(known_keys()) - sections:
        assert f"| `{key}` |" in text, f"{key} is not in the reference"


def test_a_launch_has_the_keys_of_its_kind_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"launch.address.*it is a setting of kind ray, and this is local: set launch"
    ):
        parse_config(MINIMAL + "launch: {address: auto}\n")
    with pytest.raises(ConfigError, match=r"unknown launch.kind 'rya'; choose one of local, ray"):
        parse_config(MINIMAL + "launch: {kind: rya}\n")


def test_an_override_of_the_kind_leaves_what_the_file_says_for_its_own_behind() -> None:
    text = MINIMAL + "launch: {kind: ray, address: auto, procs: 2}\n"
    config = parse_config(text, overrides=["launch.kind=local"])
    assert config.launch == LocalLaunch(procs=2)
    with pytest.raises(ConfigError, match=r"override 'launch.address=x'.*it is a setting of kind ray"):
        parse_config(text, overrides=["launch.kind=local", "launch.address=x"])


def test_a_launch_section_as_version_0_1_wrote_it_is_read() -> None:
    """Of a local run, with the defaults of ray written out."""
    old = (
        "launch: {kind: local, procs: 2, address: null, placement_timeout_s: 120.0, heartbeat_s: 30.0, min_procs: null}"
    )
    assert parse_config(MINIMAL + old).launch == LocalLaunch(procs=2)


def patterns_of(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(patterns_of, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own.union(*map(patterns_of, schema.values()))


def test_no_regular_expression_is_shown_to_a_person() -> None:
    patterns = patterns_of(RunConfig.model_json_schema())
    assert patterns
    assert patterns <= FORMS.keys()
