"""The known datasets: records that are whole, found on disk under any of their names, counted right."""

import os

import pytest

from agfa.data import catalog
from agfa.data.catalog import BENCHMARKS, CATALOG, Place
from agfa.data.check import compare_counts
from agfa.errors import UsageError


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.name)
def test_records_are_whole(benchmark):
    assert benchmark.licence
    assert benchmark.citation
    names = [name for place in benchmark.places for name in (place.name, *place.also)]
    assert len(set(names)) == len(names)
    for place in benchmark.places:
        assert place.total > 0
        if isinstance(place.images, tuple):
            assert len(place.images) == benchmark.classes


def test_totals_are_those_published():
    published = {"PACS": 9991, "VLCS": 10729, "OfficeHome": 15588, "TerraIncognita": 24330, "DomainNet": 586575}
    assert {b.name: b.images for b in BENCHMARKS if b.name in published} == published


def test_the_papers_settings():
    settings = {b.name: b.settings for b in BENCHMARKS}
    assert (settings["VLCS"].evaluate_every, settings["VLCS"].swad_ratio) == (50, 1.2)
    assert (settings["DomainNet"].evaluate_every, settings["DomainNet"].steps) == (500, 30000)
    assert settings["OfficeHome"].hparams == {"alpha": 0.2}
    assert [settings[n].channels for n in ("ColoredMNIST", "RotatedMNIST")] == [2, 1]


def test_folders_go_by_any_of_their_names_and_domains_too(tmp_path, monkeypatch, tiny):
    monkeypatch.setenv("AGFA_DATA", str(tmp_path / "data"))
    vlcs = CATALOG["vlcs"]
    with pytest.raises(
        UsageError, match=r"VLCS is not on this machine; agfa data get VLCS, or put it in .*data/VLCS"
    ):
        vlcs.load()
    root = tmp_path / "data" / "vlcs"
    root.mkdir(parents=True)
    source = next(tiny.iterdir())
    for name in ("CALTECH", "LabelMe", "SUN09"):
        (root / name).symlink_to(source)
    with pytest.raises(UsageError, match="lacks 'VOC2007' of VLCS; it has CALTECH, LabelMe, SUN09"):
        vlcs.load()
    (root / "PASCAL").symlink_to(source)
    dataset, settings = catalog.load("VLCS")
    assert dataset.domain_names == ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    assert settings.swad_ratio == 1.2


def test_counts_that_differ_are_named():
    digits = CATALOG["digits"]
    assert compare_counts(digits.load(), digits) == []
    wrong = (Place("mnist", "MNIST", tuple([250] * 9 + [251])), Place("optdigits", "O", 1), *digits.places[2:])
    found = compare_counts(digits.load(), catalog.dataclasses.replace(digits, places=wrong))
    assert [p.what for p in found] == [
        "class '9' has 250 images, 251 are expected",
        "it has 1797 images, 1 are expected",
    ]


@pytest.mark.slow
def test_real_pacs_has_the_catalogs_counts_in_every_domain_and_class():
    if CATALOG["pacs"].find() is None:
        pytest.skip(f"needs PACS in $AGFA_DATA ({os.environ.get('AGFA_DATA', 'not set')})")
    dataset = CATALOG["pacs"].load()
    assert compare_counts(dataset, CATALOG["pacs"]) == []
    assert dataset.counts().sum() == 9991
