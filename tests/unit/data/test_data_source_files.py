"""Finding files: one, a folder, a glob, a saved data set, the Hub, packed ones; and what is said if there are none."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import ssl
import sys
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from data_files import refusal, write

from lockstep.config.data import SourceConfig
from lockstep.data.sources import files as hub
from lockstep.data.sources.files import digest_file, find_files, parse_raw, read_raw
from lockstep.data.sources.rows import DataError, Row


def found(path: Path | str, folder: Path, **settings: Any) -> list[str]:
    """The files of a source by their path in the folder, each with its kind."""
    files = find_files(SourceConfig(path=str(path), **settings))
    assert all(file.name == str(file.path) for file in files)
    return [f"{file.path.relative_to(folder)} {file.kind}" for file in files]


def complaint(path: Path | str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        find_files(SourceConfig(path=str(path), **settings))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}")
    return message.removeprefix(str(path))


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, '{"a": 1}\n')
    return folder


def test_a_folder_is_read_to_the_bottom_in_order(tmp_path: Path) -> None:
    fill(tmp_path, "b.jsonl", "a/z.csv", "a/b/c.parquet", "a.JSON", "d.tsv.gz", "e.arrow")
    fill(
        tmp_path, "README.md", ".hidden.jsonl", ".git/x.jsonl", "a/.cache/y.jsonl", "c.parquet.gz", "dataset_info.json"
    )
    write(tmp_path / "array.json", " [{}]")
    assert found(tmp_path, tmp_path) == [
        "a/b/c.parquet parquet",
        "a/z.csv csv",
        "a.JSON jsonl",
        "array.json json",
        "b.jsonl jsonl",
        "d.tsv.gz csv",
        "e.arrow arrow",
    ]


def test_a_folder_linked_into_itself_is_read_once(tmp_path: Path) -> None:
    fill(tmp_path, "rows/a.jsonl")
    (tmp_path / "rows" / "again").symlink_to(tmp_path)
    (tmp_path / "rows" / "b.jsonl").symlink_to(tmp_path / "rows" / "a.jsonl")
    assert found(tmp_path, tmp_path) == ["rows/a.jsonl jsonl"]


def test_a_linked_folder_is_followed(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", "a.jsonl")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "link").symlink_to(tmp_path / "elsewhere")
    assert found(tmp_path / "rows", tmp_path) == ["rows/link/a.jsonl jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[b-z]*", ["b.jsonl", "more/a.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "more/a.jsonl"]),
        ("**/a.jsonl", ["a.jsonl", "more/a.jsonl"]),
    ],
)
def test_a_glob_gives_each_file_once_in_order(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    fill(tmp_path, "b.jsonl", "a.jsonl", "more/a.jsonl", "more/notes.txt", "z.md")
    assert found(tmp_path / pattern, tmp_path) == [f"{name} jsonl" for name in expected]


def test_a_name_with_the_signs_of_a_glob_may_be_a_file(tmp_path: Path) -> None:
    fill(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert found(tmp_path / "a[1].jsonl", tmp_path) == ["a[1].jsonl jsonl"]


def test_the_home_folder_has_a_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(fill(tmp_path, "a.jsonl")))
    assert found("~/a.jsonl", tmp_path) == ["a.jsonl jsonl"]


def test_nothing_to_read(tmp_path: Path) -> None:
    fill(tmp_path, "notes.txt", "a.parquet.gz", "packed/a.jsonl.zst", "other/README.md", ".x.jsonl")
    (tmp_path / "empty").mkdir()
    check = "check data.train, data.validation and data.test"
    assert complaint(tmp_path / "none.jsonl") == f": no such file: {check}"
    assert complaint(tmp_path / "none") == f": no such file: {check}"
    assert complaint(tmp_path / "none*.jsonl") == f": no file matches: {check}"
    assert complaint(tmp_path / "notes.txt").startswith(": unknown kind of file: use .jsonl, .json, .csv,")
    assert complaint(tmp_path / "a.parquet.gz").startswith(": unknown kind of file")
    assert complaint(tmp_path / "packed" / "a.jsonl.zst").startswith(": unknown kind of file")
    assert complaint(tmp_path / "packed").startswith("/a.jsonl.zst: unknown kind of file: unpack it")
    assert complaint(tmp_path / "other").endswith(", only README.md")
    assert complaint(tmp_path / "empty") == f": this folder is empty: {check}"
    assert complaint(tmp_path / "o*").endswith(", only other")


# --- saved by the datasets library ----------------------------------------------------------------------------------


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with its cache in the test's folder and no way to the Hub."""
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    return library


