"""The scripts in benchmarks/ measure what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from agfa.benchmark.bench import Plan
from agfa.data.domains import from_folder

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_input_is_timed_both_ways(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("input")
    monkeypatch.setattr(module, "BATCH", 8)
    monkeypatch.setattr(module, "SHARE", 6)
    module.make(Path("made"), 30, 227, 227)
    dataset = module.some_of(from_folder(Path("made")), 24)
    assert [len(domain) for domain in dataset.domains] == [8, 8, 8]
    with Image.open(str(dataset.domains[0].images[0])) as image:
        assert (image.format, image.size) == ("JPEG", (227, 227))
    found = module.measure(dataset, 24, repeats=2, cores=1)
    assert all(len(pairs) == 2 and min(map(min, pairs)) > 0 for pairs in found.values())
    for (first, _), (later, _) in zip(found["ours, first epoch"], found["ours, later epochs"], strict=True):
        assert first > later
    module.show("made", found, 1)
    said = capsys.readouterr().out
    assert said.count("pass") + said.count("FAIL") == len(module.BARS)


def test_inputs_are_augmented_as_domainbed_does() -> None:
    image, parts = torch.zeros(3, 20, 30, dtype=torch.uint8), script("input").AUGMENT
    jitter = next(part for part in parts if type(part).__name__ == "ColorJitter")
    assert (jitter.brightness, jitter.hue) == ((0.7, 1.3), (-0.3, 0.3))
    assert script("input").CROP(v2.functional.to_pil_image(image)).size == (224, 224)


def test_growth_is_that_of_the_variant() -> None:
    ratio = script("growth").ratio
    plan = Plan("convnet", image_size=16, images=6, repeats=2)
    assert ratio("erm", plan, {"image_size": 64})[1].median > 3  # 16 times the pixels


@pytest.mark.slow
def test_training_from_a_large_store_takes_little_memory(tmp_path: Path) -> None:
    """Slow: it trains on 21,000 images. The store, of 6 GB, would not fit into what is allowed."""
    _, most = script("memory").measure(6, 20, tmp_path / "large")
    assert most < 2


@pytest.mark.slow
def test_a_store_in_memory_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: as above."""
    from agfa.data import store

    mapped = store._mapped

    def copied(path: Path) -> Any:
        return mapped(path).clone()

    monkeypatch.setattr(store, "_mapped", copied)
    _, most = script("memory").measure(2.5, 2, tmp_path / "large")
    assert most > 2


def test_made_up_runs_are_read() -> None:
    module = script("records")
    for number in range(3):
        module.make_run(Path("runs", f"{number}"), number)
    frame = module.read_runs([Path("runs")])
    assert frame["run"].n_unique() == 3
    assert len(frame.filter(kind="eval", step=5000)) == 3 * 5
