"""What would be wrong without a word: the target's influence, another order of classes, an average's statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

import agfa as package
from agfa.averaging import FIELDS, Mean, renew_statistics
from agfa.data.augment import Augmentation
from agfa.data.batches import training_batches
from agfa.data.domains import from_folder
from agfa.data.inventory import changes, inventory
from agfa.data.store import open_images
from agfa.training import model_file
from agfa.training.config import CompleteConfig, parse, read
from agfa.training.setup import complete, source_batch, split
from agfa.training.state import Training
from support import CLASSES, Agfa, records, weights

POISONED: dict[str, dict[str, Any]] = {
    "erm": {"algorithm": "erm", "averaging": "none"},
    "agfa+swad": {"algorithm": "agfa", "swad_patience": 1, "swad_tolerance": 1, "swad_ratio": 1.0},
}


def poison(domain: Path) -> None:
    """Other labels, and other pixels."""
    (domain / "top").rename(domain / "x")
    (domain / "left").rename(domain / "top")
    (domain / "x").rename(domain / "left")
    for name in CLASSES:
        for i, path in enumerate(sorted((domain / name).iterdir())):
            Image.radial_gradient("L").rotate(i).convert("RGB").resize((30 + i, 50)).save(path)


@pytest.mark.parametrize("method", POISONED)
def test_the_target_decides_nothing(
    method: str, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned, it leaves models, cards, thresholds and records of the sources as they were, but for the oracle's."""
    thresholds: list[dict[str, Any]] = []
    models = Training.models

    def watched(self: Training) -> Any:
        state = self.averaging.state_dict() if self.averaging is not None else {}
        thresholds.append({key: state.get(key) for key in FIELDS})
        return models(self)

    monkeypatch.setattr(Training, "models", watched)
    settings = {**quick, "data": str(tiny), "target": "sky", "steps": 12, "hparams": {"lr": 1e-2}, **POISONED[method]}
    package.train(**settings, out="clean")
    poison(tiny / "sky")
    package.train(**settings, out="poisoned")

    clean, poisoned = weights(Path("clean")), weights(Path("poisoned"))
    assert {"models/last.safetensors", "models/best.safetensors", "models/oracle.safetensors"} <= clean.keys()
    assert {name for name in clean if clean[name] != poisoned.get(name)} <= {"models/oracle.safetensors"}
    cards = [{p.name: p.read_text() for p in Path(r).rglob("*.json")} for r in ("clean", "poisoned")]
    for each in cards:
        del each["oracle.json"], each["environment.json"]
    assert cards[0] == cards[1]
    assert thresholds[0] == thresholds[1]
    assert method == "erm" or thresholds[0]["threshold"] is not None
    of_sources, of_target = (
        [[r for r in records(Path(run)) if r.get("role") == role] for run in ("clean", "poisoned")]
        for role in ("source", "target")
    )
    kept = [[r for r in found if r.get("model") != "oracle"] for found in of_sources]
    assert kept[0] == kept[1]
    assert of_target[0] != of_target[1]  # the poison is one


def test_an_evaluation_says_which_domains_were_trained_on(train: Agfa, agfa: Agfa, tiny: Path) -> None:
    assert train(target="sky", out="run").status == 0
    rows = [line.split() for line in agfa("evaluate", "run", "--data", tiny).out.splitlines()]
    named = [row for row in rows if row and row[0] in ("ink", "paper", "sky")]
    said = {row[0]: " ".join(row[1:3]) for row in named[:3]}  # the first table; a second has shares
    assert (said["ink"], said["paper"]) == ("trained on", "trained on")
    assert said["sky"].startswith("unseen")


def test_the_order_of_classes_is_the_models(train: Agfa, agfa: Agfa, tiny: Path) -> None:
    """A folder in which the classes have other numbers: images are judged by the names."""
    assert train(target="sky", out="run", steps=40, evaluate_every=20).status == 0
    card = json.loads(Path("run/model.json").read_text())
    assert card["classes"] == ["cross", "left", "top"]
    for domain in ("ink", "paper", "sky"):  # cross, left, top have numbers 0, 1, 2; now left and top have 0 and 1
        (tiny / domain / "cross").rename(tiny.parent / f"{domain}-cross")
    model = package.load("run")
    files = [f for name in ("left", "top") for f in sorted((tiny / "sky" / name).iterdir())]
    right = np.mean([p.label == f.parent.name for p, f in zip(model.predict(files), files, strict=True)])
    rows = [line.split() for line in agfa("evaluate", "run", "--data", tiny).out.splitlines()]
    assert f"{right:.1%}" in next(row for row in rows if row and row[0] == "sky")
    assert right > 0.6  # were the numbers taken for the names, all would be wrong but by chance