def test_a_saved_data_set_is_its_data_files_alone(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_list([{"a": 1}, {"a": 2}, {"a": 3}]).save_to_disk(tmp_path / "saved", num_shards=2)
    write(tmp_path / "saved" / "cache-1234.arrow", b"left over from a computation")
    files = find_files(SourceConfig(path=str(tmp_path / "saved")))
    assert [file.path.name for file in files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [parse_raw(file, raw).fields for file in files for raw in read_raw(file)] == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_one_split_of_saved_splits_is_read(tmp_path: Path, datasets: Any) -> None:
    rows = datasets.Dataset.from_list([{"a": 1}])
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    assert found(tmp_path / "saved", tmp_path) == ["saved/train/data-00000-of-00001.arrow arrow"]
    assert found(tmp_path / "saved", tmp_path, split="test") == ["saved/test/data-00000-of-00001.arrow arrow"]
    message = complaint(tmp_path / "saved", split="dev")
    assert message == ": has no split 'dev': set split to one of test, train"


@pytest.mark.parametrize("name", ["../outside.arrow", "/etc/outside.arrow", "inner/outside.arrow", ".."])
def test_a_saved_data_set_does_not_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "saved").mkdir()
    write(tmp_path / "saved" / "dataset_info.json", b"{}")
    write(tmp_path / "saved" / "state.json", json.dumps({"_data_files": [{"filename": name}]}).encode())
    assert f"names {name!r}, which is not in its folder" in complaint(tmp_path / "saved")


@pytest.mark.parametrize("split", ["..", ".", "../outside", "/etc", "train/../../outside"])
def test_a_split_is_a_folder_of_its_data_set(tmp_path: Path, split: str) -> None:
    for folder in ("saved/train", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "saved" / "dataset_dict.json", b"{}")
    write(tmp_path / "saved" / "train" / "rows.jsonl", b"{}")
    write(tmp_path / "outside" / "rows.jsonl", b"{}")
    assert "has no split" in complaint(tmp_path / "saved", split=split)


# --- the Hub --------------------------------------------------------------------------------------------------------


def give_as_hub_data(datasets: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """Loading any name from the Hub gives this folder; the list fills with what the loader was asked."""
    load, asked = datasets.load_dataset, []

    def load_folder(path: str, **settings: Any) -> Any:
        asked.append({"path": path, **settings})
        return load(str(folder), split=settings["split"])

    monkeypatch.setattr(datasets, "load_dataset", load_folder)
    monkeypatch.setattr(hub, "is_hub_up", lambda url: True)
    return asked


def test_hub_data_is_read_from_the_library_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    fill(tmp_path / "data", "train.jsonl")
    write(tmp_path / "data" / "train.jsonl", '{"a": 1, "b": {"c": 2}}\n{"a": null, "b": {"d": 3}}\n')
    write(tmp_path / "data" / "test.jsonl", '{"a": 9}\n')
    asked = give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    (file,) = find_files(SourceConfig(path="owner/data", subset="big", revision="v1"))
    assert asked == [{"path": "owner/data", "name": "big", "split": "train", "revision": "v1", "keep_in_memory": False}]
    assert [parse_raw(file, raw) for raw in read_raw(file)] == [
        Row("owner/data/big[train]:row 1", {"a": 1, "b": {"c": 2}}),
        Row("owner/data/big[train]:row 2", {"b": {"d": 3}}),
    ]


@pytest.mark.parametrize("name", ["{secret}/rows.jsonl", "file://{secret}/rows.jsonl", "../secret/rows.jsonl"])
def test_a_data_set_of_the_hub_reads_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any, name: str
) -> None:
    """Its card says which files it has, and the library would take any path or address there."""
    fill(tmp_path / "data", "train.jsonl")
    fill(tmp_path / "secret", "rows.jsonl")
    give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    card = "---\nconfigs:\n- config_name: default\n  data_files: {name}\n---\n"
    write(tmp_path / "data" / "README.md", card.format(name="train.jsonl").encode())
    (file,) = find_files(SourceConfig(path="owner/data"))
    assert len(list(read_raw(file))) == 1
    write(tmp_path / "data" / "README.md", card.format(name=name.format(secret=tmp_path / "secret")).encode())
    assert "which is not a file of the data set" in complaint("owner/data")


def test_a_data_set_of_the_hub_calls_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    fill(tmp_path / "data", "train.jsonl")
    give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/rows.jsonl"
        card = f"---\nconfigs:\n- config_name: default\n  data_files: {address}\n---\n"
        write(tmp_path / "data" / "README.md", card.encode())
        assert "which is not a file of the data set" in complaint("owner/data")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_joined_splits_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    fill(tmp_path / "data", "train.jsonl", "test.jsonl")
    give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    files = find_files(SourceConfig(path="owner/data", split="train+test"))
    assert [file.name for file in files] == ["owner/data[train+test] file 1", "owner/data[train+test] file 2"]


def test_a_part_of_a_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    fill(tmp_path / "data", "train.jsonl")
    write(tmp_path / "data" / "train.jsonl", '{"a": 1}\n{"a": 2}\n')
    give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    assert "'train[:1]' is a part of a split" in complaint("owner/data", split="train[:1]")
    # The library's files are whole even where the data set is not: nothing but the count shows it.
    data = datasets.load_dataset("owner/data", split="train[:1]")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **settings: data)
    assert "its files hold 2 rows, the split 1" in complaint("owner/data")


