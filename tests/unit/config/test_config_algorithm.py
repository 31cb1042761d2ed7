"""The algorithm section: kinds with settings of their own, short names, and the sentence for what does not apply."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import pytest

from lockstep.algorithms.losses import LOSSES
from lockstep.algorithms.policy_gradient import PolicyGradientOptions
from lockstep.algorithms.preference import KtoOptions, PreferenceOptions
from lockstep.config import ConfigError, DpoConfig, KtoConfig, RunConfig, SftConfig, parse_config
from lockstep.config.algorithm import KINDS, PREFERENCE_LOSSES, SHORT_KINDS, PreferenceLoss
from lockstep.config.grpo import SHORT_GRPO
from lockstep.config.template import ALGORITHMS, starter_yaml
from lockstep.train.grpo import policy_options
from lockstep.train.preference_data import label_options, pair_options

MINIMAL = "model: org/model\ndata: {train: train.jsonl}\n"


def parse(algorithm: str = "", *overrides: str) -> RunConfig:
    """`algorithm` is what follows the key, in lines of its own."""
    section = "" if not algorithm else "algorithm:\n" + "".join(f"  {line}\n" for line in algorithm.split("; "))
    return parse_config(MINIMAL + section, source="run.yaml", overrides=overrides)


def whole(kind: str) -> str:
    """A kind with the one setting that it cannot do without."""
    is_sampled = kind == "grpo" or SHORT_KINDS.get(kind, {}).get("kind") == "grpo"
    return f"kind: {kind}" + ("; reward: numeric" if is_sampled else "")


def algorithm_of(*given: str) -> Any:
    return parse(*given).algorithm


def explain(*given: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*given)
    return str(caught.value)


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_each_kind_has_a_class_of_its_own():
    assert algorithm_of() == SftConfig()
    assert isinstance(algorithm_of("kind: dpo"), DpoConfig)
    assert isinstance(algorithm_of("kind: kto"), KtoConfig)


def test_a_kind_alone_may_be_written_as_a_word():
    assert parse_config(MINIMAL + "algorithm: dpo\n").algorithm == algorithm_of("kind: dpo")
    assert algorithm_of("", "algorithm=kto") == algorithm_of("kind: kto")


def test_overrides_set_the_kind_and_its_settings():
    assert algorithm_of("", "algorithm.kind=dpo", "algorithm.beta=0.2").beta == 0.2
    assert algorithm_of("kind: dpo; beta: 0.3", "algorithm.beta=0.2").beta == 0.2
    assert isinstance(algorithm_of("kind: dpo; beta: 0.3", "algorithm.kind=kto"), KtoConfig)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("loss: sigmoid", {"sigmoid": 1.0}),
        ("loss: [ipo, sft]", {"ipo": 1.0, "sft": 1.0}),
        ("loss: {sigmoid: 1, sft: 0.2}", {"sigmoid": 1.0, "sft": 0.2}),
    ],
)
def test_losses_are_a_word_a_list_or_weights(given, expected):
    assert algorithm_of(f"kind: dpo; {given}").loss == expected


@pytest.mark.parametrize("short", [name for name, settings in SHORT_KINDS.items() if settings["kind"] == "dpo"])
def test_a_short_kind_is_dpo_with_its_loss(short):
    found = algorithm_of(f"kind: {short}")
    assert (found.kind, found.loss, found.needs_reference) == ("dpo", {short: 1.0}, False)
    assert algorithm_of(f"kind: {short}; beta: 0.7").beta == 0.7


def test_simpo_by_its_own_name_has_the_numbers_of_its_paper():
    short, plain = algorithm_of("kind: simpo"), algorithm_of("kind: dpo; loss: simpo")
    assert ((short.beta, short.margin), (plain.beta, plain.margin)) == ((2.0, 1.0), (0.1, 0.5))


def test_the_learning_rate_follows_kind_and_adapters():
    assert [parse(whole(kind)).learning_rate for kind in KINDS] == [2e-5, 1e-6, 1e-6, 1e-6]
    assert [parse(whole(kind), "lora=true").learning_rate for kind in KINDS] == [2e-4, 1e-5, 1e-5, 1e-5]


@pytest.mark.parametrize("kind", [*KINDS, *SHORT_KINDS])
def test_the_resolved_file_reads_back_the_same(kind):
    config = parse(whole(kind))
    assert parse_config(config.to_yaml()) == config


def test_a_reference_model_is_a_path_like_the_model(tmp_path):
    (tmp_path / "ref").mkdir()
    text = MINIMAL + "algorithm: {kind: dpo, reference_model: NAME}\n"
    for name, expected in (("ref", str(tmp_path / "ref")), ("org/ref", "org/ref"), ("./x", str(tmp_path / "x"))):
        config = parse_config(text.replace("NAME", name), directory=tmp_path)
        assert isinstance(config.algorithm, DpoConfig)
        assert config.algorithm.reference_model == expected


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("kind: ppo",),
            "run.yaml:4: unknown algorithm.kind 'ppo'; choose one of sft, dpo, kto, grpo, simpo, orpo, cpo",
        ),
        (("kind: [dpo]",), "run.yaml:4: unknown algorithm.kind ['dpo']; choose"),
        (("kind: dpo; betta: 1",), "run.yaml:5: unknown key 'algorithm.betta'; did you mean algorithm.beta?"),
        (
            ("kind: sft; beta: 1",),
            "run.yaml:5: unknown key 'algorithm.beta'; it is a setting of kind dpo and kto, and this is sft: "
            "set algorithm.kind, or remove it",
        ),
        (("", "algorithm.beta=0.2"), "override 'algorithm.beta=0.2': unknown key 'algorithm.beta'; it is a setting of"),
        (("kind: dpo; ld_alpha: 0.5", "algorithm.kind=kto"), "run.yaml:5: unknown key 'algorithm.ld_alpha'; it is a"),
        (("kind: dpo; beta: 0",), "run.yaml:5: algorithm.beta: Input should be greater than 0 (given: 0)"),
        (("kind: dpo; loss: sigmod",), "run.yaml:5: algorithm.loss: Input should be 'sigmoid', 'hinge'"),
        (("kind: dpo; loss: {}",), "run.yaml:5: algorithm.loss: "),
        (("kind: dpo; loss: {sft: 0}",), "run.yaml:5: algorithm.loss: Input should be greater than 0"),
        (("kind: simpo; loss: ipo",), "run.yaml:5: algorithm.loss is ipo, and kind simpo already names one: use kind"),
        (("kind: dpo; margin: 1",), "run.yaml:5: algorithm.margin is for loss simpo, and this is sigmoid: remove it"),
        (("kind: dpo; divergence_alpha: 1",), "run.yaml:5: algorithm.divergence_alpha is for divergence alpha"),
        (("kind: dpo; reference: none",), "run.yaml:5: algorithm.reference is none, but loss sigmoid needs one"),
        (("kind: orpo; reference: copy",), "run.yaml:5: algorithm.reference is given, but loss orpo has no reference"),
        (("kind: cpo; reference_model: x",), "run.yaml:5: algorithm.reference_model is given, but loss cpo has no"),
        (("kind: simpo; reference_sync_steps: 3",), "run.yaml:5: algorithm.reference_sync_steps is given, but loss"),
        (("kind: dpo; reference: adapter_off",), "run.yaml:5: algorithm.reference adapter_off needs a lora section"),
        (
            ("kind: dpo; reference: copy; reference_model: x",),
            "run.yaml:5: algorithm.reference copy does not go with reference_model",
        ),
        (
            ("kind: dpo; reference: precomputed; reference_sync_steps: 3",),
            "run.yaml:6: algorithm.reference_sync_steps needs a reference that can move",
        ),
        (
            ("kind: dpo; reference_model: x; reference_sync_steps: 3",),
            "run.yaml:6: algorithm.reference_sync_steps cannot move another reference_model",
        ),
        (("kind: kto; reference: none",), "run.yaml:5: algorithm.reference is none, but kto needs one"),
        (("kind: kto; reference: precomputed",), "run.yaml:5: algorithm.reference precomputed does not go with loss"),
        (("kind: kto", "batch.samples=1"), "override 'batch.samples=1': batch.samples 1 is too few for loss kto"),
        (
            ("kind: kto", "evaluation.metrics=[rouge]", "data.validation_fraction=0.1"),
            "evaluation.metrics compares answers with good ones",
        ),
        (
            ("kind: dpo; reference: copy", "parallel.backend=deepspeed"),
            "run.yaml:5: algorithm.reference copy is not for parallel.backend deepspeed",
        ),
        (
            ("kind: dpo; reference_sync_steps: 1", "parallel.backend=deepspeed"),
            "run.yaml:5: algorithm.reference_sync_steps is not for parallel.backend deepspeed",
        ),
        (("kind: kto", "parallel.backend=deepspeed"), "and kto without lora needs it"),
    ],
)
def test_what_does_not_apply_is_an_error_with_its_place(given, message):
    assert message in explain(*given)


def test_labels_without_a_distance_may_have_any_reference():
    assert algorithm_of("kind: kto; loss: apo_zero_unpaired; reference: precomputed").reference == "precomputed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kind: dpo; loss: exo_pair", "algorithm.label_smoothing: exo_pair needs more than 0"),
        ("kind: dpo; loss: aot; wpo: true", "algorithm.wpo: aot sorts the batch"),
        ("kind: dpo; loss: hinge; label_smoothing: 0.1", "algorithm.label_smoothing: it changes nothing in hinge"),
        ("kind: dpo; loss: nca_pair; divergence: js", "algorithm.divergence: nca_pair is defined for reverse_kl only"),
        ("kind: dpo; loss: ipo; ld_alpha: 0", "algorithm.ld_alpha: 0 leaves tokens out"),
    ],
)
def test_what_a_loss_finds_wrong_is_said_by_its_key(given, message):
    assert re.match(rf"run.yaml:\d+: {re.escape(message)}", explain(given))


def dpo_with(loss: str) -> str:
    return f"kind: dpo; loss: {loss}" + ("; label_smoothing: 0.1" if loss == "exo_pair" else "")


# --- agreement with the losses --------------------------------------------------------------------------------------


def test_the_names_of_losses_are_those_that_there_are():
    assert set(get_args(PreferenceLoss)) == set(PREFERENCE_LOSSES)
    for name in PREFERENCE_LOSSES:
        algorithm = algorithm_of(dpo_with(name))
        assert LOSSES["preference"].needs_reference(pair_options(algorithm)) == algorithm.needs_reference


def test_every_setting_is_an_option_of_its_loss_and_the_defaults_agree():
    default = PreferenceOptions(num_chosen_tokens=None)
    assert PreferenceOptions(**pair_options(algorithm_of("kind: dpo"))) == default
    for name in PREFERENCE_LOSSES:
        assert PreferenceOptions(**pair_options(algorithm_of(dpo_with(name)))).losses == {name: 1.0}
    assert KtoOptions(**label_options(algorithm_of("kind: kto"))) == KtoOptions()
    for kind in ("grpo", *SHORT_GRPO):
        PolicyGradientOptions(**policy_options(algorithm_of(whole(kind))))
    for section, options, name in ((DpoConfig, PreferenceOptions, "divergence"), (KtoConfig, KtoOptions, "loss")):
        assert set(get_args(section.model_fields[name].annotation)) == set(get_args(get_type_hints(options)[name]))


REFUSED = [
    ("dpo", "loss: {dpo: 1.0}", "algorithm.loss: Input should be 'sigmoid', 'hinge'"),
    ("dpo", "loss: {}", "algorithm.loss: Dictionary should have at least 1 item"),
    ("dpo", "loss: {sigmoid: -1}", "algorithm.loss: Input should be greater than 0"),
    ("dpo", "beta: 0", "algorithm.beta: Input should be greater than 0"),
    ("dpo", "beta: .nan", "algorithm.beta: Input should be a finite number"),
    ("dpo", "loss: robust; label_smoothing: 0.5", "algorithm.label_smoothing: Input should be less than 0.5"),
    ("dpo", "label_smoothing: -0.1", "algorithm.label_smoothing: Input should be greater than or equal to 0"),
    ("dpo", "loss: hinge; label_smoothing: 0.1", "algorithm.label_smoothing: it changes nothing in hinge"),
    ("dpo", "loss: exo_pair", "algorithm.label_smoothing: exo_pair needs more than 0"),
    ("dpo", "divergence: kl", "algorithm.divergence: Input should be 'reverse_kl', 'forward_kl', 'js' or 'alpha'"),
    ("dpo", "loss: [sigmoid, aot]; divergence: js", "algorithm.divergence: aot is defined for reverse_kl only"),
    ("dpo", "loss: simpo; divergence: js", "algorithm.divergence: it changes nothing in simpo"),
    ("dpo", "divergence_alpha: .inf", "algorithm.divergence_alpha: Input should be a finite number"),
    ("dpo", "discopop_tau: 0", "algorithm.discopop_tau: Input should be greater than 0"),
    ("dpo", "margin: -1", "algorithm.margin: Input should be greater than or equal to 0"),
    ("dpo", "cpo_alpha: -1", "algorithm.cpo_alpha: Input should be greater than or equal to 0"),
    ("dpo", "loss: aot; wpo: true", "algorithm.wpo: aot sorts the batch"),
    ("dpo", "loss: sft; wpo: true", "algorithm.wpo: it weighs pairs, and sft compares none"),
    ("dpo", "ld_alpha: 1.1", "algorithm.ld_alpha: Input should be less than or equal to 1"),
    ("dpo", "loss: [sigmoid, ipo]; ld_alpha: 0", "algorithm.ld_alpha: 0 leaves tokens out that ipo counts"),
    ("dpo", "ld_alpha: 0; wpo: true", "algorithm.ld_alpha: 0 leaves tokens out that wpo counts"),
    ("kto", "loss: dpo", "algorithm.loss: Input should be 'kto' or 'apo_zero_unpaired'"),
    ("kto", "desirable_weight: -1", "algorithm.desirable_weight: Input should be greater than 0"),
    ("kto", "undesirable_weight: much", "algorithm.undesirable_weight: Input should be a valid number"),
    ("grpo; reward: exact", "clip_low: 1.5", "algorithm.clip_low: Input should be less than or equal to 1"),
    ("grpo; reward: exact", "clip_high: -0.1", "algorithm.clip_high: Input should be greater than or equal to 0"),
    ("grpo; reward: exact", "dual_clip: 1.0", "algorithm.dual_clip: Input should be greater than 1"),
    ("grpo; reward: exact", "objective: cispo; dual_clip: 2.0", "algorithm.dual_clip is for objective clip"),
    ("grpo; reward: exact", "kl: k4", "algorithm.kl: Input should be 'k1', 'k2' or 'k3'"),
    ("grpo; reward: exact", "kl_coefficient: -1.0", "algorithm.kl_coefficient: Input should be greater than or equal"),
    ("grpo; reward: exact", "importance_cap: 0", "algorithm.importance_cap: Input should be greater than 0"),
]


@pytest.mark.parametrize(("kind", "given", "words"), REFUSED, ids=[given for _, given, _ in REFUSED])
def test_settings_that_a_loss_cannot_mean_are_refused_by_name(kind, given, words):
    assert words in explain(f"kind: {kind}; {given}")


def test_settings_reach_the_loss():
    given = "label_smoothing: 0.1; divergence: alpha; divergence_alpha: 0.7; ld_alpha: 0.5; wpo: true; beta: 0.3"
    options = pair_options(algorithm_of(f"kind: dpo; loss: {{sigmoid: 2, sft: 1}}; {given}"), 17)
    expected = {"label_smoothing": 0.1, "divergence": "alpha", "divergence_alpha": 0.7, "ld_alpha": 0.5, "wpo": True}
    expected |= {"beta": 0.3, "losses": {"sigmoid": 2.0, "sft": 1.0}, "num_chosen_tokens": 17}
    assert {key: options[key] for key in expected} == expected
    kto = label_options(algorithm_of("kind: kto; desirable_weight: 2; undesirable_weight: 3"), 0.5)
    assert kto == {"loss": "kto", "beta": 0.1, "desirable_weight": 2.0, "undesirable_weight": 3.0, "kl": 0.5}


# --- the starter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_starter_for_every_kind(algorithm):
    text = starter_yaml(algorithm)
    active = parse_config(text)
    assert active.algorithm == algorithm_of(whole(algorithm))
    # Every default that is shown behind a # is one: with all of them written out nothing changes.
    written_out = parse_config(re.sub(r"^( *)#(\w+:)", r"\1\2", text, flags=re.MULTILINE))
    assert written_out.algorithm == active.algorithm
