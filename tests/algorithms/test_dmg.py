"""DMG against its equations, transcribed in float64, image by image."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.algorithms.dmg import draw, soft_iou
from agfa.data.batches import Batch
from support_stages import batch, build, features_through, gradients, slope, step


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def masked_logits(network, x: Tensor, masks: list[Tensor]) -> Tensor:
    """One image under its masks after stages 2 and 3, and of its features."""

    def change(stage: int, maps: Tensor) -> Tensor:
        return (
            torch.stack([maps[:, c] * masks[stage - 2][c] for c in range(maps.shape[1])], 1)
            if stage in (2, 3)
            else maps
        )

    return network.head(features_through(network, x[None], change)[0] * masks[2])


def transcribed_loss(network, data: Batch, overlap: float, bits: list[Tensor], soft: list[Tensor]) -> Tensor:
    """`bits`: what was drawn for each image; `soft`: the probabilities that it was drawn from, both constants."""
    losses = []
    for i, (x, y) in enumerate(zip(data.images, data.labels, strict=True)):
        d = data.domains[i]
        masks = [
            bits[k][i] + sigmoid(network.masks[k][d]) - soft[k][i] for k in range(3)
        ]  # the bits, with the gradient of the probabilities
        losses.append(F.cross_entropy(masked_logits(network, x, masks)[None], y[None]))
    penalty = 0.0
    for mask in network.masks:
        pairs = []
        for m, other in itertools.combinations(sigmoid(mask), 2):
            shared = sum(a * b for a, b in zip(m, other, strict=True))
            pairs.append(shared / sum(a + b - a * b for a, b in zip(m, other, strict=True)))
        penalty = penalty + sum(pairs) / len(pairs)
    return sum(losses) / len(losses) + overlap * penalty


@pytest.mark.parametrize(("sizes", "overlap"), [((2, 2), 0.5), ((1, 3, 2), 0.1), ((2, 1), 0.0)])
def test_loss_and_gradients_are_those_of_the_equation(sizes, overlap):
    algorithm, data, seed = build("dmg", domains=len(sizes), overlap=overlap), batch(*sizes), 3
    network = copy.deepcopy(algorithm.network)
    torch.manual_seed(seed)
    soft = [sigmoid(mask.detach())[data.domains] for mask in network.masks]
    bits = [torch.bernoulli(m) for m in soft]
    shown = step(algorithm, data, seed)
    wanted = transcribed_loss(network, data, overlap, bits, soft)
    wanted.backward()
    torch.testing.assert_close(shown["nll"] + overlap * shown["overlap"], wanted.detach())
    found = gradients(algorithm.network)
    assert found.keys() == gradients(network).keys() == dict(network.named_parameters()).keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, gradients(network)[key], rtol=1e-6, atol=1e-9)
    loss = lambda: transcribed_loss(network, data, overlap, bits, soft)  # noqa: E731
    by_gradients, by_differences = slope(loss, list(network.parameters()))
    assert by_gradients == pytest.approx(by_differences, rel=1e-5)


def test_overlap_of_masks():
    ones, none = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert soft_iou(ones, ones) == 1
    assert soft_iou(ones, none) == 0
    assert soft_iou(ones, torch.tensor([1.0, 0.0, 1.0, 0.0])) == pytest.approx(1 / 3)
    assert soft_iou(torch.tensor([0.5]), torch.tensor([0.5])) == pytest.approx(0.25 / 0.75)


def test_drawn_masks_are_bits_of_their_probability_each_image_its_own():
    torch.manual_seed(0)
    probabilities = torch.tensor([0.0, 0.2, 0.9, 1.0], requires_grad=True)
    bits = draw(probabilities.expand(2000, 4))
    torch.testing.assert_close(bits.detach(), bits.detach().round())
    torch.testing.assert_close(bits.mean(0), probabilities, atol=0.03, rtol=0)
    (bits.sum(0) * torch.arange(4)).sum().backward()
    assert probabilities.grad.tolist() == [0, 2000, 4000, 6000]


def test_prediction_is_the_mean_of_the_sources_logits_under_soft_masks():
    algorithm, data = build("dmg", domains=3), batch(2, 2, 2)
    step(algorithm, data)
    network = algorithm.network.eval()
    for x, found in zip(data.images, network(data.images), strict=True):
        each = [masked_logits(network, x, [sigmoid(mask[d]) for mask in network.masks]) for d in range(3)]
        torch.testing.assert_close(found, sum(each) / 3)
    torch.testing.assert_close(network(data.images)[:1], network(data.images[:1]))  # alone as in company


def test_overlap_shrinks_where_it_weighs_and_masks_have_their_own_learning_rate():
    shown = {}
    for overlap in (0.0, 30.0):
        algorithm, data = build("dmg", overlap=overlap, mask_lr=0.1), batch(3, 3)
        first = step(algorithm, data)["overlap"]
        for seed in range(20):
            shown[overlap] = step(algorithm, data, seed)["overlap"] / first
    assert shown[30.0] < 0.8 < shown[0.0]
    rates = {id(p): g["lr"] for g in algorithm.optimizers["model"].param_groups for p in g["params"]}
    assert {rates.pop(id(p)) for p in algorithm.network.masks} == {0.1}
    assert set(rates.values()) == {0.01}
    assert len(rates) == len(list(algorithm.parameters())) - 3


def test_unequal_domains_and_a_class_alone_stay_finite():
    algorithm, data = build("dmg", domains=3), batch(1, 4, 2)
    for seed in range(2):
        shown = step(algorithm, Batch(data.images, torch.zeros_like(data.labels), data.domains, data.sizes), seed)
        assert all(value.isfinite() and not value.requires_grad for value in shown.values())
    assert all(value.isfinite().all() for value in algorithm.state_dict().values())