# --- what a dataset holds


def test_inventories_tell_what_differs(tiny: Path) -> None:
    def now() -> Any:
        dataset = from_folder(tiny)
        return inventory(dataset, open_images(dataset, 8))

    before = now()
    assert len(before) == 9
    assert before["ink/top"][0] == 10
    assert changes(before, now()) == []
    assert changes(before, dict(reversed(before.items())))[0].startswith("the classes or domains are sky/top")
    for domain in ("ink", "paper"):
        for name in CLASSES:
            next((tiny / domain / name).iterdir()).unlink()
    found = changes(before, now())
    assert found[:2] == ["ink/cross had 10 images, now 9", "ink/left had 10 images, now 9"]
    assert found[4:] == ["and 2 more such"]


def test_images_in_memory_have_inventories_too(quick: dict[str, Any]) -> None:
    from agfa.data.digits import digits

    dataset = digits()
    found = [inventory(dataset, open_images(dataset, 28)) for _ in range(2)]
    assert found[0] == found[1]
    assert sum(n for n, *_ in found[0].values()) == sum(len(domain) for domain in dataset.domains)
    assert len({pixels for _, _, pixels, _ in found[0].values()}) == len(found[0])


# --- statistics of batch norm


def trained(tiny: Path, quick: dict[str, Any], frozen: bool) -> CompleteConfig:
    package.train(
        **{**quick, "backbone": "resnet10t", "image_size": 32, "freeze_batchnorm": frozen, "augment": True},
        **{"data": str(tiny), "target": "sky", "algorithm": "swad", "swad_patience": 1, "out": "run"},
    )
    return parse(read(Path("run/config.yaml")), CompleteConfig)


def first_batchnorm(network: nn.Module) -> nn.BatchNorm2d:
    return next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d))


def test_an_average_has_the_statistics_of_its_own_weights(tiny: Path, quick: dict[str, Any]) -> None:
    """Those that the training's minibatches give it, and no average of others' statistics."""
    config, dataset, roles = complete(trained(tiny, quick, frozen=False))
    network, _ = model_file.load(Path("run/models/swad.safetensors"))
    layer, seen = first_batchnorm(network), list[Tensor]()
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].transpose(0, 1).flatten(1)))
    splits = split(dataset, open_images(dataset, config.image_size), roles, config)
    batches = training_batches(
        list(splits.train.values()),
        batch_size=source_batch(config),
        image_size=config.image_size,
        augmentation=Augmentation(),
        seed=config.seed,
        first_step=0,
        device=torch.device("cpu"),
    )
    for _ in range(config.steps):
        network(next(batches).images)
    batches.close()
    torch.testing.assert_close(layer.running_mean, torch.stack([x.mean(1) for x in seen]).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack([x.var(1) for x in seen]).mean(0))
    last = first_batchnorm(model_file.load(Path("run/models/last.safetensors"))[0])
    assert not torch.allclose(last.running_mean, layer.running_mean, rtol=0.1)


def test_frozen_statistics_stay_as_they_are(tiny: Path, quick: dict[str, Any]) -> None:
    trained(tiny, quick, frozen=True)
    swad, last = (safetensors.torch.load_file(f"run/models/{name}.safetensors") for name in ("swad", "last"))
    statistics = [key for key in swad if "running" in key]
    assert statistics
    assert all(torch.equal(swad[key], last[key]) for key in statistics)
    assert all(swad[key].eq(0 if key.endswith("mean") else 1).all() for key in statistics)  # never trained
    assert any(not torch.equal(swad[key], last[key]) for key in swad)


def test_statistics_are_renewed_where_there_are_any() -> None:
    def never() -> Any:
        raise AssertionError("no minibatch is needed")
        yield

    renew_statistics(nn.Linear(3, 2), never())
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5))
    xs = [torch.randn(8, 3) + 2 for _ in range(5)]
    renew_statistics(model, xs)
    torch.testing.assert_close(model[0].running_mean, torch.stack([x.mean(0) for x in xs]).mean(0))
    torch.testing.assert_close(model[0].running_var, torch.stack([x.var(0) for x in xs]).mean(0))
    assert model[0].momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_averages_of_statistics_are_not_the_averages_own() -> None:
    """Why they are taken anew: of w = -1 and w = 1 the average is 0, and what it gives has no variance at all."""
    x, mean = torch.randn(64, 1), Mean()
    for w in (-1.0, 1.0):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
        nn.init.constant_(model[0].weight, w)
        renew_statistics(model, [x])
        mean.add(model.state_dict())
    model.load_state_dict(mean.state)
    assert model[1].running_var.item() == pytest.approx(x.var().item())
    renew_statistics(model, [x])
    assert model[1].running_var.item() == 0
