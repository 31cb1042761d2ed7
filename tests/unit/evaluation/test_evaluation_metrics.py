"""Metrics on answers, by values worked out by hand."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data import answer_match
from lockstep.data.answer_match import find_number
from lockstep.evaluation import metrics
from lockstep.evaluation.metrics import (
    METRICS,
    bertscore,
    check_metrics,
    check_references,
    exact_match,
    mean_scores,
    numeric,
    rouge,
    standard_errors,
)

needs_bert_score = pytest.mark.skipif(
    importlib.util.find_spec("bert_score") is None, reason="needs the extra 'eval': bert-score"
)


def test_exact_match_forgives_white_space_and_nothing_else():
    answers = ["Paris", " Paris \n", "the  big\ncity", "paris", "Paris."]
    references = ["Paris", "Paris", "the big city", "Paris", "Paris"]
    assert [row["exact_match"] for row in exact_match(answers, references)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 3 = 18.\n#### 18", 18),
        ("#### 5\nno, wait: 7\n#### 1,234 dollars, not 9", 1234),
        ("#### none, but 5", 5),
        ("#### none; 3 apples", 3),
        ("first \\boxed{4}, so \\boxed{\\$1{,}200.50} at 10 o'clock", Fraction(2401, 2)),
        ("\\boxed{\\frac{3}{4}} and 9", Fraction(3, 4)),
        ("\\boxed{x_{2} = {7}} then 1", 7),
        ("they pay $18", 18),
        ("they pay -$18 in 2 days? no: -$18", -18),
        ("$-18", -18),
        ("it is 18.0", 18),
        ("about 18.", 18),
        ("-3", -3),
        ("\u22123", -3),
        ("5-3", 3),
        ("(5)-3", 3),
        ("50%", 50),
        ("3/4", Fraction(3, 4)),
        ("on 1/2/2025", 2025),
        ("3/0", None),
        (".5", Fraction(1, 2)),
        ("1.5e3", 1500),
        ("the pair 1,2", 2),
        ("12,345,678", 12345678),
        ("no number at all", None),
        ("7" * 5000, None),
        ("\\boxed{7", 7),
    ],
)
def test_the_number_that_a_text_comes_to(text: str, number: Fraction | int | None):
    assert find_number(text) == number


@given(st.text(st.sampled_from("0123 ,.-\u2212$€/eE+)x\n"), max_size=30))
def test_numbers_are_those_that_the_whole_pattern_finds(text: str):
    plain = [match["digits"] for match in answer_match.NUMBER.finditer(text)]
    assert [match["digits"] for match in answer_match.match_numbers(text)] == plain
    signs = [bool(match["sign"] or match["inner"]) for match in answer_match.NUMBER.finditer(text)]
    assert [bool(match["sign"] or match["inner"]) for match in answer_match.match_numbers(text)] == signs


def test_numeric_compares_values_and_an_answer_without_one_is_wrong():
    answers = ["so 18.00 it is", "#### 19", "I do not know"]
    assert [row["numeric"] for row in numeric(answers, ["#### 18"] * 3)] == [1, 0, 0]
    with pytest.raises(ValueError, match=r"reference 2 has no number: 'none'"):
        numeric(["1", "2"], ["1", "none"])


def test_rouge_by_hand():
    (row,) = rouge(["the cat sat here"], ["the cat was here today"])
    # Words in common: the, cat, here: 3 of 4 and 3 of 5. Pairs: "the cat": 1 of 3 and 1 of 4. Longest in order: 3.
    assert row["rouge1"] == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert row["rouge2"] == pytest.approx(2 * (1 / 3) * (1 / 4) / (1 / 3 + 1 / 4))
    assert row["rougeL"] == row["rouge1"]
    (stemmed,) = rouge(["running dogs"], ["run dog"])
    assert stemmed["rouge1"] == 1.0


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT whose tokenizer states no limit of its own."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "sat", "ran"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    folder = tmp_path_factory.mktemp("encoder")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=9, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


@needs_bert_score
def test_bertscore_with_an_encoder_from_a_folder(encoder: Path):
    answers = ["a cat sat", "dog ran", "", "a cat " * 100]
    same, other, empty, long = bertscore(answers, ["a cat sat", "a cat sat", "a cat", "a cat"], encoder=str(encoder))
    assert set(same) == {"bertscore_precision", "bertscore_recall", "bertscore_f1"}
    assert same["bertscore_f1"] == pytest.approx(1.0, abs=1e-5)
    assert other["bertscore_f1"] < 0.99
    assert set(empty.values()) == {0.0}
    assert 0 < long["bertscore_recall"] <= 1 + 1e-5  # cut to the encoder's 32 places, not a crash
    mean = 2 * other["bertscore_precision"] * other["bertscore_recall"]
    assert other["bertscore_f1"] == pytest.approx(mean / (other["bertscore_precision"] + other["bertscore_recall"]))


@needs_bert_score
def test_an_encoder_that_is_not_there_is_one_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match=r"the encoder .*nowhere of bertscore cannot be loaded"):
        bertscore(["a"], ["b"], encoder=str(tmp_path / "nowhere"))


def test_unknown_metrics_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    assert check_metrics(["loss", "rouge", "loss"]) == ("loss", "rouge")
    with pytest.raises(ValueError, match=r"unknown metric 'bleu': choose from loss, perplexity, exact_match, numeric"):
        check_metrics(["bleu"])
    with pytest.raises(ValueError, match="no metric"):
        check_metrics([])
    monkeypatch.setitem(metrics.METRIC_PACKAGES, "rouge", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match=r"pip install 'lockstep\[eval\]'"):
        check_metrics(["rouge"])


def test_references_that_a_metric_cannot_use_show_before_the_work():
    assert check_references(["exact_match"], ["x"], ["f:1"]) == []
    with pytest.raises(ValueError, match=r"^f:2: the reference has no number for the metric numeric \('none'\)"):
        check_references(["numeric"], ["5", "none"], ["f:1", "f:2"])
    (warning,) = check_references(["rouge"], ["苹果", "apple"], ["f:1", "f:2"])
    assert "1 references have none" in warning


def test_means_and_their_standard_errors():
    rows = [{"x": 1.0}, {"x": 0.0}, {"x": 1.0}, {"x": 0.0}]
    assert mean_scores(rows) == {"x": 0.5}
    # Sample variance 4 * 0.25 / 3, divided by the four rows.
    assert standard_errors(rows)["x"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert standard_errors(rows[:1]) == {}


@pytest.mark.parametrize("name", METRICS)
def test_lists_of_different_lengths_are_refused(name: str):
    with pytest.raises(ValueError, match="2 answers cannot be scored against 1 references"):
        METRICS[name](["1", "2"], ["1"])
