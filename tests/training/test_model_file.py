"""A model is two files that stand on their own, and a damaged one says what is wrong in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import agfa as package
from agfa.errors import UsageError
from agfa.nn.backbones import weights_hash
from agfa.nn.heads import BayesianLinear
from agfa.training.model_file import FORMAT, Audit, ModelCard, load, save
from support import CLASSES


@pytest.fixture(scope="module")
def trained(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support import QUICK

    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**QUICK, data=str(images_made_once), target="sky", out=folder / "run").folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_card_says_all_that_predicting_needs(run: Path) -> None:
    card = json.loads((run / "model.json").read_text())
    assert card["classes"] == list(CLASSES)
    assert (card["sources"], card["targets"]) == (["ink", "paper"], ["sky"])
    assert (card["backbone"], card["algorithm"]) == ("convnet", "agfa")
    assert card["hparams"]["initial_sd"] == 0.01
    assert (card["image_size"], card["channels"], card["mean"], card["std"]) == (8, 3, [0.5] * 3, [0.5] * 3)
    assert (card["model"], card["format"]) == ("swad", 2)
    assert len(card["initial_weights"]) == 16


def test_initial_weights_are_those_before_training(run: Path, images_made_once: Path, quick: dict[str, Any]) -> None:
    """The digest is of the backbone that the seed makes, not of what became of it."""
    network, card = load(run)
    assert weights_hash(network.backbone) != card.initial_weights
    same = package.train(**quick, data=str(images_made_once), target="ink", out="other").folder
    assert load(same)[1].initial_weights == card.initial_weights
    other = package.train(**quick, data=str(images_made_once), target="ink", seed=1, out="seed1").folder
    assert load(other)[1].initial_weights != card.initial_weights


def test_what_is_loaded_is_what_was_saved(run: Path) -> None:
    network, card = load(run)
    assert not network.training
    for key, value in safetensors.torch.load_file(run / "model.safetensors").items():
        assert torch.equal(network.state_dict()[key], value)
    assert isinstance(network.head, BayesianLinear)
    save(Path("copy"), network.state_dict(), card)
    assert Path("copy.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert Path("copy.json").read_bytes() == (run / "model.json").read_bytes()


def test_any_of_the_runs_models_can_be_loaded(run: Path) -> None:
    for name in ("last", "best", "swad", "oracle"):
        assert load(run / "models" / f"{name}.safetensors")[1].model == name
    assert load(run)[1] == load(run / "model.safetensors")[1]


def test_loading_leaves_random_numbers_alone(run: Path) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    load(run)
    assert torch.equal(torch.rand(3), want)


def test_a_timm_backbone_too(images_made_once: Path, quick: dict[str, Any]) -> None:
    settings = {**quick, "backbone": "resnet18", "image_size": 32, "steps": 1, "algorithm": "erm"}
    folder = package.train(**settings, data=str(images_made_once), target="sky", out="resnet").folder
    network, card = load(folder)
    assert card.backbone == "resnet18.tv_in1k"
    assert isinstance(network.head, torch.nn.Linear)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edited(run: Path) -> None:
        card = json.loads((run / "model.json").read_text())
        change(card)
        (run / "model.json").write_text(json.dumps(card))

    return edited


def truncated(run: Path) -> None:
    file = run / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda run: (run / "model.safetensors").unlink(),
        "has no model.safetensors: the run has not finished",
    ),
    "no card": (lambda run: (run / "model.json").unlink(), r"model\.json is missing"),
    "no JSON": (lambda run: (run / "model.json").write_text("{"), r"model\.json cannot be read"),
    "not UTF-8": (lambda run: (run / "model.json").write_bytes(b"\xff"), r"model\.json cannot be read"),
    "a list": (lambda run: (run / "model.json").write_text("[]"), r"model\.json"),
    "unknown key": (edit(lambda card: card.update(clases=[])), "unknown key 'clases'; did you mean 'classes'"),
    "missing key": (edit(lambda card: card.pop("mean")), "mean: field required"),
    "a later format": (edit(lambda card: card.update(format=3)), "format 3, and this agfa reads up to 2; install a"),
    "no format": (edit(lambda card: card.update(format="2.0")), "format: input should be 2, not '2.0'"),
    "a cold temperature": (edit(lambda card: card.update(temperature=0)), "temperature: input should be greater"),
    "another method": (
        edit(lambda card: card.update(algorithm="erm", hparams={})),
        "does not hold the model that model.json describes",
    ),
    "another class": (edit(lambda card: card["classes"].append("x")), "does not hold the model that model.json"),
    "unknown backbone": (edit(lambda card: card.update(backbone="convnett")), "unknown backbone 'convnett'"),
    "truncated": (truncated, "does not hold the model that model.json describes"),
    "empty": (lambda run: (run / "model.safetensors").write_bytes(b""), "does not hold the model"),
    "pickle": (lambda run: torch.save({}, run / "model.safetensors"), "does not hold the model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models(damage: str, run: Path) -> None:
    spoil, said = DAMAGES[damage]
    spoil(run)
    with pytest.raises(UsageError, match=said) as error:
        load(run)
    assert "\n" not in str(error.value)


def test_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.safetensors does not exist"):
        load(tmp_path / "nothing.safetensors")
    with pytest.raises(UsageError, match="the run has not finished"):
        load(tmp_path)


# Cards as each earlier version wrote them, kept as they were.
WRITTEN = sorted((Path(__file__).parent / "cards").glob("format-*.json"))


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.stem)
def test_a_model_of_an_earlier_format_predicts_as_it_did(file: Path, run: Path) -> None:
    old = json.loads(file.read_text(encoding="utf-8"))
    assert old["format"] == int(file.stem.removeprefix("format-")) < FORMAT
    (run / "model.json").write_bytes(file.read_bytes())
    network, card = load(run)
    assert card.model_dump(mode="json") == {**old, "format": FORMAT, "temperature": 1.0, "audit": None}
    save(Path("new"), network.state_dict(), card)
    assert load(Path("new.safetensors"))[1] == card


def test_every_earlier_format_is_kept() -> None:
    assert [file.stem for file in WRITTEN] == [f"format-{n}" for n in range(1, FORMAT)]


def test_a_card_carries_what_an_audit_found(run: Path) -> None:
    network, card = load(run)
    audit = Audit(
        expected=0.7,
        low=0.5,
        high=0.9,
        domains={"ink": 0.6, "paper": 0.8},
        target_images={"ink": 24, "paper": 24},
        temperature=1.3,
        coverage=((0.9, 0.25, 1.0), (0.0, 1.0, 0.7)),
    )
    save(Path("final"), network.state_dict(), card.model_copy(update={"audit": audit, "temperature": 1.5}))
    _, found = load(Path("final.safetensors"))
    assert (found.audit, found.temperature) == (audit, 1.5)


def test_a_card_has_a_schema() -> None:
    assert ModelCard.model_fields.keys() >= {"classes", "backbone", "algorithm", "hparams", "image_size", "step"}
