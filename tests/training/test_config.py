"""One configuration, the same as keywords, flags and YAML; complete and re-runnable once resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agfa.errors import UsageError
from agfa.training.config import INCIDENTAL, CompleteConfig, TrainConfig, differences, dump, parse, read
from agfa.training.setup import complete
from support import Agfa


def resolved(**settings: Any) -> CompleteConfig:
    return complete(parse({"data": "digits", "target": ("mnist_m",), **settings}, TrainConfig))[0]


def test_what_is_left_open_comes_from_the_dataset() -> None:
    config = resolved()
    assert (config.backbone, config.image_size, config.channels, config.augment) == ("convnet", 16, 3, False)
    assert (config.steps, config.evaluate_every, config.batch_size, config.swad_ratio) == (900, 50, 16, 1.3)
    assert config.hparams["lr"] == 1e-3
    assert config.hparams["eta"] == 0.1
    assert config.source == ("mnist", "optdigits", "print")
    assert config.out == Path("runs/digits/agfa-swad-target-mnist_m-seed0")


def test_a_folder_takes_the_papers_settings(tiny: Path) -> None:
    config = resolved(data=str(tiny), target=("sky",))
    assert (config.backbone, config.image_size, config.steps, config.batch_size) == ("resnet50", 224, 5000, 32)
    assert (config.augment, config.evaluate_every, config.hparams["lr"]) == (True, 100, 5e-5)


def test_what_is_given_wins() -> None:
    config = resolved(image_size=32, augment=True, steps=3, hparams={"lr": 0.5})
    assert (config.image_size, config.augment, config.steps, config.hparams["lr"]) == (32, True, 3, 0.5)
    assert resolved(swad_ratio=1.0).swad_ratio == 1.0


@pytest.mark.parametrize(
    ("settings", "selection", "chosen"),
    [
        ({}, "swad", "swad"),
        ({"averaging": "swa"}, "swa", "swa"),
        ({"averaging": "none"}, "validation", "best"),
        ({"selection": "validation"}, "validation", "best"),
        ({"selection": "last"}, "last", "last"),
        ({"selection": "oracle"}, "oracle", "oracle"),
    ],
)
def test_selections(settings: dict[str, Any], selection: str, chosen: str) -> None:
    config = resolved(**settings)
    assert (config.selection, config.chosen) == (selection, chosen)


def test_batch_norm_is_frozen_if_pretrained() -> None:
    assert resolved().freeze_batchnorm
    assert not resolved(weights="none").freeze_batchnorm
    assert resolved(weights="none", freeze_batchnorm=True).freeze_batchnorm


def test_the_folder_is_the_same_for_the_same_command() -> None:
    folders = [
        resolved(),
        resolved(seed=1),
        resolved(algorithm="erm"),
        resolved(averaging="none"),
        resolved(target=("print",)),
        resolved(target=()),
        resolved(target=(), source=("print",)),
    ]
    assert len({str(config.out) for config in folders}) == len(folders)


def test_nothing_is_left_open_and_yaml_takes_it_back(tmp_path: Path) -> None:
    config = resolved(hparams={"eta": 0.3}, precision="bf16-mixed")
    (tmp_path / "c.yaml").write_text(dump(config))
    assert parse(read(tmp_path / "c.yaml"), CompleteConfig) == config
    assert complete(parse(read(tmp_path / "c.yaml"), TrainConfig))[0] == config
    assert None not in yaml.safe_load(dump(config)).values()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**31),
            "steps": st.integers(1, 10**6),
            "val_fraction": st.floats(0.01, 0.99),
            "stop_early": st.booleans(),
            "precision": st.sampled_from(["32", "bf16-mixed"]),
            "swad_ratio": st.floats(1, 9),
            "target": st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
            "hparams": st.dictionaries(st.text(max_size=5), st.floats(0, 1) | st.none() | st.booleans()),
        },
    )
)
def test_yaml_changes_nothing(values: dict[str, Any]) -> None:
    config = parse(values, TrainConfig)
    assert parse(yaml.safe_load(dump(config)), TrainConfig) == config


def test_differences_are_those_that_matter() -> None:
    old = resolved()
    new = resolved(seed=2, steps=9, out="elsewhere", checkpoint_seconds=1, devices=4, accelerator="cpu")
    assert differences(old, new) == ["steps is 900 there, 9 here", "seed is 0 there, 2 here"]
    assert differences(old, old) == []
    assert TrainConfig.model_fields.keys() >= INCIDENTAL


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seeds": 1}, "here: unknown key 'seeds'; did you mean 'seed'"),
        ({"val_fraction": 0}, "val_fraction: input should be greater than 0, not 0"),
        ({"channels": 4}, "channels: "),
        ({"averaging": "mean"}, "averaging: .*'none', 'swa' or 'swad'"),
        ({"steps": 1.5}, "steps: "),
        ({"steps": -1, "seed": -1}, r"steps: .*\(and 1 more\)"),
    ],
)
def test_what_is_not_allowed(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(values, TrainConfig, "here")


def test_flags_are_the_same_settings(agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainConfig] = []

    def caught(config: TrainConfig, display: object) -> None:
        seen.append(config)
        raise UsageError("enough")

    monkeypatch.setattr("agfa.training.trainer.train", caught)
    agfa("train", "--data", "x", "--target", "a", "--target", "b", "--hparams.eta", "0.5", "--hparams.mix", "false")
    agfa("train", "--data=x", "--no-augment", "--stop-early", "--seed", "3", "--no-track-target", "--out", "o/p")
    agfa("train", "--data", "x", "--source", "a", "b", "--channels", "1", "--image-size", "32")
    Path("c.yaml").write_text("data: x\ntarget: [a]\nhparams: {eta: 0.1, alpha: 0.3}\nseed: 4\naugment: true\n")
    agfa("train", "--config", "c.yaml", "--hparams.eta", "1", "--seed", "5")
    one, two, three, four = (config.model_dump(exclude_unset=True) for config in seen)
    assert (one["data"], one["target"]) == ("x", ("a", "b"))
    assert float(one["hparams"]["eta"]) == 0.5
    assert two | {"hparams": {}} == {
        "data": "x",
        "augment": False,
        "stop_early": True,
        "seed": 3,
        "track_target": False,
        "out": Path("o/p"),
        "hparams": {},
    }
    assert (three["source"], three["channels"], three["image_size"]) == (("a", "b"), 1, 32)
    assert (four["seed"], four["target"], four["augment"]) == (5, ("a",), True)
    assert {key: float(value) for key, value in four["hparams"].items()} == {"eta": 1, "alpha": 0.3}
