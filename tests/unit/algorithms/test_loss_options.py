"""What losses can be told: nonsense is named, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.algorithms.losses import LOSSES
from lockstep.algorithms.options import check_options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"losses": {"dpo": 1.0}}, "losses: unknown loss 'dpo'; known are sigmoid"),
        ({"losses": {}}, "losses: write each loss with its weight"),
        ({"losses": "sigmoid"}, "losses: write each loss with its weight"),
        ({"losses": {"sigmoid": -1}}, "losses.sigmoid: must be at least 0, not -1"),
        ({"losses": {"sigmoid": 0, "sft": 0}}, "losses: every weight is 0"),
        ({"beta": 0}, "beta: must be above 0, not 0"),
        ({"beta": -0.1}, "beta: must be above 0, not -0.1"),
        ({"beta": float("nan")}, "beta: must be a number, not nan"),
        ({"beta": "0.1"}, "beta: must be a number, not '0.1'"),
        ({"beta": True}, "beta: must be a number, not True"),
        ({"label_smoothing": 0.5, "losses": {"robust": 1}}, "label_smoothing: must be at least 0 and below 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing: must be at least 0"),
        ({"label_smoothing": 0.1, "losses": {"hinge": 1}}, "label_smoothing: it changes nothing in hinge"),
        ({"losses": {"exo_pair": 1}}, "label_smoothing: exo_pair needs more than 0"),
        ({"divergence": "kl"}, "divergence: must be one of reverse_kl, forward_kl, js, alpha, not 'kl'"),
        ({"divergence": "js", "losses": {"sigmoid": 1, "aot": 1}}, "divergence: aot is defined for reverse_kl only"),
        ({"divergence": "js", "losses": {"simpo": 1}}, "divergence: it changes nothing in simpo"),
        ({"divergence_alpha": float("inf")}, "divergence_alpha: must be a number"),
        ({"discopop_tau": 0}, "discopop_tau: must be above 0"),
        ({"margin": -1}, "margin: must be at least 0"),
        ({"cpo_alpha": -1}, "cpo_alpha: must be at least 0"),
        ({"wpo": True, "losses": {"aot": 1}}, "wpo: aot sorts the batch"),
        ({"wpo": True, "losses": {"sft": 1}}, "wpo: it weighs pairs, and sft compares none"),
        ({"bco_shift": True}, "bco_shift: it belongs to bco_pair"),
        ({"ld_alpha": 1.1}, "ld_alpha: must be at least 0 and at most 1"),
        ({"ld_alpha": 0, "losses": {"sigmoid": 1, "ipo": 1}}, "ld_alpha: 0 leaves tokens out that ipo counts"),
        ({"ld_alpha": 0, "wpo": True}, "ld_alpha: 0 leaves tokens out that wpo counts"),
        ({"num_chosen_tokens": 0}, "num_chosen_tokens: must be above 0"),
        ({"gamma": 1}, "gamma: preference has no such option; it has losses, beta"),
    ],
    ids=str,
)
def test_nonsense_is_named(options, words):
    with pytest.raises(ValueError) as error:
        check_options("preference", options)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "dpo"}, "loss: must be one of kto, apo_zero_unpaired, not 'dpo'"),
        ({"beta": 0}, "beta: must be above 0"),
        ({"desirable_weight": -1}, "desirable_weight: must be at least 0"),
        ({"undesirable_weight": "much"}, "undesirable_weight: must be a number"),
        ({"desirable_weight": 0, "undesirable_weight": 0}, "desirable_weight: both weights are 0"),
        ({"kl": -0.1}, "kl: must be at least 0"),
        ({"losses": {}}, "losses: kto has no such option; it has loss, beta"),
    ],
    ids=str,
)
def test_nonsense_of_kto_is_named(options, words):
    with pytest.raises(ValueError) as error:
        check_options("kto", options)
    assert str(error.value).startswith(words)


def test_sound_options_pass():
    check_options("cross_entropy", {})
    check_options("preference", {})
    check_options("kto", {})
    check_options("preference", {"losses": {"sigmoid": 1, "sft": 0}, "label_smoothing": 0.499, "ld_alpha": 0.5})
    check_options("preference", {"losses": {"sigmoid": 1}, "ld_alpha": 0})
    check_options("preference", {"losses": {"hinge": 1, "sft": 1, "simpo": 1}, "divergence": "alpha"})


def test_kinds_of_loss_and_of_options_are_the_same():
    with pytest.raises(ValueError, match="unknown loss 'dpo': known are " + ", ".join(LOSSES)):
        check_options("dpo", {})
    with pytest.raises(ValueError, match="beta: cross_entropy has no options"):
        check_options("cross_entropy", {"beta": 1})


def test_options_are_checked_without_torch():
    code = "import sys, lockstep.algorithms.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
