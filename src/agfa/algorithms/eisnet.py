"""EISNet: Learning from Extrinsic and Intrinsic Supervisions for Domain Generalization (Wang, Yu, Li, Fu, Heng;
ECCV 2020).

Beside their classes, the features of an image x learn how it relates to others, and how it is put together:

    min  E[-log softmax(W·phi(x~))_y]  +  λ_m·L_metric  +  λ_j·E[-log softmax(V·phi(x~))_o]

x~ is x with its 3 x 3 tiles in the order o, one of `permutations` or, for a share `whole` of the images, as they are
(o = 0). With e = U·phi, divided by its length, and a momentum encoder e', which after every step moves the share
1 - `momentum` of the way to e,

    L_metric = mean over triplets (a, p, n) of  max(0, |e(x~_a) - e'(x_p)|² - |e(x~_a) - e'(x_n)|² + margin)

for all pairs a, p of one class in the minibatch, each with up to `negatives` (K) random ones of the images n of other
classes that are farther than p, but by less than the margin; n from a memory of the last `memory` embeddings e'.

Settings as in the authors' code, and its choice of n. There, a is before p in the minibatch, which is shuffled; here
domains follow one another, and both orders count. Each pair there draws its own n with replacement; here all take
the first K of the memory in one random order, which is the same on average. The code's 30 permutations come from a
search; here they are maps s·x + t over the field of nine elements, of which any two agree in one place at most. Where
a side is no multiple of 3, the last one or two lines of pixels stay. At λ_m = λ_j = 0 images stay whole: it is ERM.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from agfa.algorithms.base import Algorithm, Backward, Problem, adam, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone

WIDTH = 128  # of the embedding
GRID = 3  # tiles a side
NOBODY = -1  # the class of what is not yet in the memory


class Hparams(BaseHparams, frozen=True):
    """Values of the authors' code for PACS; it publishes no search: that of the weights is ours."""

    metric: Annotated[float, LogUniform(5e-2, 5e0)] = Field(0.5, ge=0, description="weight λ_m of the triplets")
    jigsaw: Annotated[float, LogUniform(7e-2, 7e0)] = Field(0.7, ge=0, description="weight λ_j of the order of tiles")
    margin: float = Field(2.0, gt=0, description="margin of the triplets")
    negatives: int = Field(256, ge=1, description="negatives K of each pair, at most")
    memory: int = Field(1024, ge=1, description="embeddings remembered")
    momentum: float = Field(0.999, ge=0, le=1, description="share of itself that the momentum encoder keeps a step")
    whole: float = Field(0.9, ge=0, le=1, description="share of images whose tiles are left as they are")
    permutations: int = Field(30, ge=1, le=71, description="other orders of the tiles")


