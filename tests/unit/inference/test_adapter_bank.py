"""Adapters of rows: every mixture of them in one batch gives what each gives alone, in float64 to 1e-10."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tiny import build_model, build_tokenizer

from lockstep.config import ConfigError, LoraConfig
from lockstep.inference.continuous_engine import ContinuousEngine
from lockstep.inference.decoder import Decoder
from lockstep.inference.engine import LocalEngine
from lockstep.inference.sequence import SequenceOptions
from lockstep.model.adapters import LoraAdapter, load_adapter
from lockstep.model.lora import add_lora
from lockstep.types import SamplingParams, TextCompletion

PROMPTS = [[10, 20, 30, 40, 50], [11], [10, 20, 30, 40, 50], [9, 8, 7, 6, 5, 4, 3]]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, num_samples=2, logprobs=True)
ADAPTERS: dict[str, dict[str, Any]] = {
    "few": {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]},
    "all": {"r": 5, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    "uneven": {"r": 3, "rank_pattern": {"k_proj": 1}, "alpha_pattern": {"layers.1.*v_proj": 9},
               "target_modules": ["k_proj", "v_proj"]},
}  # fmt: skip


def base() -> Any:
    return build_model().double().eval()


def with_adapter(name: str) -> Any:
    """PEFT's own, with random weights."""
    model = peft.get_peft_model(base(), peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name]))
    generator = torch.Generator().manual_seed(sorted(ADAPTERS).index(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(0.3))
    return model.double().eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for name in ADAPTERS:
        with_adapter(name).save_pretrained(root / name)
    return {name: root / name for name in ADAPTERS}


def make_engine(folders: dict[str, Path], batch_size: int) -> ContinuousEngine:
    local = LocalEngine(base(), build_tokenizer(), batch_size)
    bank = local.hold_adapters()
    for name, folder in folders.items():
        bank.add(name, load_adapter(folder))
    return ContinuousEngine(local)


def sample(model: Any, prompt: list[int]) -> list[TextCompletion]:
    (answers,) = LocalEngine(model, build_tokenizer(), 4).sample([prompt], PARAMS)
    return answers


def assert_alike(found: list[TextCompletion], expected: list[TextCompletion]) -> None:
    for answer, other in zip(found, expected, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-10, rel=0)


def finish(engine: ContinuousEngine) -> None:
    while engine.has_work:
        engine.advance()


@pytest.mark.parametrize("batch_size", [3, 16, 80], ids=["plain, in turns", "fused", "plain"])
def test_rows_with_their_own_adapters_are_as_each_alone(folders: dict[str, Path], batch_size: int) -> None:
    engine = make_engine(folders, batch_size)
    engine.slice_s = 0.0
    calls = []
    for number, name in enumerate([None, "few", "all", "uneven"] * 2):
        calls.append((name, prompt := PROMPTS[number % 4], engine.submit([prompt], PARAMS, options=options(name))))
        if number % 3 == 2:
            engine.advance()  # the others join while these are decoded
    finish(engine)
    for name, prompt, call in calls:
        assert_alike(call.completions()[0], sample(base() if name is None else with_adapter(name), prompt))


def options(name: str | None) -> SequenceOptions:
    return SequenceOptions(adapter=name)


def test_equal_prompts_of_two_adapters_share_no_cache(folders: dict[str, Path]) -> None:
    engine = make_engine(folders, 8)
    calls = [engine.submit([PROMPTS[0]], PARAMS, options=options(name)) for name in ("few", "all", None)]
    finish(engine)
    few, every, none = (call.completions()[0] for call in calls)
    assert_alike(few, sample(with_adapter("few"), PROMPTS[0]))
    assert_alike(every, sample(with_adapter("all"), PROMPTS[0]))
    assert_alike(none, sample(base(), PROMPTS[0]))


def test_a_pass_of_other_tokens_is_refused_and_the_model_is_given_back(folders: dict[str, Path]) -> None:
    model = base()
    local = LocalEngine(model, build_tokenizer(), 4)
    local.hold_adapters().add("few", load_adapter(folders["few"]))
    decoder = local.find_decoder()
    assert isinstance(decoder, Decoder)
    assert decoder.bank is not None
    layer = model.model.layers[0].self_attn.q_proj
    with decoder.bank.applied(torch.zeros(3, dtype=torch.int64)), pytest.raises(ValueError, match="some of the tokens"):
        layer(torch.zeros(2, 32, dtype=torch.float64))
    assert "forward" not in layer.__dict__


def test_what_is_no_plain_lora_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    peft.get_peft_model(base(), peft.LoraConfig(use_dora=True, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sets use_dora"):
        load_adapter(tmp_path)
    with pytest.raises(ConfigError, match=r"neither a run nor an adapter folder"):
        load_adapter(tmp_path / "nowhere")
    weights = torch.full((2, 32), torch.nan)
    with pytest.raises(ValueError, match="holds nan"):
        LoraAdapter.from_tensors({"a.lora_A.weight": weights}, 1.0)
    engine = LocalEngine(build_model(hidden_size=16).double(), build_tokenizer(), 2)
    with pytest.raises(ValueError, match="that of this model is"):
        engine.hold_adapters().add("few", load_adapter(folders["few"]))
    adapted = LocalEngine(add_lora(base(), LoraConfig(rank=2)), build_tokenizer())
    with pytest.raises(ValueError, match="has an adapter already"):
        adapted.hold_adapters()


def test_graphs_of_other_adapters_are_dropped(folders: dict[str, Path]) -> None:
    """A graph reads adapters at the addresses of its capture."""
    local = LocalEngine(base(), build_tokenizer(), 4)
    bank = local.hold_adapters()
    decoder = local.find_decoder()
    assert decoder is not None
    dropped: list[int] = []
    graphs: Any = SimpleNamespace(check=lambda: None, clear=lambda: dropped.append(bank.revision))
    decoder.graphs = graphs
    decoder.check_model()
    first = len(dropped)
    decoder.check_model()
    assert len(dropped) == first
    bank.add("few", load_adapter(folders["few"]))
    decoder.check_model()
    assert len(dropped) == first + 1
