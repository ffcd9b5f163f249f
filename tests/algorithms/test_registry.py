"""Methods by name, and what is said of wrong hyperparameters."""

from __future__ import annotations

import math

import pytest

from agfa.algorithms import get, hparams, names
from agfa.algorithms.agfa import AGFA
from agfa.algorithms.base import Algorithm
from agfa.algorithms.erm import ERM
from agfa.errors import UsageError


def test_names_are_the_files_that_define_a_method():
    assert {"agfa", "erm"} <= set(names())
    assert "base" not in names()
    assert names() == sorted(names())


def test_get_gives_the_method_of_that_name():
    assert get("agfa") is AGFA
    assert get("erm") is ERM
    for name in names():
        method = get(name)
        assert issubclass(method, Algorithm)
        assert method.name == name
        assert method.title
        assert method.paper
        hparams(method, {})  # the defaults are valid


@pytest.mark.parametrize(("wrong", "nearest"), [("afga", "agfa"), ("ermm", "erm"), ("agfaa", "agfa")])
def test_unknown_name_suggests_the_nearest(wrong, nearest):
    with pytest.raises(UsageError, match=f"unknown algorithm '{wrong}'; did you mean '{nearest}'"):
        get(wrong)


@pytest.mark.parametrize("wrong", ["base", "something else"])
def test_name_like_no_other_lists_them_all(wrong):
    with pytest.raises(UsageError, match=r"there are: .*agfa.*erm"):
        get(wrong)


def test_given_hyperparameters_replace_the_defaults_and_strings_are_read():
    given = hparams(AGFA, {"eta": "0.5", "samples": "7", "mix": "false", "schedule": "alternating"})
    assert (given.eta, given.samples, given.mix, given.schedule) == (0.5, 7, False, "alternating")
    assert (given.lr, given.alpha, given.generator_lr) == (5e-5, 1.0, None)


def test_defaults_are_the_papers():
    given = hparams(AGFA, {})
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
        hparams(AGFA, given)
    assert "\n" not in str(caught.value)


def test_a_hyperparameter_of_another_method_is_unknown():
    with pytest.raises(UsageError, match="hparams of erm: unknown key 'eta'"):
        hparams(ERM, {"eta": 0.1})
