"""Which row of a table a model belongs to, and what the row is called."""

import pytest

from agfa import algorithms
from agfa.benchmark.rows import method_of, row_of, title


def row(algorithm: str, model: str | None = None, **hparams: object) -> str:
    complete = algorithms.get(algorithm).hparams(hparams).model_dump(mode="json")
    return row_of(algorithm, complete, model)


@pytest.mark.parametrize(
    ("algorithm", "model", "hparams", "expected", "shown"),
    [
        ("erm", None, {}, "erm", "ERM"),
        ("erm", "best", {}, "erm", "ERM"),
        ("erm", "swad", {}, "swad", "SWAD"),
        ("swad", "last", {}, "erm", "ERM"),
        ("swad", "swad", {}, "swad", "SWAD"),
        ("erm", "swa", {}, "erm+swa", "ERM+SWA"),
        ("agfa", "swad", {}, "agfa", "AGFA"),
        ("agfa", "best", {}, "agfa-no-swad", "AGFA without SWAD"),
        ("agfa", "swa", {}, "agfa+swa", "AGFA+SWA"),
        ("agfa", "swad", {"eta": 0.5}, "agfa", "AGFA"),
        ("agfa", "swad", {"eta": 0.0}, "agfa-bayes", "Bayesian head alone"),
        ("agfa", "swad", {"discrepancy": "mcd"}, "agfa-mcd", "AGFA, unsupervised MCD"),
        ("agfa-mcd", "swad", {}, "agfa-mcd", "AGFA, unsupervised MCD"),
        ("agfa-mcd", None, {}, "agfa-mcd-no-swad", "AGFA, unsupervised MCD, without SWAD"),
        ("agfa-pixel", "swad", {}, "agfa-pixel", "AGFA, pixel-based"),  # it is agfa-mcd too, and more than that
        ("agfa", "swad", {"mix": False}, "agfa-no-mix", "AGFA without post-mixup"),
        ("coral", "swad", {}, "coral+swad", "CORAL+SWAD"),
        ("cdann", None, {}, "cdann", "C-DANN"),
    ],
)
def test_row(algorithm: str, model: str | None, hparams: dict[str, object], expected: str, shown: str) -> None:
    assert row(algorithm, model, **hparams) == expected
    assert title(expected) == shown


def test_a_method_that_nobody_knows_here_is_its_own_row() -> None:
    assert row_of("mine", {"x": 1}, None) == "mine"
    assert row_of("mine", {"x": 1}, "swad") == "mine+swad"
    assert (title("mine"), title("mine+swad"), method_of("mine")) == ("mine", "mine+SWAD", "mine")


def test_every_method_and_preset_has_a_row_of_its_own_and_a_name() -> None:
    for name in algorithms.recipes():
        recipe = algorithms.get(name)
        complete = recipe.hparams({}).model_dump(mode="json")
        model = recipe.averaging if recipe.averaging != "none" else None
        assert row_of(name, complete, model) == name
        assert title(name) != name, f"rows.TITLES has no {name}"
