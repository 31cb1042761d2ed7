"""Files as people have them: all compile, with their format recognised and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from lockstep.config import DataConfig
from lockstep.data import compile_data

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data"
TEMPLATE = Path(__file__).with_name("templates") / "qwen3.jinja"
FILES = {
    "alpaca_en_demo.json": ("alpaca", "answers", 999),
    "dpo_en_demo.json": ("preference", "pairs", 300),
    "glaive_toolcall_en_demo.json": ("sharegpt", "answers", 300),
    "gsm8k_test.jsonl": ("prompt_completion", "answers", 1319),
    "gsm8k_train.jsonl": ("prompt_completion", "answers", 7473),
    "kto_en_demo.json": ("unpaired", "labelled", 300),
}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the files are not beside the checkout")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gsm8k_train.jsonl" else name for name in FILES]
)
def test_a_public_file_compiles(name: str) -> None:
    tokenizer = tiny.build_tokenizer(TEMPLATE.read_text())
    data = compile_data(DataConfig(train=str(FOLDER / name), max_length=1 << 16), tokenizer, seed=0)
    (report,) = data.report.files
    assert (report.format, data.kind, len(data.train)) == FILES[name]
    assert (report.skipped, report.dropped, report.answers_cut, report.prompts_cut) == (0, 0, 0, 0)
    assert report.num_unclosed == 0
    for datum in data.train[:: len(data.train) // 50]:
        for completion in datum.completions:
            learned = [t for t, w in zip(completion.tokens, completion.weights) if w]
            text = tokenizer.decode(learned)
            assert text.endswith("<|im_end|>"), text[-40:]
            assert "<|im_start|>" not in text
