"""Which images come: each once an epoch, or by their weights, the same on every machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from agfa.data.catalog import load
from agfa.data.inventory import changes, inventory
from agfa.data.sampling import draw_weights, sample
from agfa.data.store import open_images
from agfa.errors import UsageError
from support import Agfa


def epochs(weights: np.ndarray, n: int, seed: int = 0, batch_size: int = 4) -> list[np.ndarray]:
    """The counts of each image in each of n epochs of a weighted domain."""
    size, asked = len(weights), weights.astype(float).tobytes()
    drawn = np.concatenate([sample(size, batch_size, s, (seed,), asked) for s in range(-(-n * size // batch_size))])
    return [np.bincount(drawn[e * size : (e + 1) * size], minlength=size) for e in range(n)]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**31), st.integers(1, 4))
def test_every_image_once_an_epoch(n: int, batch_size: int, seed: int, epochs: int) -> None:
    steps = -(-n * epochs // batch_size)
    drawn = np.concatenate([sample(n, batch_size, step, (seed, 0)) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(drawn[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_seeds_and_domains_have_orders_of_their_own() -> None:
    orders = [
        sample(40, 40, step, (seed, domain)).tolist() for step in range(3) for seed in range(3) for domain in range(3)
    ]
    assert len({tuple(order) for order in orders}) == 27


def test_the_order_is_the_same_on_every_machine() -> None:
    assert sample(10, 10, 0, (0, 0)).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]


# --- weights


@given(st.lists(st.floats(0, 100) | st.just(0.0), min_size=1, max_size=30).filter(any), st.integers(0, 1000))
@example(weights=[0.0, 5e-324, 5e-324], seed=0)
def test_in_every_epoch_an_image_comes_as_often_as_its_weight_says(weights: list[float], seed: int) -> None:
    """Not only on average: n·w rounded up or down, and never where the weight is 0."""
    w = np.array(weights)
    wanted = len(w) * (w / w.max()) / (w / w.max()).sum()
    for counts in epochs(w, 3, seed):
        assert (counts >= np.floor(wanted - 1e-9)).all()
        assert (counts <= np.ceil(wanted + 1e-9)).all()
        assert (counts[w == 0] == 0).all()
        assert counts.sum() == len(w)


def test_over_many_epochs_shares_are_the_weights() -> None:
    w = np.array([0.13, 0.02, 5, 0.4, 0.4, 0, 1, 2])
    counts = np.sum(epochs(w, 1000), axis=0)
    np.testing.assert_allclose(counts / counts.sum(), w / w.sum(), atol=0.008)


def test_images_that_come_rarely_do_not_come_together() -> None:
    """Twenty images share one draw in five: no two of them are tied to each other by their places."""
    w = np.array([0.05] * 20 + [4.0])
    counts = np.array(epochs(w, 1500))[:, :20]
    correlations = np.corrcoef(counts.T)[np.triu_indices(20, 1)]
    assert np.abs(correlations + 1 / 19).max() < 4.5 / 1500**0.5  # below 0 as one comes in place of another


def test_equal_weights_give_each_image_once_an_epoch() -> None:
    for counts in epochs(np.full(37, 0.3), 20):
        assert (counts == 1).all()


def test_weighted_draws_are_the_same_on_every_machine() -> None:
    asked = np.array([1.0, 2, 0, 5, 2]).tobytes()
    assert sample(5, 10, 1, (0, 0), asked).tolist() == [1, 0, 4, 3, 3, 4, 3, 1, 3, 0]


def test_balanced_classes_have_equal_shares_of_a_domain() -> None:
    labels = np.array([0] * 6 + [1] * 3 + [3])
    np.testing.assert_allclose(draw_weights(labels, None, True), [1 / 6] * 6 + [1 / 3] * 3 + [1])
    weights = np.array([1, 1, 2, 0, 0, 0, 5, 5, 0, 0.1])
    np.testing.assert_allclose(
        draw_weights(labels, weights, True), [1 / 4, 1 / 4, 1 / 2, 0, 0, 0, 1 / 2, 1 / 2, 0, 1]
    )
    assert draw_weights(labels, weights, False) is weights
    assert draw_weights(labels, None, False) is None
    np.testing.assert_allclose(draw_weights(labels, np.zeros(10), True), 0)  # weightless classes stay away


# --- as people say it


def weighted_table(tiny: Path, weights: object) -> None:
    images = sorted(path for path in tiny.rglob("*.*"))
    parts = [path.relative_to(tiny).parts for path in images]
    table = pl.DataFrame(
        {
            "path": [f"tiny/{'/'.join(p)}" for p in parts],
            "label": [p[1] for p in parts],
            "domain": [p[0] for p in parts],
        }
    )
    table.with_columns(pl.Series("count", weights)).write_csv("all.csv")


def test_a_column_of_weights(train: Agfa, tiny: Path) -> None:
    weighted_table(tiny, np.arange(90) / 10)
    dataset, _ = load("all.csv?weight=count")
    for domain in dataset.domains:
        numbers = [float(key.rpartition("/")[2].partition(".")[0]) for key in domain.keys]
        first = {"ink": 0, "paper": 30, "sky": 60}[domain.name]
        np.testing.assert_allclose(domain.weights, (first + 10 * domain.labels + numbers) / 10)
    plain, _ = load("all.csv")
    assert all(domain.weights is None for domain in plain.domains)
    held = [inventory(found, open_images(found, 8)) for found in (plain, dataset)]
    assert changes(*held)[0] == "images in ink/cross have other weights"
    assert train(data="all.csv?weight=count", target="sky", algorithm="erm", out="weighted").status == 0
    assert train(data="all.csv", target="sky", algorithm="erm", out="plain").status == 0
    models = [Path(run, "model.safetensors").read_bytes() for run in ("weighted", "plain")]
    assert models[0] != models[1]


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "", "much"])
def test_weights_that_are_none(wrong: str, tiny: Path) -> None:
    weighted_table(tiny, ["1"] * 7 + [wrong] + ["1"] * 82)
    with pytest.raises(UsageError, match="row 9 is wrong, it has a count that is no number from 0 up; mend"):
        load("all.csv?weight=count")
    load("all.csv")


def test_weights_that_leave_nothing_to_train_on(train: Agfa, tiny: Path) -> None:
    weighted_table(tiny, [0] * 30 + [1] * 60)
    ended = train(data="all.csv?weight=count", target="sky")
    assert ended.status == 2
    assert "all/ink: the weights of all 24 images to train on are 0" in ended.error


def test_a_column_that_is_not_there(tiny: Path) -> None:
    weighted_table(tiny, [1] * 90)
    with pytest.raises(UsageError, match=r"has no column 'counts' \(is it 'count'\?\)"):
        load("all.csv?weight=counts")
    with pytest.raises(UsageError, match=r"unknown part of .*'weigth'; did you mean 'weight'"):
        load("all.csv?weigth=count")


def test_class_balanced(train: Agfa, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2, 10 and 10 images, one class is drawn as often as another; and the setting is kept with the run."""
    from agfa.data.batches import Part
    from agfa.training import trainer

    for path in sorted((tiny / "ink" / "top").iterdir())[2:]:
        path.unlink()
    seen: list[Part] = []
    batches = trainer.training_batches

    def watched(parts: list[Part], **options: object) -> object:
        seen.extend(parts)
        return batches(parts, **options)

    monkeypatch.setattr(trainer, "training_batches", watched)
    settings = {"target": "sky", "algorithm": "erm", "stratified": True}
    assert train(**settings, class_balanced=True, out="run").status == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["class_balanced"] is True
    for part in seen:
        shares = np.bincount(part.labels[part.indices], part.weights)
        np.testing.assert_allclose(shares, 1)
    assert train(**settings, out="plain").status == 0
    assert [part.weights for part in seen[2:]] == [None, None]
