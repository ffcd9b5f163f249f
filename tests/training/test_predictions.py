"""A run's predictions: every image held out, once for each model, as the model's file says it; temperature apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

import agfa as package
from agfa.data.domains import from_folder
from agfa.data.splits import hold_out
from agfa.errors import AgfaError
from agfa.inference.predictor import load
from agfa.training import predictions
from agfa.training.temperature import COLDEST, HOTTEST
from support import DOMAINS, QUICK, records

SETTINGS = {**QUICK, "steps": 20, "evaluate_every": 5, "hparams": {"lr": 3e-4, "initial_sd": 0.1}}


@pytest.fixture(scope="module")
def run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**SETTINGS, data=str(images_made_once), target="sky", out=folder / "run").folder


@pytest.fixture(scope="module")
def told(run: Path) -> pl.DataFrame:
    found = predictions.read(run)
    assert found is not None
    return found


def test_every_image_held_out_is_there_once_for_each_model(told: pl.DataFrame, images_made_once: Path) -> None:
    assert told["model"].unique(maintain_order=True).to_list() == ["last", "best", "swad", "oracle"]
    dataset = from_folder(images_made_once)
    for name in DOMAINS:
        kept, held = hold_out(dataset[name], 0.2, 0)
        parts = {"test": kept, "oracle": held} if name == "sky" else {"val": held}
        for split, indices in parts.items():
            for model in ("last", "swad"):
                rows = told.filter(pl.col("model") == model, pl.col("domain") == name, pl.col("split") == split)
                assert rows["index"].to_list() == indices.tolist()
                assert rows["key"].to_list() == [dataset[name].keys[i] for i in indices]
                assert rows["label"].to_list() == dataset[name].labels[indices].tolist()
    assert len(told) == 4 * (6 + 6 + 30)


def test_they_are_the_records(told: pl.DataFrame, run: Path) -> None:
    for record in records(run, "final"):
        rows = told.filter(*(pl.col(key) == record[key] for key in ("model", "domain", "role", "split")))
        assert (rows["right"].mean(), len(rows)) == (record["accuracy"], record["n"])


def test_they_are_what_the_models_file_says(told: pl.DataFrame, run: Path, images_made_once: Path) -> None:
    for name in ("last", "swad"):
        model = load(run / "models" / f"{name}.safetensors")
        rows = told.filter(pl.col("model") == name, pl.col("domain") == "sky")
        assert set(rows["temperature"]) == {model.card.temperature}
        for row, said in zip(
            rows.iter_rows(named=True),
            model.predict([images_made_once / "sky" / key for key in rows["key"]]),
            strict=True,
        ):
            assert said.label == model.classes[row["predicted"]]
            assert list(said.probabilities.values()) == pytest.approx(row["probabilities"], abs=1e-5)
            assert said.probability == pytest.approx(row["confidence"], abs=1e-5)
            assert said.disagreement == pytest.approx(row["disagreement"], abs=1e-5)


def test_every_model_has_a_temperature_of_its_own_within_bounds(run: Path) -> None:
    found = {path.stem: json.loads(path.read_text())["temperature"] for path in (run / "models").glob("*.json")}
    assert set(found) == {"last", "best", "swad", "oracle"}
    assert all(COLDEST <= value <= HOTTEST for value in found.values())
    assert json.loads((run / "model.json").read_text())["temperature"] == found["swad"]


def test_the_temperature_is_the_best_of_a_grid_on_source_validation(
    told: pl.DataFrame, run: Path, images_made_once: Path
) -> None:
    """By the model's file, its own images, and the loss by its definition."""
    model = load(run)
    rows = told.filter(pl.col("model") == "swad", pl.col("split") == "val")
    files = [images_made_once / domain / key for domain, key in rows.select("domain", "key").rows()]
    chosen, losses = model.card.temperature, {}
    for factor in (0.8, 0.98, 1.0, 1.02, 1.25):
        object.__setattr__(model, "card", model.card.model_copy(update={"temperature": chosen * factor}))
        said = model.predict(files)
        losses[factor] = -np.mean(
            [math.log(s.probabilities[f.parent.name]) for s, f in zip(said, files, strict=True)]
        )
    if COLDEST < chosen < HOTTEST:
        assert min(losses, key=losses.__getitem__) == 1.0
    else:
        assert losses[1.02 if chosen == COLDEST else 0.98] >= losses[1.0]


def test_figures_are_those_of_the_rows(told: pl.DataFrame) -> None:
    of_model = told.filter(pl.col("model") == "last")
    test, val = of_model.filter(pl.col("split") == "test"), of_model.filter(pl.col("split") == "val")
    found = predictions.figures(test, val)
    assert (found.images, found.accuracy) == (24, test["right"].mean())
    both = pl.concat([test, val])
    unseen = (both["split"] == "test").to_numpy()
    assert found.auroc == pytest.approx(roc_auc_score(unseen, 1 - both["confidence"].to_numpy()))
    assert found.auroc_disagreement == pytest.approx(roc_auc_score(unseen, both["disagreement"].to_numpy()))
    assert found.coverage.accuracy[-1] == pytest.approx(found.accuracy)
    assert math.isnan(predictions.figures(test).auroc)


def test_an_ordinary_head_has_no_disagreement(images_made_once: Path) -> None:
    settings = {**QUICK, "algorithm": "erm", "steps": 2}
    run = package.train(**settings, data=str(images_made_once), target="sky", out="erm").folder
    told = predictions.read(run)
    assert told is not None
    assert told["disagreement"].null_count() == len(told)
    assert math.isnan(predictions.figures(told, told).auroc_disagreement)


def test_an_older_run_and_a_damaged_file(tmp_path: Path) -> None:
    assert predictions.read(tmp_path) is None
    (tmp_path / predictions.FILE).write_bytes(b"PAR1 nothing")
    with pytest.raises(AgfaError, match=r"predictions\.parquet cannot be read") as error:
        predictions.read(tmp_path)
    assert "\n" not in str(error.value)
