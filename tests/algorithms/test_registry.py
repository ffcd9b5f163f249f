"""Methods by name, and what is said of wrong hyperparameters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agfa.algorithms import get, names, recipes
from agfa.algorithms.agfa import AGFA
from agfa.algorithms.base import Algorithm
from agfa.algorithms.erm import ERM
from agfa.algorithms.presets import ALIASES, PRESETS
from agfa.algorithms.search import Choice, LogUniform, Uniform, distributions, draw
from agfa.errors import UsageError


def test_names_are_the_files_that_define_a_method():
    assert {"agfa", "erm"} <= set(names())
    assert "base" not in names()
    assert names() == sorted(names())


def test_get_gives_the_method_of_that_name():
    assert get("agfa").method is AGFA
    assert get("erm").method is ERM
    for name in names():
        method = get(name).method
        assert issubclass(method, Algorithm)
        assert method.name == name
        assert method.title
        assert method.paper[-4:].isdigit()
        assert method.averaging == ("swad" if name == "agfa" else "none")
        get(name).hparams({})  # the defaults are valid


def test_presets_are_methods_with_settings():
    for name in recipes():
        recipe = get(name)
        recipe.hparams({})
        if name in PRESETS:
            preset = PRESETS[name]
            assert recipe.method is get(preset.method).method
            assert recipe.hparams({}).model_dump().items() >= preset.hparams.items()
    assert (get("swad").method, get("swad").averaging) == (ERM, "swad")
    assert get("agfa-no-swad").averaging == "none"
    assert get("swad").paper == get("fact+swad").paper == "Cha et al. 2021"
    assert get("agfa-mcd").paper == AGFA.paper
    assert get("agfa-mcd").hparams({"eta": 0.3}).model_dump().items() >= {"discrepancy": "mcd", "eta": 0.3}.items()


@pytest.mark.parametrize(
    ("spelt", "meant"), [("ERM", "erm"), ("AGFA", "agfa"), ("SWAD", "swad"), ("Agfa_MCD", "agfa-mcd")]
)
def test_names_are_read_as_the_tables_spell_them(spelt, meant):
    assert get(spelt).name == meant


def test_aliases_lead_to_methods():
    for alias, meant in ALIASES.items():
        if meant in names():
            assert get(alias).name == meant


def test_searches_draw_within_their_range_and_the_same_for_a_seed():
    for name in names():
        kind = get(name).method.hparams_type
        found = distributions(kind)
        assert {"lr", "weight_decay"} <= found.keys()
        for seed in range(20):
            drawn = draw(kind, seed)
            assert drawn == draw(kind, seed)
            get(name).hparams(drawn)  # all of them are valid
            for key, where in found.items():
                if isinstance(where, Choice):
                    assert drawn[key] in where.values
                else:
                    assert isinstance(where, Uniform | LogUniform)
                    assert where.low <= drawn[key] <= where.high
        assert draw(kind, 0) != draw(kind, 1)


MODEL = {"lr": LogUniform(1e-5, 10**-3.5), "weight_decay": LogUniform(1e-6, 1e-2)}
ADVERSARY = {
    "strength": LogUniform(1e-2, 1e2),
    "discriminator_lr": LogUniform(1e-5, 10**-3.5),
    "discriminator_weight_decay": LogUniform(1e-6, 1e-2),
    "discriminator_steps": LogUniform(1, 8, whole=True),
    "gradient_penalty": LogUniform(1e-2, 1e1),
    "beta1": Choice((0.0, 0.5)),
    "width": LogUniform(64, 1024, whole=True),
    "depth": Choice((3, 4, 5)),
    "dropout": Choice((0.0, 0.1, 0.5)),
}
WARMED_UP = {"penalty_weight": LogUniform(1e-1, 1e5), "warmup_steps": LogUniform(1, 1e4, whole=True)}
DOMAINBED = {  # its hparams_registry.py at b93c22a, for photographs
    "erm": {},
    "irm": WARMED_UP,
    "groupdro": {"eta": LogUniform(1e-3, 1e-1)},
    "imixup": {"alpha": LogUniform(1e-1, 1e1)},
    "mldg": {"beta": LogUniform(1e-1, 1e1), "meta_test": Choice((1, 2))},
    "coral": {"penalty_weight": LogUniform(1e-1, 1e1)},
    "mmd": {"penalty_weight": LogUniform(1e-1, 1e1)},
    "dann": ADVERSARY,
    "cdann": ADVERSARY,
    "mtl": {"ema": Choice((0.5, 0.9, 0.99, 1.0))},
    "sagnet": {"strength": LogUniform(1e-2, 1e1)},
    "arm": {},
    "vrex": WARMED_UP,
    "rsc": {"drop": Uniform(0, 0.5), "batch": Uniform(0, 0.5)},
}


@pytest.mark.parametrize("name", DOMAINBED)
def test_searches_are_those_of_domainbed(name):
    assert distributions(get(name).method.hparams_type) == {**MODEL, **DOMAINBED[name]}


def test_log_uniform_draws_every_magnitude_as_often():
    rng = np.random.default_rng(0)
    where = LogUniform(1e-4, 1e0)
    magnitudes = np.floor(np.log10([where.draw(rng) for _ in range(4000)])).astype(int)
    assert np.bincount(magnitudes + 4, minlength=4).min() > 900
    assert {LogUniform(1, 4, whole=True).draw(rng) for _ in range(100)} == {1, 2, 3}


@pytest.mark.parametrize(("wrong", "nearest"), [("afga", "agfa"), ("ermm", "erm"), ("agfaa", "agfa")])
def test_unknown_name_suggests_the_nearest(wrong, nearest):
    with pytest.raises(UsageError, match=f"unknown algorithm '{wrong}'; did you mean '{nearest}'"):
        get(wrong)


def test_name_like_no_other_lists_the_first():
    with pytest.raises(UsageError, match=r"there are: agfa, .*, arm, .* and \d+ more"):
        get("something else")


@pytest.mark.parametrize("wrong", ["base", "presets", "search"])
def test_files_that_are_no_method_are_not_one_by_name(wrong):
    with pytest.raises(UsageError, match=f"unknown algorithm '{wrong}'"):
        get(wrong)


def test_given_hyperparameters_replace_the_defaults_and_strings_are_read():
    given = get("agfa").hparams({"eta": "0.5", "samples": "7", "mix": "false", "schedule": "alternating"})
    assert (given.eta, given.samples, given.mix, given.schedule) == (0.5, 7, False, "alternating")
    assert (given.lr, given.alpha, given.generator_lr) == (5e-5, 1.0, None)


def test_defaults_are_the_papers():
    given = get("agfa").hparams({})
    assert (given.lr, given.eta, given.alpha, given.samples, given.mix) == (5e-5, 0.1, 1.0, 50, True)
    assert (given.discrepancy, given.target, given.generator) == ("smcd", "amplitude", "linear")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"et": 1}, "hparams of agfa: unknown key 'et'; did you mean 'eta'"),
        ({"eta": -1}, "eta: .*greater than or equal to 0, not -1"),
        ({"eta": "abc"}, "eta: .*valid number.*, not 'abc'"),
        ({"eta": math.nan}, "eta: .*not nan"),
        ({"alpha": 1.5}, "alpha: .*less than or equal to 1, not 1.5"),
        ({"samples": 0}, "samples: .*not 0"),
        ({"samples": "2.5"}, "samples: .*integer.*not '2.5'"),
        ({"mix": "perhaps"}, "mix: .*not 'perhaps'"),
        ({"schedule": "both"}, "schedule: .*'fused' or 'alternating', not 'both'"),
        ({"lr": 0, "alpha": 2}, r"lr: .*greater than 0, not 0 \(and 1 more\)"),
        ({"target": "pixel"}, "target pixel makes images without labels: it needs discrepancy mcd"),
    ],
)
def test_wrong_hyperparameters_are_told_by_key_value_and_what_is_allowed(given, message):
    with pytest.raises(UsageError, match=message) as caught:
        get("agfa").hparams(given)
    assert "\n" not in str(caught.value)


def test_a_hyperparameter_of_another_method_is_unknown():
    with pytest.raises(UsageError, match="hparams of erm: unknown key 'eta'"):
        get("erm").hparams({"eta": 0.1})
