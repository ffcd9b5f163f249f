"""The methods that change feature maps: on all kinds of backbones, in mixed precision, from `train` to `predict`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import agfa as package
from agfa.algorithms import get
from agfa.algorithms.base import Problem, plain_backward
from agfa.data.batches import Batch
from agfa.errors import UsageError
from agfa.nn.backbones import build_backbone
from agfa.training import trainer
from agfa.training.state import Training
from support import Agfa, records, weights
from support_stages import batch, build

METHODS: dict[str, dict[str, Any]] = {
    "mixstyle": {"p": 1.0},
    "efdmix": {"p": 1.0, "mix": "crossdomain"},
    "padain": {"p": 1.0},
    "dson": {},
    "dmg": {},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_backbone_without_stages_is_refused_in_one_line_when_it_is_made(name):
    backbone = build_backbone("vit_tiny_patch16_224", weights="none")
    with pytest.raises(UsageError, match=r"vit_tiny.* has no four convolutional stages.*convnet, ResNets") as caught:
        get(name).method(backbone, Problem(3, 2, 40, (3, 224, 224)), get(name).hparams({}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["convnet", "resnet18", "efficientnet_lite0"])
@pytest.mark.parametrize("name", METHODS)
def test_trains_and_predicts_on_every_kind_of_backbone(name, kind):
    torch.manual_seed(0)
    problem, hparams = Problem(3, 2, 40, (3, 64, 64)), get(name).hparams(METHODS[name])
    algorithm = get(name).method(build_backbone(kind, image_size=64, weights="none"), problem, hparams)
    domains = torch.tensor([0, 0, 1, 1])
    data = Batch(torch.rand(4, 3, 64, 64), torch.tensor([0, 1, 2, 0]), domains, (2, 2))
    shown = algorithm.update(data, plain_backward)
    assert all(value.isfinite() for value in shown.values())
    gradients = {key: p.grad for key, p in algorithm.network.named_parameters()}
    assert not [key for key, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()]
    assert gradients["head.weight"].any()
    rebuilt = algorithm.make_network(build_backbone(kind, image_size=64, weights="none"), problem, hparams)
    rebuilt.load_state_dict(algorithm.network.state_dict())
    assert torch.equal(rebuilt.eval()(data.images), algorithm.network.eval()(data.images))


@pytest.mark.parametrize("name", METHODS)
def test_autocast_leaves_losses_near_those_of_float32(name):
    """Within 5% of each loss, or 0.02: bfloat16 has 8 bits."""
    algorithm, data = build(name, **METHODS[name]).float(), batch(3, 3)
    data = Batch(data.images.float(), data.labels, data.domains, data.sizes)
    torch.manual_seed(1)
    plain = copy.deepcopy(algorithm).update(data, plain_backward)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        shown = algorithm.update(data, plain_backward)
    for key, value in shown.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain[key], rtol=0.05, atol=0.02)
    assert {value.dtype for value in algorithm.state_dict().values()} == {torch.float32}


class Killed(BaseException):
    """What stands for the end of the process."""


@pytest.mark.parametrize("name", METHODS)
def test_trains_resumes_and_predicts(
    name: str, train: Agfa, agfa: Agfa, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hparams = {"lr": 1e-3, **METHODS[name]}
    ended = train(algorithm=name, target="sky", hparams=hparams, averaging="swad", swad_patience=1, out="whole")
    assert ended.status == 0, ended.err
    original = Training.over

    def over(training: Training, config: Any) -> bool:
        if training.step == 3:
            raise Killed
        return original(training, config)

    settings = {**quick, "data": str(tiny), "target": "sky", "algorithm": name, "checkpoint_seconds": 0}
    settings |= {"hparams": hparams, "averaging": "swad", "swad_patience": 1}
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Training, "over", over)
        with pytest.raises(Killed):
            package.train(**settings, out="run")
    assert Path("run/checkpoint").exists()
    torch.manual_seed(5)
    package.train(**settings, out="run")
    assert weights(Path("run")) == weights(Path("whole"))
    assert records(Path("run")) == records(Path("whole"))

    images = sorted(tiny.glob("sky/*/*"))[:3]
    ended = agfa("predict", "run", *images, "--format", "jsonl")
    assert ended.status == 0, ended.err
    assert len(ended.out.splitlines()) == 3


def test_masks_need_two_sources(train: Agfa) -> None:
    ended = train(algorithm="dmg", source="ink")
    assert ended.status == 2
    assert "dmg needs at least 2 source domains, and there is only ink" in ended.error