class EISNet(Algorithm):
    """Momentum metric learning and jigsaw puzzles."""

    name = "eisnet"
    title = "features that also tell images of one class from others, and the order of an image's tiles"
    paper = "Wang et al. 2020"
    hparams_type = Hparams

    hparams: Hparams
    memory: Tensor
    memory_labels: Tensor
    orders: Tensor

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        self.embedding = nn.Linear(backbone.n_features, WIDTH)
        self.jigsaw = nn.Linear(backbone.n_features, hparams.permutations + 1)
        self.momentum_encoder = copy.deepcopy(nn.Sequential(backbone, self.embedding)).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(hparams.memory, WIDTH))
        self.register_buffer("memory_labels", torch.full((hparams.memory,), NOBODY))
        self.register_buffer("orders", tile_orders()[: hparams.permutations + 1], persistent=False)
        tasks = [*self.embedding.parameters(), *self.jigsaw.parameters()]
        self.optimizers["tasks"] = adam((tasks, hparams.lr), weight_decay=hparams.weight_decay)

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the three losses, and one of the momentum encoder after it."""
        x, y, *_ = batch
        h, n = self.hparams, len(x)
        order = torch.randint(len(self.orders), (n,), device=x.device)
        order = order.where(torch.rand(n, device=x.device) >= (h.whole if h.jigsaw else 1), 0)
        features = self.network.features(arrange(x, self.orders[order]))
        nll = F.cross_entropy(self.network.head(features), y)
        jigsaw = F.cross_entropy(self.jigsaw(features), order)

        queries = F.normalize(self.embedding(features).to(features.dtype))
        with torch.no_grad():
            keys = F.normalize(self.momentum_encoder.eval()(x).to(features.dtype))
        self.memory.copy_(torch.cat([self.memory, keys])[-h.memory :])
        self.memory_labels.copy_(torch.cat([self.memory_labels, y])[-h.memory :])
        metric = self.triplets(queries, keys, y)

        loss = nll + h.metric * metric + h.jigsaw * jigsaw
        descend(loss, backward, self.optimizers["model"], self.optimizers["tasks"])
        self.follow()
        return detached(nll=nll, metric=metric, jigsaw=jigsaw)

    def triplets(self, queries: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
        """L_metric; 0 where there are no triplets."""
        h = self.hparams
        order = torch.randperm(h.memory, device=labels.device)
        to_keys, to_memory = squared_distances(queries, keys), squared_distances(queries, self.memory[order])
        with torch.no_grad():
            pair = (labels.unsqueeze(1) == labels) & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
            theirs = self.memory_labels[order]
            other = (labels.unsqueeze(1) != theirs) & (theirs != NOBODY)
            farther = to_memory.unsqueeze(1) - to_keys.unsqueeze(2)  # anchor, positive, negative
            fit = pair.unsqueeze(2) & other.unsqueeze(1) & (farther > 0) & (farther < h.margin)
            taken = fit & (fit.cumsum(2, dtype=torch.int32) <= h.negatives)
        # the maximum of the taken ones is never 0: they are farther by less than the margin
        hinges = ((to_keys + h.margin) * taken.sum(2)).sum() - (to_memory * taken.sum(1)).sum()
        return hinges / taken.sum().clamp(min=1)

    @torch.no_grad()
    def follow(self) -> None:
        """A step of the momentum encoder, with its batch-norm statistics."""
        theirs = nn.Sequential(self.network.backbone, self.embedding).state_dict().values()
        pairs = zip(self.momentum_encoder.state_dict().values(), theirs, strict=True)
        slow, fast = zip(*((s, f) for s, f in pairs if s.is_floating_point()), strict=True)
        torch._foreach_lerp_(slow, fast, 1 - self.hparams.momentum)


def squared_distances(one: Tensor, other: Tensor) -> Tensor:
    """Between vectors of length 1."""
    with torch.autocast(one.device.type, enabled=False):
        return 2 - 2 * one @ other.T


def tile_orders() -> Tensor:
    """All x -> s·x + t, s other than 0, over the field of nine elements a + b·i: (72, 9), the identity first."""
    field = list(product(range(3), repeat=2))
    scales = [(1, 0), *((a, b) for a, b in field if (a, b) not in ((0, 0), (1, 0)))]
    return torch.tensor(
        [
            [(s * a - r * b + t) % 3 * 3 + (s * b + r * a + u) % 3 for a, b in field]  # (s + r·i)·(a + b·i) + t + u·i
            for s, r in scales
            for t, u in field
        ]
    )


def arrange(images: Tensor, orders: Tensor) -> Tensor:
    """Images whose k-th tile is their orders[k]-th."""
    n, channels = images.shape[:2]
    height, width = (side // GRID for side in images.shape[2:])
    core = images[:, :, : GRID * height, : GRID * width]
    tiles = core.unfold(2, height, height).unfold(3, width, width).flatten(2, 3)
    moved = tiles.gather(2, orders.view(n, 1, -1, 1, 1).expand_as(tiles)).view(n, channels, GRID, GRID, height, width)
    arranged = images.clone()
    arranged[:, :, : GRID * height, : GRID * width] = moved.transpose(3, 4).reshape_as(core)
    return arranged
