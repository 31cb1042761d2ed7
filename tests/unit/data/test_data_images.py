"""Rows with images: the forms that people write, what becomes of them in tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, Idefics3Processor
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from vision_models import build_tokenizer, draw, write_processor

from lockstep.config import DataConfig, ModelConfig, RunConfig
from lockstep.data import CompiledData, compile_data
from lockstep.data.images import ChangedImage, read_image_bytes
from lockstep.data.inspect import RowSelection, inspect_data
from lockstep.data.sources.rows import DataError
from lockstep.model.vision import VisionProcessor, load_image_processor
from lockstep.reports.data import data_page
from lockstep.types import Tokenizer

ANSWER = {"role": "assistant", "content": "a cat"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2_vl", "idefics3"):
        write_processor(folder / family, family)
    return folder


def load(models: Path, family: str = "qwen2_vl") -> tuple[Tokenizer, VisionProcessor]:
    tokenizer: Any = build_tokenizer(family)
    folder = models / family
    processor = load_image_processor(ModelConfig(path=str(folder)), AutoConfig.from_pretrained(folder), tokenizer)
    assert processor is not None
    return tokenizer, processor


def compile_one(
    models: Path, tmp_path: Path, *rows: dict[str, Any], family: str = "qwen2_vl", **settings: Any
) -> CompiledData:
    tokenizer, processor = load(models, family)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(path), cache_dir=str(tmp_path / "cache"), **settings)
    return compile_data(config, tokenizer, seed=0, images=processor)


def png(seed: int = 0) -> bytes:
    stream = io.BytesIO()
    draw(seed).save(stream, format="PNG")
    return stream.getvalue()


def ask(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, ANSWER]}


def test_every_form_of_a_row_gives_the_same_tokens_and_the_same_image(models: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    turns = [{"role": "user", "content": "What?"}, ANSWER]
    rows = [
        ask({"type": "image", "path": "cat.png"}),
        ask({"type": "image", "url": "./cat.png"}),
        ask({"type": "image", "image": "cat.png"}),
        ask({"type": "image", "base64": encoded}),
        ask({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}),
        ask({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}),
        {**ask({"type": "image"}), "images": ["cat.png"]},
        {"messages": turns, "images": ["cat.png"]},
        {"messages": [{"role": "user", "content": "<image>\nWhat?"}, ANSWER], "images": [{"path": "cat.png"}]},
        {
            "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "a cat"}],
            "image": "cat.png",
        },
        {"prompt": "What?", "completion": "a cat", "images": ["cat.png"]},
    ]
    formats = {"messages": rows[:9], "sharegpt": rows[9:10], "prompt_completion": rows[10:]}
    found = []
    for name, part in formats.items():
        folder = tmp_path / name
        folder.mkdir()
        os.link(tmp_path / "cat.png", folder / "cat.png")
        found += list(compile_one(models, folder, *part).train)
    assert len(found) == len(rows)
    first = found[0]
    for datum in found:
        assert np.array_equal(datum.prompt, first.prompt)
        assert np.array_equal(datum.completions[0].tokens, first.completions[0].tokens)
        (image,) = datum.images
        assert image.digest == first.images[0].digest
        assert read_image_bytes(image, datum.origin) == png()


@pytest.mark.parametrize("sizes", [[(24, 16)], [(40, 24), (16, 16)]])
def test_tokens_are_those_of_the_models_own_processor(models: Path, tmp_path: Path, sizes: Any) -> None:
    images = [draw(i, *size) for i, size in enumerate(sizes)]
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    parts = [{"type": "image", "path": f"{i}.png"} for i in range(len(images))]
    (datum,) = compile_one(models, tmp_path, ask(*parts), family="idefics3").train
    tokenizer: Any = build_tokenizer("idefics3")
    images_processor = AutoImageProcessor.from_pretrained(models / "idefics3", backend="pil")
    processor = Idefics3Processor(images_processor, tokenizer, image_seq_len=4)
    turns = [{"role": "user", "content": [*({"type": "image"} for _ in images), {"type": "text", "text": "What?"}]}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    expected = processor(text=text, images=[images], return_tensors="np")
    assert list(datum.prompt) == expected["input_ids"][0].tolist()
    token = tokenizer.convert_tokens_to_ids("<image>")
    assert sum(image.num_tokens for image in datum.images) == list(datum.prompt).count(token)


def test_images_are_never_learned_not_even_in_answers_and_whole_texts(models: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    seen = {"type": "image", "path": "a.png"}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "this:"}, seen, {"type": "text", "text": "ok"}]}
    row = {"messages": [{"role": "user", "content": [seen, {"type": "text", "text": "?"}]}, answer]}
    for train_on in ("assistant", "all"):
        (datum,) = compile_one(models, tmp_path, row, train_on=train_on).train
        _, processor = load(models)
        completion = datum.completions[0]
        is_image = np.asarray(completion.tokens) == processor.token_id
        assert is_image.any()
        assert not np.asarray(completion.weights)[is_image].any()
        assert len(datum.images) == 2


def test_a_row_that_would_lose_a_part_of_an_image_is_left_out_and_counted(models: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    rows = [ask({"type": "image", "path": "a.png"}), {"messages": [{"role": "user", "content": "?"}, ANSWER]}]
    data = compile_one(models, tmp_path, *rows, max_length=24)
    assert [len(datum.images) for datum in data.train] == [0]
    assert data.report.totals.dropped == 1


def test_the_same_question_about_other_images_is_no_duplicate(models: Path, tmp_path: Path) -> None:
    for i in (0, 1):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    rows = [ask({"type": "image", "path": f"{i}.png"}) for i in (0, 1, 0)]
    assert compile_one(models, tmp_path, *rows).report.duplicates == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            ask({"type": "image", "path": "none.png"}),
            "train.jsonl:1: image 1: .*none.png does not exist: put the image",
        ),
        (
            ask({"type": "image", "path": "broken.png"}),
            "train.jsonl:1: image broken.png: not an image that can be read",
        ),
        (ask({"type": "image", "path": "cut.png"}), "image cut.png: not an image that can be read .*truncated"),
        (ask({"type": "image", "path": "../secret.png"}), "secret.png is outside of .*: set data.image_folder"),
        (ask({"type": "image", "path": "/etc/passwd"}), "/etc/passwd is outside of"),
        (
            ask({"type": "image", "url": "http://127.0.0.1:1/a.png"}),
            "images are not fetched: download it, or set data.im",
        ),
        (ask({"type": "image", "url": "file:///etc/passwd"}), "images are not fetched"),
        (ask({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}), "is not base64"),
        (ask({"type": "image", "base64": "%%%"}), "its image is not base64"),
        (ask({"type": "image"}), "more places for images than its column has images"),
        ({"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": ["ok.png"] * 2}, "have no place"),
        ({"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": None}, "its 'images' is empty: add"),
        (ask({"type": "image", "path": "ok.png"}, {"type": "text", "text": "<|image_pad|>"}), "2 times, for 1 images"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}, ANSWER]}, "image token of .* written out"),
        (ask({"type": "image", "path": "ok.png"}, {"type": "text", "text": "\uf8d2"}), "U\\+F8D2"),
        (ask({"type": "image", "path": "line.png"}), "line.png .*does not take it"),
        (ask({"type": "audio", "path": "a.wav"}), "only text and images are supported"),
        ({"chosen": "a", "rejected": "b", "prompt": "c", "images": ["ok.png"]}, "images are for sft"),
    ],
)
def test_what_cannot_be_used_names_the_row_and_what_to_do(
    models: Path, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (folder / "ok.png").write_bytes(png())
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "cut.png").write_bytes(png()[:-60])
    draw(0, 900, 2).save(folder / "line.png")
    with pytest.raises(DataError, match=words):
        compile_one(models, folder, row)


def test_bad_images_are_skipped_and_counted_where_asked(models: Path, tmp_path: Path) -> None:
    (tmp_path / "ok.png").write_bytes(png())
    rows = [ask({"type": "image", "path": name}) for name in ("gone.png", "ok.png")]
    data = compile_one(models, tmp_path, *rows, on_bad_row="skip")
    assert len(data.train) == 1
    assert data.report.totals.skipped == 1
    assert "gone.png" in Path(data.report.skipped_files[0]).read_text()


def test_images_are_in_another_folder_where_the_configuration_says_so(models: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png())
    (tmp_path / "rows").mkdir()
    row = ask({"type": "image", "path": "a.png"})
    (datum,) = compile_one(models, tmp_path / "rows", row, image_folder=str(tmp_path / "images")).train
    assert read_image_bytes(datum.images[0], datum.origin) == png()


def test_a_changed_image_is_compiled_again_and_changes_the_digest(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(0))
    row = ask({"type": "image", "path": "a.png"})
    before = compile_one(models, tmp_path, row)
    assert compile_one(models, tmp_path, row).digest == before.digest
    path.write_bytes(png(1))
    with pytest.raises(ChangedImage, match=r"train.jsonl:1: image .*a.png is not what it was"):
        read_image_bytes(before.train[0].images[0], before.train[0].origin)
    after = compile_one(models, tmp_path, row)
    assert after.digest != before.digest
    assert any("a.png has changed" in note for note in after.report.notes)
    assert read_image_bytes(after.train[0].images[0], "") == png(1)


def test_a_model_that_does_not_see_says_so(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ask({"type": "image", "path": "a.png"})))
    with pytest.raises(DataError, match="part 1 of its content is an image: images are learned from by sft, with a"):
        compile_data(
            DataConfig(train=str(path), cache_dir=str(tmp_path / "c")),
            build_tokenizer("qwen2_vl"),
            seed=0,  # type: ignore[arg-type]
        )


def test_a_column_of_images_stays_unused_without_a_model_that_sees(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "image": "a.png"}))
    config = DataConfig(train=str(path), cache_dir=str(tmp_path / "c"))
    data = compile_data(config, build_tokenizer("qwen2_vl"), seed=0)  # type: ignore[arg-type]
    assert not data.has_images
    assert "image" in data.report.files[0].ignored_keys


def test_lockstep_data_shows_the_image_beside_its_tokens(models: Path, tmp_path: Path) -> None:
    draw(0, 40, 24).save(tmp_path / "a.png")
    data = compile_one(models, tmp_path, ask({"type": "image", "path": "a.png"}))
    config = RunConfig(model=ModelConfig(path=str(models / "qwen2_vl")), data=DataConfig(train="train.jsonl"))
    sheet = inspect_data(config, data, load(models)[0], RowSelection(longest=1, shortest=0, random=0))
    (row,) = sheet.examples
    (image,) = row.images
    assert (image.name, image.width, image.height, image.num_tokens) == ("a.png", 40, 24, 15)
    assert [token.text for token in row.versions[0] if "image_pad" in token.text] == ["<|image_pad|> x 15 "]
    page = data_page(sheet)
    assert 'src="data:image/png;base64,' in page
    assert "a.png · 40 x 24 · 15 tokens" in page
    assert "base64" not in json.dumps(sheet.as_json())


@pytest.mark.parametrize("in_class", [True, False])
def test_image_processors_are_told_what_their_processor_tells_them(in_class: bool) -> None:
    """From transformers 5.23 on it is in the processor's class, before in that of its arguments."""
    told = {"crop_to_patches": True, "return_tensors": "pt"}
    arguments = SimpleNamespace(_defaults={} if in_class else {"images_kwargs": told})
    calls = list[dict[str, Any]]()

    class Images:
        def to_dict(self) -> dict[str, Any]:
            return {}

        def __call__(self, images: Any, **options: Any) -> dict[str, Any]:
            calls.append(options)
            return {}

    processor = SimpleNamespace(
        image_token="<image>",
        image_processor=Images(),
        valid_processor_kwargs=arguments,
        replace_image_token=lambda made, image_idx: "<image>",
        tokenizer=lambda text, add_special_tokens: {"input_ids": [7]},
        **({"images_kwargs": told} if in_class else {}),
    )
    VisionProcessor(processor, 7).prepare(SimpleNamespace(size=(1, 1)))
    assert calls == [{"crop_to_patches": True, "return_tensors": None}]
