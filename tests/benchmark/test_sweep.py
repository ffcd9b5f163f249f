"""From a sweep file to its runs: every one that is wanted, once, under a name of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agfa import algorithms
from agfa.algorithms.presets import PRESETS
from agfa.benchmark import published
from agfa.benchmark.expansion import expand, run_name
from agfa.benchmark.rows import row_of
from agfa.benchmark.sweep import SHIPPED, shipped, summary
from agfa.data.catalog import CATALOG
from agfa.errors import UsageError
from agfa.training.config import CompleteConfig
from agfa.training.setup import source_batch


def runs(**content: Any) -> list[CompleteConfig]:
    Path("s.yaml").write_text(yaml.safe_dump(content))
    return expand(Path("s.yaml"), Path("out"))


def said(**content: Any) -> str:
    with pytest.raises(UsageError) as error:
        runs(**content)
    return str(error.value)


def test_every_combination_once() -> None:
    found = runs(datasets=["digits", "PACS"], methods=["erm", "coral"], seeds=3, backbones=["convnet", "resnet18"])
    assert len(found) == 2 * 4 * 2 * 3 * 2
    assert len({config.out for config in found}) == len(found)
    what = {(c.data, c.target, c.algorithm, c.seed, c.backbone) for c in found}
    assert ("PACS", ("sketch",), "coral", 2, "resnet18") in what
    assert len(what) == len(found)
    assert {c.steps for c in found if c.data == "PACS"} == {5000}  # the catalog's


def test_a_lone_word_is_a_list_of_one_and_a_number_so_many_seeds() -> None:
    assert len(runs(datasets="digits", targets="print", methods="erm")) == 1
    assert [c.seed for c in runs(datasets="digits", targets="print", methods="erm", seeds=[7, 3])] == [7, 3]
    (one,) = runs(datasets="pacs", targets="photo", methods="erm")
    assert one.data == "PACS"  # however it is written


def test_names_say_what_and_differ_in_whatever_decides_the_outcome() -> None:
    base = {"datasets": "digits", "targets": "print", "methods": "erm"}
    (config,) = runs(**base)
    assert config.out.name.startswith("digits-erm-not_print-seed0-")
    others = [
        {**base, "settings": {"steps": 5}},
        {**base, "settings": {"stratified": True}},
        {**base, "hparams": {"lr": 0.5}},
        {**base, "methods": "coral"},
        {**base, "seeds": [1]},
        {**base, "averaging": "swa"},
    ]
    names = {run_name(runs(**other)[0]) for other in others} | {run_name(config)}
    assert len(names) == 7
    (same,) = runs(**base, settings={"accelerator": "cpu", "checkpoint_seconds": 3})
    assert same.out == config.out
    (same,) = runs(**base, hparams={"weight_decay": 0}, settings={"image_size": 16, "val_fraction": 0.2})
    assert same.out == config.out  # said or not


def test_names_stay_as_they_are() -> None:
    """A sweep that is half done must be found again by the next version."""
    (config,) = runs(datasets="digits", targets="print", methods="erm")
    assert config.out == Path("out/digits-erm-not_print-seed0-9cf2be1808")


def test_rows_that_differ_only_in_averaging_share_a_training() -> None:
    base = {"datasets": "digits", "targets": "print"}
    for methods in (["erm"], ["swad"], ["erm", "swad"]):
        (config,) = runs(**base, methods=methods)
        assert (config.algorithm, config.averaging) == ("erm", "swad")
    for methods in (["agfa-no-swad"], ["agfa", "agfa-no-swad"], ["AGFA"]):
        (config,) = runs(**base, methods=methods)
        assert (config.algorithm, config.averaging) == ("agfa", "swad")
    (config,) = runs(**base, methods="coral")
    assert config.averaging == "none"
    (config,) = runs(**base, methods="coral", averaging=["none", "swad"])
    assert config.averaging == "swad"
    assert [c.averaging for c in runs(**base, methods="coral", averaging=["none", "swa", "swad"])] == ["swa", "swad"]
    (config,) = runs(**base, methods="erm", averaging="none")
    assert config.averaging == "none"


def test_presets_are_their_method_with_its_settings() -> None:
    (config,) = runs(datasets="digits", targets="print", methods="agfa-pixel-mlp")
    assert config.algorithm == "agfa"
    assert config.hparams == {**config.hparams, **PRESETS["agfa-pixel-mlp"].hparams}
    both = runs(datasets="digits", targets="print", methods=["agfa-bayes", {"agfa": {"eta": 0}}])
    assert len(both) == 1


def test_protocols() -> None:
    found = runs(datasets="PACS", methods="agfa", protocol="single_source")
    assert [c.source for c in found] == [("art_painting",), ("cartoon",), ("photo",), ("sketch",)]
    assert found[3].target == ("art_painting", "cartoon", "photo")
    assert found[3].out.name.startswith("PACS-agfa-only_sketch-seed0-")


def test_leave_one_domain_out_adds_the_runs_with_a_second_domain_held_out() -> None:
    base = {"datasets": "PACS", "methods": "erm", "selection": ["training_domain", "leave_one_domain_out"]}
    found = runs(**base)
    assert len(found) == 4 + 6  # a pair serves both of its domains
    assert all(len(c.source) == 4 - len(c.target) for c in found)
    one = runs(**base, targets=["sketch"])
    assert {c.target for c in one} == {
        ("sketch",),
        ("art_painting", "sketch"),
        ("cartoon", "sketch"),
        ("photo", "sketch"),
    }
    assert {c.out for c in one} < {c.out for c in found}


def test_grids() -> None:
    found = runs(datasets="digits", targets="print", methods=["agfa", "erm"], grid={"eta": [0, 0.1], "lr": [1, 2]})
    assert [(c.hparams["eta"], c.hparams["lr"]) for c in found if c.algorithm == "agfa"] == [
        (0, 1),
        (0, 2),
        (0.1, 1),
        (0.1, 2),
    ]
    assert [c.hparams["lr"] for c in found if c.algorithm == "erm"] == [1, 2]  # it has no eta


def test_draws_are_shared_by_targets_and_differ_by_number_seed_and_hyperparameter() -> None:
    base = {"datasets": "digits", "methods": ["coral", "erm"], "seeds": 2, "draws": 3, "hparams": {"weight_decay": 0}}
    found = runs(**base, selection=["leave_one_domain_out"])
    assert len(found) == 2 * 2 * 3 * (4 + 6)
    by_target: dict[Any, list[Any]] = {}
    for config in found:
        by_target.setdefault(config.target, []).append((config.algorithm, config.seed, config.hparams))
    first, *others = by_target.values()
    assert len(first) == 12
    assert all(other == first for other in others)
    coral = [hparams for algorithm, _, hparams in first if algorithm == "coral"]
    assert coral[0] == coral[3] == {"lr": 1e-3, "weight_decay": 0.0, "penalty_weight": 1.0}  # the defaults
    assert len({str(hparams) for hparams in coral}) == 5
    assert {hparams["weight_decay"] for hparams in coral} == {0.0}  # what is set is not drawn
    drawn = coral[1]["lr"] * 1e5, coral[1]["penalty_weight"] / 0.1
    assert drawn[0] != pytest.approx(drawn[1], rel=0.1)
    more = runs(**{**base, "draws": 4, "methods": "coral"})
    assert [c.hparams for c in more if c.seed == 1 and c.target == ("print",)][:3] == coral[3:]
    erm = [hparams["lr"] for algorithm, _, hparams in first if algorithm == "erm"]
    assert erm == [hparams["lr"] for hparams in coral]


def test_draws_stay_what_they_are() -> None:
    found = runs(datasets="digits", targets="print", methods="coral", draws=2)
    assert found[1].hparams == pytest.approx(
        {"lr": 0.00020895677, "weight_decay": 0.00190541499, "penalty_weight": 0.78570452}
    )


def test_a_preset_is_not_drawn_over() -> None:
    found = runs(datasets="digits", targets="print", methods="agfa-frozen", draws=5, grid={"generator_lr": [1, 2]})
    assert {c.hparams["generator_lr"] for c in found} == {0}


def test_parts_differ_from_the_rest_of_the_file() -> None:
    found = runs(
        datasets="digits",
        targets="print",
        methods="agfa",
        settings={"steps": 5, "evaluate_every": 2},
        parts=[{"grid": {"eta": [0.5, 0.6]}}, {"methods": "erm", "settings": {"steps": 7}}],
    )
    assert [(c.algorithm, c.steps, c.evaluate_every) for c in found] == [("agfa", 5, 2)] * 2 + [("erm", 7, 2)]


def test_own_data_is_read_for_its_domains(tiny: Path) -> None:
    found = runs(datasets="tiny", methods="erm")
    assert [c.target for c in found] == [("ink",), ("paper",), ("sky",)]
    assert found[0].out.name.startswith("tiny-erm-not_ink-seed0-")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"datasets": "PASC"}, "s.yaml: datasets: no folder here and unknown dataset 'PASC'; did you mean 'PACS'?"),
        ({"methods": ["agva"]}, "s.yaml: methods: unknown algorithm 'agva'; did you mean 'agfa'?"),
        (
            {"methods": [{"agfa": {"etaa": 1}}]},
            "s.yaml: methods: hparams of agfa: unknown key 'etaa'; did you mean 'eta'",
        ),
        ({"methods": [{"erm": {}, "agfa": {}}]}, "s.yaml: methods: one method an entry"),
        ({"methods": []}, "s.yaml: methods: "),
        ({"targets": ["phto"]}, "s.yaml: targets: unknown domain of PACS 'phto'; did you mean 'photo'?"),
        ({"protocol": "leave_two_out"}, "s.yaml: protocol: input should be 'leave_one_out' or 'single_source'"),
        ({"protocol": "single_source", "targets": ["photo"]}, "s.yaml: targets: single_source"),
        ({"protocol": "single_source", "methods": "coral"}, "s.yaml: coral needs at least 2 source domains"),
        ({"metods": ["erm"]}, "s.yaml: unknown key 'metods'; did you mean 'methods'?"),
        ({"settings": {"stepz": 3}}, "s.yaml: settings: unknown key 'stepz'; did you mean 'steps'?"),
        ({"settings": {"steps": "many"}}, "s.yaml: settings: steps: input should be a valid integer"),
        ({"settings": {"seed": 3}}, "s.yaml: settings: seed is not"),
        ({"settings": {"devices": 2}}, "s.yaml: settings: devices: "),
        ({"hparams": {"etta": 1}}, "s.yaml: hparams: unknown hyperparameter 'etta'; there are: lr, weight_decay"),
        ({"hparams": {"lr": -1}}, "s.yaml: hparams of erm: lr: "),
        ({"grid": {"lr": []}}, "s.yaml: grid.lr: "),
        ({"seeds": -1}, "s.yaml: seeds: "),
        ({"seeds": [-1]}, "s.yaml: seeds.0: "),
        ({"selection": "best"}, "s.yaml: selection.0: "),
        ({"averaging": "sawd"}, "s.yaml: averaging.0: "),
        ({"parts": {}}, "s.yaml: parts: a list"),
        ({"parts": [{}, {"methods": ["agva"]}]}, "s.yaml: part 2: methods: unknown algorithm 'agva'"),
    ],
    ids=str,
)
def test_mistakes_name_the_file_and_the_key(wrong: dict[str, Any], error: str) -> None:
    found = said(**{"datasets": "PACS", "methods": "erm", **wrong})
    assert error in found
    assert "\n" not in found


def test_many_runs_expand_quickly() -> None:
    """10,000 take 5 seconds or so."""
    began = time.monotonic()
    found = runs(datasets=["PACS", "VLCS"], methods=["erm", "coral", "mmd"], seeds=3, draws=14)
    assert len(found) == 2 * 4 * 3 * 3 * 14
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("name", shipped())
def test_shipped_sweeps_expand_without_their_data(name: str) -> None:
    found = expand(SHIPPED / f"{name}.yaml", Path("out"))
    assert 20 < len(summary(name)) < 110
    small = name.endswith("_small")
    assert (f"{name}_small" in shipped()) != small or name == "digits"
    for config in found:
        settings = CATALOG[config.data.lower()].settings
        if small:
            assert config.seed == 0
            assert config.steps <= 300
        elif name != "digits":  # the paper's settings, which the catalog has
            assert (config.image_size, config.evaluate_every) == (settings.image_size, settings.evaluate_every)
            assert (config.batch_size, config.swad_ratio) == (settings.batch_size, settings.swad_ratio)
            assert {c.seed for c in found} == {0, 1, 2}
            assert config.data == "DomainNet" or config.steps == settings.steps


@pytest.mark.parametrize("name", ["main", "domainnet"])
def test_on_domainnet_all_learn_from_as_many_source_images(name: str) -> None:
    found = [c for c in expand(SHIPPED / f"{name}.yaml", Path("out")) if c.data == "DomainNet"]
    assert {c.steps * source_batch(c) for c in found} == {30000 * 16}
    assert {c.steps for c in found if c.algorithm == "agfa"} == {30000}
    assert {c.steps for c in found if c.algorithm == "erm"} == {15000}


TABLES = {  # of the paper, and the sweep that fills each
    "main": "main",
    "abl_study": "ablations",
    "pacs": "pacs",
    "vlcs": "vlcs",
    "oh": "officehome",
    "ti": "terraincognita",
    "dn": "domainnet",
    "abl_eta": "eta",
    "abl_alpha": "alpha",
    "resnet18_pacs": "resnet18_pacs",
    "cmnist": "coloredmnist",
    "rmnist": "rotatedmnist",
    "ss_pacs": "single_source",
}


def test_every_table_of_the_paper_has_a_sweep() -> None:
    assert set(published.read()["table"]) == set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_the_paper_is_trained(table: str) -> None:
    """On its dataset, with its backbone, domain by domain, at its value of what is varied."""
    found = expand(SHIPPED / f"{TABLES[table]}.yaml", Path("out"))
    trained = {
        (c.data, c.backbone.partition(".")[0], row_of(c.algorithm, c.hparams, model))
        for c in found
        for model in ("best", c.averaging)
    }
    printed = published.read().filter(table=table)
    rows = {tuple(row) for row in printed.select("dataset", "backbone", "row").unique().iter_rows() if row[0]}
    assert {(data, backbone.replace("convnet4", "convnet"), row) for data, backbone, row in rows} <= trained
    varied = {tuple(setting.split("=")) for setting in printed["setting"].unique() if "=" in setting}
    assert all(any(c.hparams[key] == float(value) for c in found) for key, value in varied)
    single = set(printed["protocol"]) == {"single_source"}
    assert all((len(c.source) if single else len(c.target)) == 1 for c in found)


def test_the_sweep_of_digits_trains_everything_there_is() -> None:
    found = expand(SHIPPED / "digits.yaml", Path("out"))
    trained = {row_of(c.algorithm, c.hparams, model) for c in found for model in ("best", c.averaging)}
    assert set(algorithms.recipes()) <= trained
    assert {c.target for c in found} == {("mnist_m",)}
    assert len({c.steps * c.batch_size for c in found}) == 1
