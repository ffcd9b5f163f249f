"""An audit: its interval holds as often as it says, its plan fits the budget, its page says what was measured."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image
from scipy.special import expit

from agfa.benchmark import published
from agfa.benchmark.audit import METHODS
from agfa.benchmark.audit_interval import expected
from agfa.benchmark.audit_plan import FEWEST, MOST_ROUNDS, fit, hours
from agfa.benchmark.estimate import Cost, seconds
from agfa.errors import UsageError
from agfa.training import model_file, predictions
from agfa.training.config import CompleteConfig, TrainConfig
from agfa.training.setup import complete
from support import CLASSES, DOMAINS, QUICK, Agfa

MANY = 10**6  # images, so that counting them adds nothing
SETTINGS = {key: value for key, value in QUICK.items() if key != "track_target"}


# The interval


@pytest.mark.parametrize(("domains", "least"), [(2, 0.67), (3, 0.69), (6, 0.73)])
@pytest.mark.parametrize(("mean", "spread"), [(0, 1), (1.5, 1), (1, 0.5), (3, 1)])
def test_it_holds_the_next_domain_as_often_as_its_description_says(
    domains: int, least: float, mean: float, spread: float
) -> None:
    accuracies = expit(mean + spread * np.random.default_rng(domains).standard_normal((2000, domains + 1)))
    found = [expected(of[:-1], [MANY] * domains) for of in accuracies]
    held = np.mean([e.low <= of[-1] <= e.high for e, of in zip(found, accuracies, strict=True)])
    assert least - 0.02 < held < 0.82


def test_on_published_tables_it_holds_as_its_description_says() -> None:
    cells = published.read().filter(
        pl.col("protocol") == "leave_one_out",
        pl.col("table").is_in(["pacs", "vlcs", "oh", "ti", "dn"]),
        pl.col("column") != published.AVERAGE,
    )
    rows = 0
    by_dataset: dict[str, list[tuple[bool, float]]] = {}
    for (dataset, *_), row in cells.group_by(published.PRINTED_ROW[1:], maintain_order=True):
        accuracies, rows = row["mean"].to_numpy(), rows + 1
        for *three, left_out in itertools.chain.from_iterable(
            ((*three, i) for three in itertools.combinations([j for j in range(len(accuracies)) if j != i], 3))
            for i in range(len(accuracies))
        ):
            e = expected(accuracies[three], [MANY] * 3)
            by_dataset.setdefault(str(dataset), []).append((e.low <= accuracies[left_out] <= e.high, e.high - e.low))
    held, width = np.mean([np.mean(found, axis=0) for found in by_dataset.values()], axis=0)
    assert (rows, len(by_dataset)) == (116, 5)
    assert held == pytest.approx(0.79, abs=0.005)
    assert width == pytest.approx(0.43, abs=0.005)


def test_the_interval_stays_on_the_scale_and_around_its_accuracy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        n = int(rng.integers(2, 7))
        accuracies = rng.choice([0.0, 1.0, 0.5, 0.97, rng.random()], n)
        e = expected(accuracies, rng.integers(1, 1000, n).tolist())
        assert 0 <= e.low <= e.accuracy <= e.high <= 1
        assert e.accuracy == pytest.approx(accuracies.mean())


def test_few_images_and_few_domains_make_it_wider() -> None:
    def width(accuracies: list[float], images: int) -> float:
        e = expected(accuracies, [images] * len(accuracies))
        return e.high - e.low

    assert width([0.9] * 3, 20) > width([0.9] * 3, 2000) > 0  # domains that agree tell no more than their images
    assert width([0.8, 0.9], MANY) > width([0.8, 0.9, 0.8, 0.9], MANY)


# The plan


def known(tiny: Path, steps: int = 2000, per_image: float = 1e-3) -> list[tuple[CompleteConfig, Cost]]:
    """The trainings of a round on three domains, and made-up costs."""
    cost = Cost(1.0, per_image, 1e-5, dict.fromkeys(DOMAINS, 30))
    settings = {**SETTINGS, "data": str(tiny), "steps": steps, "evaluate_every": 100, "algorithm": "erm"}
    return [(complete(TrainConfig(**settings, target=(domain,)))[0], cost) for domain in DOMAINS]


def took(runs: list[tuple[CompleteConfig, Cost]], steps: int, every: int) -> float:
    changed = {"steps": steps, "evaluate_every": every}
    return sum(seconds(config.model_copy(update=changed), cost) for config, cost in runs)


@pytest.mark.parametrize("budget", [10, 20, 40])
def test_steps_fill_the_budget_and_no_more(tiny: Path, budget: float) -> None:
    runs = known(tiny)
    steps, every, rounds = fit(runs, TrainConfig(), None, budget, 1)
    assert rounds == 1
    assert FEWEST <= steps < 2000
    assert took(runs, steps, every) <= budget < took(runs, steps + 2 * every, every)


def test_rounds_are_added_when_whole_trainings_fit(tiny: Path) -> None:
    runs = known(tiny)
    once = took(runs, 2000, 100)
    assert fit(runs, TrainConfig(), None, 2.1 * once, 1) == (2000, 100, 2)
    assert fit(runs, TrainConfig(), None, 99 * once, 1) == (2000, 100, MOST_ROUNDS)
    assert fit(runs, TrainConfig(), 7, 99 * once, 1) == (2000, 100, 7)
    assert fit(runs, TrainConfig(), None, 2.1 * once / 3, 3) == (2000, 100, 2)  # three at once


def test_steps_that_were_asked_for_stay(tiny: Path) -> None:
    assert fit(known(tiny), TrainConfig(steps=2000), None, 1, 1) == (2000, 100, 1)


def test_a_budget_too_small_is_refused_with_one_that_does(tiny: Path) -> None:
    runs = known(tiny, per_image=0.05)
    with pytest.raises(UsageError, match="--budget") as refused:
        fit(runs, TrainConfig(), None, 10, 1)
    enough = re.search(r"--budget (\w+)", str(refused.value))
    assert enough
    assert fit(runs, TrainConfig(), None, hours(enough[1]), 1)[0] >= FEWEST


def test_budgets_are_read() -> None:
    assert [hours(text) for text in ("90s", "30m", "8h", "1h30m", "0.5h")] == [90, 1800, 28800, 5400, 1800]
    for wrong in ("", "30", "m", "0m", "3d", "-1m"):
        with pytest.raises(UsageError, match="1h30m"):
            hours(wrong)


# The whole


@pytest.fixture
def audit(agfa: Agfa, tiny: Path) -> Agfa:
    """Run `agfa audit` quickly on the tiny dataset; keywords change the settings."""

    def run(*arguments: object, **settings: Any) -> Any:
        return agfa("audit", *arguments, **{"data": tiny, "methods": "erm,swad", **SETTINGS, **settings})

    return run


def test_an_audit_says_what_its_trainings_measured_and_ends_in_the_models_card(audit: Agfa, agfa: Agfa) -> None:
    ended = audit("--rounds", "1")
    assert ended.status == 0, ended.err
    assert "3 trainings of 6 steps" in ended.err
    out = Path("audits/tiny")
    found = json.loads((out / "audit.json").read_text())

    runs = [path.parent for path in out.glob("*/done")]
    assert len(runs) == 3  # ERM and SWAD share theirs
    for method, model in (("erm", "best"), ("swad", "swad")):
        logged = {}
        for run in runs:
            for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                if (record["kind"], record.get("model"), record.get("split")) == ("final", model, "test"):
                    logged[record["domain"]] = record["accuracy"]
        assert found["methods"][method]["domains"] == pytest.approx(logged)
        assert found["methods"][method]["accuracy"] == pytest.approx(np.mean(list(logged.values())))
    best = max(METHODS[:2], key=lambda name: found["methods"][name]["accuracy"])
    assert found["algorithm"] == best
    of = found["methods"][best]
    assert found["weakest"]["domain"] == min(of["domains"], key=of["domains"].get)
    assert f"{of['accuracy']:.0%}" in ended.out

    card = found["card"]
    assert (card["expected"], card["low"], card["high"]) == (of["accuracy"], of["low"], of["high"])
    assert card["target_images"] == dict.fromkeys(DOMAINS, 24)
    told = pl.concat([_told(run, "best" if best == "erm" else "swad") for run in runs])
    for least, share, accuracy in card["coverage"]:
        answered = told.filter(pl.col("confidence") >= least)
        assert share == pytest.approx(len(answered) / len(told))
        assert accuracy == pytest.approx(answered["right"].to_numpy().mean())
    assert card["coverage"][0][1] == 1

    # the command on the page trains the final model, with the audit in its card
    assert found["train"] in (out / "audit.html").read_text()
    command = found["train"].split()
    assert command[0] == "agfa"
    assert agfa(*command[1:], "--out", "final").status == 0
    _, final = model_file.load(Path("final"))
    assert final.audit is not None
    assert final.audit.model_dump(mode="json") == card
    assert final.targets == ()
    assert agfa(*command[1:], "--out", "final").status == 0  # a finished one too

    # nothing is trained again; a round more is
    before = {run: (run / "done").stat().st_mtime_ns for run in runs}
    assert audit().status == 0
    assert {run: (run / "done").stat().st_mtime_ns for run in out.glob("*/") if (run / "done").exists()} == before
    assert audit("--rounds", "2").status == 0
    assert len(list(out.glob("*/done"))) == 6
    assert json.loads((out / "audit.json").read_text())["rounds"] == 2
    assert "image_size" not in audit(image_size=16).error  # named as what it is
    assert "audit of other settings" in audit(image_size=16).error


def _told(run: Path, model: str) -> pl.DataFrame:
    found = predictions.read(run)
    assert found is not None
    return found.filter(pl.col("model") == model, pl.col("split") == "test")


def test_the_page_stands_alone_and_its_pictures_are_of_mistakes(audit: Agfa, tiny: Path) -> None:
    strange = tiny / "ink" / "cross" / "<b>&'.png"
    (tiny / "ink" / "cross" / "01.png").rename(strange)
    assert audit(steps=2, evaluate_every=1).status == 0  # hardly trained: there are mistakes
    page = Path("audits/tiny/audit.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "<b>&" not in page
    found = json.loads(Path("audits/tiny/audit.json").read_text())
    pictures = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(pictures) == len(found["mistakes"]) > 0
    for picture, mistake in zip(pictures, found["mistakes"], strict=True):
        truth = mistake["key"].split("/")[0]
        assert (mistake["truth"], mistake["said"] == truth) == (truth, False)
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), float)
        with Image.open(tiny / mistake["domain"] / mistake["key"]) as image:
            small = np.asarray(image.convert("RGB").resize(shown.shape[1::-1], Image.Resampling.NEAREST), float)
        assert np.abs(shown - small).mean() < 12  # JPEG, of that image


def test_an_audit_speaks_for_its_classes_and_method_alone(agfa: Agfa, tiny: Path, tmp_path: Path) -> None:
    record = {"expected": 0.8, "low": 0.6, "high": 0.9, "domains": {"ink": 0.8}, "target_images": {"ink": 24}}
    content = {"classes": CLASSES, "algorithm": "erm", "card": {**record, "temperature": 1.0, "coverage": []}}
    folder = tmp_path / "told"
    folder.mkdir()

    def train(**changes: Any) -> Any:
        (folder / "audit.json").write_text(json.dumps({**content, **changes}))
        return agfa("train", "--data", tiny, "--algorithm", "erm", "--audit", folder, "--out", "run", **SETTINGS)

    assert "classes" in train(classes=["cross", "top"]).error
    assert "left" in train(classes=["cross", "top"]).error  # which
    assert "agfa" in train(algorithm="agfa").error
    assert "is not an audit" in train(card={}).error
    (folder / "audit.json").unlink()
    assert "agfa audit" in agfa("train", "--data", tiny, "--audit", folder, "--out", "run", **SETTINGS).error
    assert not Path("run").exists()  # said before anything is trained
    assert train().status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target", "ink"), "--target"),
        (("--algorithm", "agfa"), "--methods"),
        (("--seed", "3"), "--rounds"),
        (("--averaging", "none"), "agfa-no-swad"),
        (("--track-target",), "--track-target"),
        (("--batch-size", "auto"), "--batch-size auto"),
        (("--rounds", "0"), "--rounds"),
        (("--methods", "amgfa"), "agfa"),
        (("--budget", "soon"), "1h30m"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_what_an_audit_decides_itself_is_refused(
    agfa: Agfa, tiny: Path, arguments: tuple[str, ...], said: str
) -> None:
    ended = agfa("audit", "--data", tiny, *arguments)
    assert ended.status == 2
    assert said in ended.error
    assert not Path("audits/tiny/sweep.yaml").exists()


def test_one_domain_cannot_be_audited(agfa: Agfa, tiny: Path) -> None:
    for name in ("paper", "sky"):
        (tiny / name).rename(tiny.parent / name)
    ended = agfa("audit", "--data", tiny)
    assert (ended.status, "one domain" in ended.error) == (2, True)
