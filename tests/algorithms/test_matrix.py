"""Every method, with one to three sources, on two kinds of backbone, averaged or not: runs, resumes, predicts."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from timm.models.efficientnet import _gen_efficientnet_lite

from agfa.algorithms import get, names
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.averaging import Swad
from agfa.data.batches import Batch
from agfa.errors import UsageError
from agfa.nn.backbones import Backbone, build_backbone
from agfa.training import model_file
from agfa.training.config import TrainConfig
from agfa.training.model_file import ModelCard
from agfa.training.setup import complete
from agfa.training.state import Training

SIZES = {"convnet": 8, "efficientnet_lite0": 32}  # pixels
SHARES = (5, 4, 3)  # images of each domain in a batch: never the same number
CLASSES = 4  # of which a batch has three
STEPS = 3


@cache
def fresh(name: str) -> Backbone:
    """EfficientNet-Lite with a fifth of its channels, which is as good here and five times as fast."""
    torch.manual_seed(0)
    if name == "convnet":
        return build_backbone(name, image_size=SIZES[name], weights="none")
    body = _gen_efficientnet_lite(name, channel_multiplier=0.2, depth_multiplier=0.5, num_classes=0)
    return Backbone(body, body.num_features, (0.5,) * 3, (0.5,) * 3, name, freeze_batchnorm=False)


def start(name: str, backbone: str, domains: int, averaging: str) -> Training:
    recipe = get(name)
    size = SIZES[backbone]
    problem = Problem(CLASSES, domains, n_images=100, image_shape=(3, size, size), steps=STEPS)
    torch.manual_seed(1)
    algorithm = recipe.method(copy.deepcopy(fresh(backbone)), problem, recipe.hparams({"lr": 1e-3})).train()
    return Training(algorithm, Swad(patience=1, tolerance=1) if averaging == "swad" else None)


def batch(domains: int, size: int, step: int) -> Batch:
    shares = SHARES[:domains]
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(sum(shares), 3, size, size, generator=generator)
    labels = torch.randint(CLASSES - 1, (len(x),), generator=generator)
    return Batch(x, labels, torch.arange(domains).repeat_interleave(torch.tensor(shares)), shares)


def advance(training: Training, domains: int, steps: int) -> None:
    """Steps as the trainer takes them, with an evaluation after each."""
    algorithm = training.algorithm
    for _ in range(steps):
        torch.manual_seed(100 + training.step)
        algorithm.step = training.step
        shown = algorithm.update(batch(domains, algorithm.problem.image_shape[-1], training.step), plain_backward)
        assert all(torch.isfinite(value) for value in shown.values()), shown
        assert not any(value.requires_grad for value in shown.values())
        training.step += 1
        if training.averaging is not None:
            training.averaging.after_step(algorithm.network)
            training.averaging.after_evaluation(algorithm.network, training.step, loss=1 / training.step)
        training.best.offer(training.step / 10, training.step, algorithm.network)


@pytest.mark.parametrize("averaging", ["none", "swad"])
@pytest.mark.parametrize("backbone", SIZES)
@pytest.mark.parametrize("domains", [1, 2, 3])
@pytest.mark.parametrize("name", names())
def test_runs_resumes_predicts(
    name: str, domains: int, backbone: str, averaging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if domains < get(name).method.min_domains:
        return  # refused at the start: see below
    whole = start(name, backbone, domains, averaging)
    before = copy.deepcopy(whole.algorithm.network.state_dict())
    advance(whole, domains, STEPS - 1)
    saved = tmp_path / "checkpoint.pt"
    torch.save(whole.state_dict(), saved)
    advance(whole, domains, 1)

    resumed = start(name, backbone, domains, averaging)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    advance(resumed, domains, 1)
    ours, theirs = whole.models(), resumed.models()
    assert ours.keys() == theirs.keys() == {"last", "best", *({"swad"} if averaging == "swad" else ())}
    for kind, (_, state) in ours.items():
        assert all(torch.equal(value, theirs[kind][1][key]) for key, value in state.items()), kind
    moved = [key for key, value in ours["last"][1].items() if not torch.equal(value, before[key])]
    assert len(moved) > len(before) / 3  # it learns: most of the network, not its head alone

    monkeypatch.setattr(model_file, "build_backbone", lambda *_, **__: copy.deepcopy(fresh(backbone)))
    predicts(whole.algorithm, ours["swad" if averaging == "swad" else "last"][1], tmp_path / "model")


def predicts(algorithm: Algorithm, state: dict[str, torch.Tensor], path: Path) -> None:
    """What is saved and loaded answers as the network that was trained."""
    problem, backbone = algorithm.problem, algorithm.network.backbone
    card = ModelCard(
        classes=tuple("abcd"),
        backbone=backbone.tag,
        initial_weights="0" * 16,
        image_size=problem.image_shape[-1],
        channels=3,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        algorithm=algorithm.name,
        hparams=algorithm.hparams.model_dump(),
        sources=tuple("xyz"[: problem.n_domains]),
        targets=(),
        model="last",
        step=STEPS,
    )
    model_file.save(path, state, card)
    loaded, _ = model_file.load(path.with_suffix(".safetensors"))
    algorithm.network.load_state_dict(state)
    x = batch(1, problem.image_shape[-1], 99).images
    with torch.no_grad():
        logits = loaded(x)
        assert torch.equal(logits, algorithm.network.eval()(x))
    assert logits.shape == (len(x), CLASSES)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", [name for name in names() if get(name).method.min_domains > 1])
def test_too_few_sources_are_refused_before_anything_is_computed(name: str, tiny: Path) -> None:
    least = get(name).method.min_domains
    with pytest.raises(UsageError, match=f"{name} needs at least {least} source domains, and there is only ink"):
        complete(TrainConfig(data=str(tiny), source=("ink",), algorithm=name))
