"""From a configuration to what a run starts with: the complete configuration, the splits, the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from agfa import algorithms
from agfa.algorithms.base import Algorithm, Problem
from agfa.data import catalog
from agfa.data.batches import Part
from agfa.data.benchmark import Settings
from agfa.data.domains import DomainDataset
from agfa.data.own import FORMS
from agfa.data.splits import Roles, assign_roles, hold_out
from agfa.data.store import Images
from agfa.errors import UsageError
from agfa.nn.backbones import build_backbone
from agfa.nn.recompute import recompute_blocks
from agfa.training.config import CompleteConfig, TrainConfig, parse
from agfa.training.evaluate import Place


def complete(config: TrainConfig) -> tuple[CompleteConfig, DomainDataset, Roles]:
    """Fill in what is left open, from the dataset's settings and the method's defaults, and check the rest."""
    if config.data is None:
        raise UsageError(f"say what to train on: --data with {FORMS}, or one of {', '.join(catalog.CATALOG)}")
    dataset, settings = catalog.load(config.data)
    done, roles = resolve(config, dataset, settings)
    return done, dataset, roles


def resolve(config: TrainConfig, dataset: DomainDataset, settings: Settings) -> tuple[CompleteConfig, Roles]:
    """Likewise, from the names of the dataset's domains alone: its images need not be here."""
    roles = assign_roles(dataset, config.target, config.source)
    recipe = algorithms.get(config.algorithm)
    method = recipe.method
    dataset_hparams = {k: v for k, v in settings.hparams.items() if k in method.hparams_type.model_fields}
    hparams = recipe.hparams({**dataset_hparams, **config.hparams})
    averaging = config.averaging or recipe.averaging
    defaults = {
        "averaging": averaging,
        "swad_ratio": settings.swad_ratio,
        "selection": "validation" if averaging == "none" else averaging,
        "backbone": settings.backbone,
        "freeze_batchnorm": config.weights != "none",
        "track_target": config.selection == "oracle",
        "image_size": settings.image_size,
        "channels": settings.channels,
        "augment": settings.augment,
        "steps": settings.steps,
        "evaluate_every": settings.evaluate_every,
        "batch_size": settings.batch_size,
        "out": _default_folder(config, f"{recipe.name}-{averaging}", dataset, roles),
    }
    given = config.model_dump()
    chosen = {key: value if value is not None else defaults.get(key) for key, value in given.items()}
    if config.batch_size == "auto":  # until agfa.training.memory has found it
        chosen["batch_size"] = method.passes(hparams)
    chosen |= {"algorithm": recipe.name, "hparams": hparams.model_dump(mode="json")}
    chosen |= {"target": roles.targets, "source": roles.sources}
    done = parse(chosen, CompleteConfig)
    if len(roles.sources) < method.min_domains:
        raise UsageError(
            f"{recipe.name} needs at least {method.min_domains} source domains, and there is only "
            f"{', '.join(roles.sources)}; hold out fewer, or take a method that learns from one (agfa algorithms)"
        )
    passes = method.passes(hparams)
    if done.batch_size % passes:
        raise UsageError(
            f"batch_size {done.batch_size} must be a multiple of {passes}: {recipe.name} passes each "
            f"source image through the backbone {passes} times"
        )
    if done.selection in ("swa", "swad") and done.selection != done.averaging:
        raise UsageError(f"selection {done.selection} needs --averaging {done.selection}")
    if done.selection == "oracle" and not (roles.targets and done.track_target):
        raise UsageError("selection oracle needs a --target, and --track-target")
    return done, roles


def _default_folder(config: TrainConfig, what: str, dataset: DomainDataset, roles: Roles) -> Path:
    """The folder that the same command always means."""
    held_out = f"target-{'+'.join(roles.targets)}" if roles.targets else "all"
    return Path("runs", dataset.name, f"{what}-{held_out}-seed{config.seed}")


@dataclass(frozen=True)
class Splits:
    """The parts of each domain: sources' training and validation images; targets' 80% and oracle's 20%."""

    train: dict[str, Part]
    val: dict[str, Part]
    test: dict[str, Part]
    oracle: dict[str, Part]

    def evaluated(self, targets: bool) -> list[tuple[Place, Part]]:
        """All that is measured."""
        parts = [(("source", name, "val"), part) for name, part in self.val.items()]
        if targets:
            parts += [(("target", name, "test"), part) for name, part in self.test.items()]
            parts += [(("target", name, "oracle"), part) for name, part in self.oracle.items()]
        return parts


def split(dataset: DomainDataset, images: dict[str, Images], roles: Roles, config: CompleteConfig) -> Splits:
    """Hold out the fraction of every domain, and give the parts their roles."""
    large, small = {}, {}
    for name in (*roles.sources, *roles.targets):
        domain = dataset[name]
        kept, held = hold_out(domain, config.val_fraction, config.seed, config.stratified)
        if not (len(kept) and len(held)):
            raise UsageError(
                f"{dataset.name}/{name} has {len(domain)} images: too few to hold out {config.val_fraction:.0%}"
            )
        large[name] = Part(images[name], domain.labels, kept)
        small[name] = Part(images[name], domain.labels, held)
    return Splits(
        train={name: large[name] for name in roles.sources},
        val={name: small[name] for name in roles.sources},
        test={name: large[name] for name in roles.targets},
        oracle={name: small[name] for name in roles.targets},
    )


def build(config: CompleteConfig, dataset: DomainDataset, splits: Splits) -> Algorithm:
    """The algorithm on its backbone, with initial weights that the seed decides."""
    torch.manual_seed(config.seed)
    backbone = build_backbone(
        config.backbone, config.channels, config.image_size, config.weights, config.freeze_batchnorm
    )
    if config.activation_checkpointing and not recompute_blocks(backbone.body):
        raise UsageError(
            f"{backbone.tag} has no blocks whose activations could be computed twice; in place of "
            "--activation-checkpointing use --accumulate"
        )
    problem = Problem(
        n_classes=len(dataset.classes),
        n_domains=len(splits.train),
        n_images=sum(len(part) for part in splits.train.values()),
        image_shape=(config.channels, config.image_size, config.image_size),
        steps=config.steps,
    )
    recipe = algorithms.get(config.algorithm)
    return recipe.method(backbone, problem, recipe.hparams(config.hparams))


def source_batch(config: CompleteConfig) -> int:
    """Source images for each domain and step: batch_size counts all that go through the backbone."""
    recipe = algorithms.get(config.algorithm)
    return config.batch_size // recipe.method.passes(recipe.hparams(config.hparams))