def test_a_split_that_the_hub_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    fill(tmp_path / "data", "train.jsonl")
    give_as_hub_data(datasets, monkeypatch, tmp_path / "data")
    message = complaint("owner/data", split="dev")
    assert message.startswith(": the Hub's data set cannot be loaded (Unknown split")
    assert message.endswith("): check its split, subset and revision")


def test_a_name_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    def refuse(path: str, **settings: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("no such thing")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(hub, "is_hub_up", lambda url: True)
    assert complaint("owner/data").startswith(
        ": no such file or folder, and the Hugging Face Hub has no such data set, or not for you"
    )


@pytest.mark.parametrize("name", ["nobody/nothing", "rows"])
def test_without_a_way_to_the_hub(name: str, datasets: Any) -> None:
    assert complaint(name).startswith(": no such file or folder, and the Hugging Face Hub could not be reached")
    assert datasets.config.HF_HUB_OFFLINE is False


def test_without_a_way_to_the_hub_the_copy_on_this_machine_is_read(tmp_path: Path, datasets: Any) -> None:
    datasets.load_dataset(str(fill(tmp_path / "data", "train.jsonl")))
    (tmp_path / "cache" / "data").rename(tmp_path / "cache" / "owner___data")
    (file,) = find_files(SourceConfig(path="owner/data"))
    assert [parse_raw(file, raw) for raw in read_raw(file)] == [Row("owner/data[train]:row 1", {"a": 1})]
    commit = file.path.parent.name
    assert find_files(SourceConfig(path="owner/data", revision=commit)) == [file]
    assert "is not known to be revision v2" in complaint("owner/data", revision="v2")
    assert "(Unknown split" in complaint("owner/data", split="dev")


@pytest.mark.parametrize(
    ("outcome", "answers"),
    [
        (urllib.error.HTTPError("", 404, "not found", Message(), None), True),
        (urllib.error.HTTPError("", 503, "no gateway", Message(), None), False),
        (urllib.error.URLError(ssl.SSLCertVerificationError("unknown")), True),
        (urllib.error.URLError(socket.gaierror("no such name")), False),
        (TimeoutError("slow"), False),
    ],
)
def test_what_counts_as_an_answer(monkeypatch: pytest.MonkeyPatch, outcome: Exception, answers: bool) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise outcome

    monkeypatch.setattr("urllib.request.urlopen", fail)
    assert hub.is_hub_up("https://hub.example") is answers


def test_a_path_that_cannot_be_a_name_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert complaint("my/data/rows").startswith(": no such file or folder: check data.train")


@pytest.mark.parametrize("module", ["datasets", "pyarrow"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    table = fill(tmp_path, "a.parquet") / "a.parquet"
    message = complaint("owner/data") if module == "datasets" else refusal(table)
    assert message.endswith("pip install 'lockstep[data]'")


# --- packed files, bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
@pytest.mark.parametrize("damage", ["cut", "other", "checksum"])
def test_a_damaged_gzip_file(tmp_path: Path, name: str, damage: str) -> None:
    whole = gzip.compress("".join(f'{{"a": {number**3}}}\n' for number in range(5000)).encode())
    content = {
        "cut": whole[: len(whole) // 2],
        "other": b'{"a": 1}\n',
        "checksum": whole[:-8] + b"\0" * 8,
    }[damage]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert message.startswith(": not a whole gzip file (")
    assert message.endswith("): copy or pack it again")


def test_a_file_that_went_away(tmp_path: Path) -> None:
    (file,) = find_files(SourceConfig(path=str(write(tmp_path / "a.jsonl", "{}\n"))))
    file.path.unlink()
    for use in (digest_file, lambda file: list(read_raw(file))):
        with pytest.raises(DataError, match=r"a\.jsonl: no such file: check data\.train"):
            use(file)


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    (file,) = find_files(SourceConfig(path=str(write(tmp_path / "a.jsonl.gz", '{"a": 1}\n'))))
    assert digest_file(file) == hashlib.sha256(file.path.read_bytes()).hexdigest()
