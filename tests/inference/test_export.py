"""An exported model answers as the model does, in a file that needs no agfa, or there is no file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import agfa as package
from agfa.algorithms import get, names, recipes
from agfa.algorithms.presets import PRESETS
from agfa.data.digits import digits
from agfa.errors import AgfaError, UsageError
from agfa.inference import export as module
from agfa.inference.export import Export, Graph, export
from agfa.inference.pictures import square
from agfa.inference.predictor import Predictor, load
from agfa.inference.real_images import real_images
from agfa.nn.predictive import mean_softmax
from support import CLASSES, DOMAINS, QUICK, Agfa
from support_methods import SHAPE, batch, build

Outputs = dict[str, np.ndarray]


def train(images: Path, folder: Path, algorithm: str) -> Path:
    settings = {**QUICK, "steps": 20, "evaluate_every": 10, "algorithm": algorithm}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**settings, data=str(images), target="sky", out=folder / algorithm).folder


@pytest.fixture(scope="module")
def run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(images_made_once, tmp_path_factory.mktemp("export"), "agfa")


@pytest.fixture(scope="module")
def linear(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(images_made_once, tmp_path_factory.mktemp("export"), "erm")


@pytest.fixture(scope="module")
def exported(run: Path, images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    out = tmp_path_factory.mktemp("onnx") / "m.onnx"
    return export(load(run), out, check=str(images_made_once))


def files(tiny: Path) -> list[Path]:
    return [f for domain in DOMAINS for f in sorted((tiny / domain).rglob("*.*"))]


def squares(paths: list[Path], predictor: Predictor) -> torch.Tensor:
    return torch.stack([square(f, predictor.card.channels, predictor.card.image_size) for f in paths])


def in_onnxruntime(file: Path, pixels: torch.Tensor) -> Outputs:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return dict(
        zip([o.name for o in session.get_outputs()], session.run(None, {"images": pixels.numpy()}), strict=True)
    )


def in_torch(file: Path, pixels: torch.Tensor) -> Outputs:
    return {k: v.detach().numpy() for k, v in torch.export.load(file).module()(pixels).items()}


def agrees(found: Outputs, predictor: Predictor, paths: list[Path]) -> None:
    said = predictor.predict(paths)
    named = [predictor.classes[i] for i in found["logits_mean"].argmax(1)]
    assert named == [answer.label for answer in said]
    want = np.array([list(answer.probabilities.values()) for answer in said])
    assert np.abs(found["probabilities"] - want).max() <= 1e-4


def save_digits(root: Path, domain: str, per_class: int) -> None:
    """The first images of each class as `root`/domain/class/image."""
    found = digits()[domain]
    for label, name in enumerate(digits().classes):
        (root / domain / name).mkdir(parents=True)
        for i in np.flatnonzero(found.labels == label)[:per_class]:
            Image.fromarray(found.images[i]).save(root / domain / name / f"{i:05}.png")


def test_a_thousand_digits_are_the_same_for_predictor_evaluation_torch_and_onnx(tmp_path: Path) -> None:
    for domain in ("mnist", "optdigits", "print"):
        save_digits(tmp_path / "sources", domain, 8)
    save_digits(tmp_path / "photos", "mnist_m", 100)
    settings = {**QUICK, "image_size": 16, "batch_size": 16, "steps": 20, "evaluate_every": 20, "averaging": "none"}
    run = package.train(**{**settings, "track_target": False}, data=str(tmp_path / "sources"), out="run").folder
    predictor = load(run)
    # a temperature of its own, so that a graph without it would show
    predictor.card = predictor.card.model_copy(update={"temperature": 1.7})
    paths = sorted((tmp_path / "photos").rglob("*.png"))
    labels = np.array([predictor.classes.index(path.parent.name) for path in paths])
    (score,) = predictor.evaluate(str(tmp_path / "photos")).values()
    pixels = squares(paths, predictor)
    for format, answers in (("torch", in_torch), ("onnx", in_onnxruntime)):
        done = export(predictor, tmp_path / f"m.{format}", format, check=str(tmp_path / "photos"))
        found = answers(done.file, pixels)
        agrees(found, predictor, paths)
        assert (found["logits_mean"].argmax(1) == labels).mean() == score.accuracy
        loss = torch.nn.functional.cross_entropy(torch.tensor(found["logits_mean"]), torch.tensor(labels))
        assert loss.item() == pytest.approx(score.loss, abs=1e-4)
        assert (done.agreement.images, done.agreement.same_class) == (1000, 1000)
        assert done.agreement.accuracy == (score.accuracy, score.accuracy)


def test_mean_and_variance_are_the_posteriors(exported: Export, run: Path, tiny: Path) -> None:
    predictor = load(run)
    pixels = squares(files(tiny)[:7], predictor)
    with torch.no_grad():
        mu, sigma = predictor.network.head.moments(predictor.network.features(pixels.float() / 255))
    found = in_onnxruntime(exported.file, pixels)
    assert list(found) == ["logits_mean", "logits_variance", "probabilities"]
    np.testing.assert_allclose(found["logits_mean"], mu, atol=1e-5)
    np.testing.assert_allclose(found["logits_variance"], sigma.square(), rtol=1e-4)


def test_an_ordinary_head_has_no_variance(linear: Path, tiny: Path) -> None:
    predictor = load(linear)
    done = export(predictor, tiny / "m.pt2", "torch", check=str(tiny))
    found = in_torch(done.file, squares(files(tiny), predictor))
    assert list(found) == ["logits_mean", "probabilities"]
    agrees(found, predictor, files(tiny))


def test_any_number_of_images_and_each_on_its_own(exported: Export, run: Path, tiny: Path) -> None:
    pixels = squares(files(tiny)[:33], load(run))
    whole = in_onnxruntime(exported.file, pixels)
    parts = [in_onnxruntime(exported.file, part) for part in pixels.split([1, 2, 30])]
    for name, value in whole.items():
        np.testing.assert_allclose(np.concatenate([part[name] for part in parts]), value, atol=1e-5)
    (images,) = onnxruntime.InferenceSession(str(exported.file)).get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 3, 8, 8])


def test_what_stands_beside_it_is_enough_to_run_it(exported: Export, run: Path, tiny: Path) -> None:
    """In a process without agfa and without torch: JSON, numpy, Pillow, onnxruntime."""
    notes = json.loads(exported.file.with_name("m.onnx.json").read_text())
    assert notes["classes"] == list(CLASSES)
    assert notes["input"] == {"images": ["n", 3, 8, 8], "type": "uint8"}
    assert notes["outputs"] == ["logits_mean", "logits_variance", "probabilities"]
    assert notes["temperature"] == load(run).card.temperature
    assert notes["checked"]["images"] == 90
    code = (
        "import json, sys, numpy as np, onnxruntime\n"
        "file, data = sys.argv[1:]\n"
        "classes = json.load(open(file + '.json'))['classes']\n"
        "mean = onnxruntime.InferenceSession(file).run(['logits_mean'], {'images': np.load(data)})[0]\n"
        "print(*(classes[i] for i in mean.argmax(1)))\n"
        "assert not {'torch', 'agfa'} & set(sys.modules)\n"
    )
    np.save(tiny / "pixels.npy", squares(files(tiny), load(run)).numpy())
    command = [sys.executable, "-c", code, str(exported.file), str(tiny / "pixels.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [answer.label for answer in load(run).predict(files(tiny))]


def test_eight_bits_and_what_they_cost(run: Path, tiny: Path, exported: Export) -> None:
    predictor = load(run)
    done = export(predictor, tiny / "m.int8.onnx", int8=True, check=str(tiny))
    assert (done.calibrated_on, done.agreement.images) == (45, 45)
    assert done.file.stat().st_size < 0.5 * exported.file.stat().st_size
    # what is reported is what one finds
    images = real_images(str(tiny), predictor.card, 90)
    found = in_onnxruntime(done.file, images.pixels[45:])
    assert done.agreement.accuracy is not None
    right = (found["logits_mean"].argmax(1) == images.labels[45:]).mean()
    assert done.agreement.accuracy[1] == pytest.approx(right, abs=0.03)  # batches of other sizes round otherwise
    assert done.agreement.largest["logits_mean"] > 1e-4  # it is another model


@pytest.mark.parametrize("scale", [0.1, 1, 30, 300])
def test_probabilities_in_the_graph_are_the_predictors_for_any_logits(scale: float) -> None:
    """Narrow posteriors and wide ones, ties, certainty: onnxruntime's functions are less exact than torch's."""

    class Probabilities(Graph):
        def forward(self, mu: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return self.expected(mu, sigma)

    random = torch.Generator().manual_seed(0)
    mu = scale * torch.randn(60, 5, generator=random)
    mu[:6, 0] = mu[:6].amax(1)  # ties
    sigma = torch.rand(60, 5, generator=random) * torch.logspace(-6, 1, 60)[:, None]
    graph = Probabilities(torch.nn.Identity(), 5, 1.0)  # type: ignore[arg-type]
    n = {0: torch.export.Dim("n", min=1)}
    program = torch.export.export(graph, (mu, sigma), dynamic_shapes=(n, n))
    content = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["mu", "sigma"])
    session = onnxruntime.InferenceSession(content.model_proto.SerializeToString())
    (found,) = session.run(None, {"mu": mu.numpy(), "sigma": sigma.numpy()})
    np.testing.assert_allclose(found, mean_softmax(mu, sigma), atol=2e-5)


# --- what cannot be exported


def test_a_file_that_answers_otherwise_is_not_left(run: Path, tiny: Path, agfa: Agfa, monkeypatch) -> None:
    faithful = Graph.forward

    def unfaithful(self: Graph, images: torch.Tensor) -> dict[str, torch.Tensor]:
        found = faithful(self, images)
        return {**found, "probabilities": found["probabilities"] + 2e-4}

    monkeypatch.setattr(Graph, "forward", unfaithful)
    ended = agfa("export", run, "--format", "torch", "--check", tiny, "--out", tiny / "out" / "m.pt2")
    assert (ended.status, ended.out) == (1, "")
    assert "nothing was written: on 90 images" in ended.error
    assert "differ from the model's by up to 0.0002" in ended.error
    assert not (tiny / "out").exists()
    monkeypatch.setattr(module, "TOLERANCE", 3e-4)
    assert agfa("export", run, "--format", "torch", "--check", tiny, "--out", tiny / "out" / "m.pt2").status == 0


def test_not_a_number_is_refused(run: Path, tiny: Path) -> None:
    predictor = load(run)
    torch.nn.init.constant_(predictor.network.head.mean, float("nan"))
    with pytest.raises(AgfaError, match="differ from the model's by up to nan"):
        export(predictor, tiny / "m.pt2", "torch", check=str(tiny))
    assert not (tiny / "m.pt2").exists()


def test_a_network_that_cannot_be_traced_says_so_in_one_line(run: Path, tiny: Path, monkeypatch) -> None:
    predictor = load(run)
    plain = predictor.network.features
    monkeypatch.setattr(predictor.network, "features", lambda x: plain(x) if x.mean() > 0 else plain(-x))
    with pytest.raises(AgfaError, match="this network cannot be exported: ") as raised:
        export(predictor, tiny / "m.pt2", "torch", check=str(tiny))
    assert "\n" not in str(raised.value)


def test_what_is_asked_for_wrongly(run: Path, tiny: Path, agfa: Agfa) -> None:
    (tiny / "one").mkdir()
    shutil.copy(files(tiny)[0], tiny / "one")
    for arguments, said in (
        (("--int8",), "--int8 takes its ranges from images like those to come: give some with --check"),
        (("--int8", "--format", "torch", "--check", tiny), "--int8 is for --format onnx"),
        (("--format", "torch", "--check", tiny / "none"), "none"),
        (("--int8", "--check", tiny / "one"), "one has one image, and --int8 needs some to take its ranges from"),
        (("--format", "pickle"), "pickle"),
    ):
        ended = agfa("export", run, *arguments)
        assert (ended.status, ended.out) == (2, "")
        assert said in ended.error


def test_without_the_extra(run: Path, agfa: Agfa, monkeypatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else object())
    ended = agfa("export", run)
    assert ended.status == 2
    assert ended.error == "agfa: --format onnx needs onnxscript: pip install 'agfa[export]'"


# --- every method


@pytest.mark.parametrize("name", names())
def test_a_network_says_whether_it_adapts_to_its_batch(name: str) -> None:
    network = build(name).network.eval()
    x = batch().images
    with torch.no_grad():
        alone = torch.cat([network(image[None]) for image in x])
        assert network.adapts is (not torch.allclose(network(x), alone, atol=1e-8))


def test_what_adapts_is_refused_with_the_reason(images_made_once: Path, tmp_path: Path, agfa: Agfa) -> None:
    run = train(images_made_once, tmp_path, "mtl")
    ended = agfa("export", run, "--format", "torch")
    assert (ended.status, ended.out) == (2, "")
    assert "a model of mtl adapts to the batch it is given" in ended.error


@pytest.mark.parametrize("name", ["agfa", "erm", "mcd", "dson", "dmg"])
def test_every_kind_of_network_can_be_traced(name: str) -> None:
    graph = Graph(build(name).float().network, 3, temperature=2.0).eval()
    example = torch.randint(0, 256, (2, *SHAPE), dtype=torch.uint8)
    with torch.no_grad():
        shapes = {"images": {0: torch.export.Dim("n", min=1)}}
        program = torch.export.export(graph, (example,), dynamic_shapes=shapes).module()
        for n in (1, 5):
            x = torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8)
            for key, value in graph(x).items():
                torch.testing.assert_close(program(x)[key], value)


@pytest.mark.slow  # two exporters on each of the methods: minutes
@pytest.mark.parametrize("name", [name for name in recipes() if name in names() or PRESETS[name].method == "agfa"])
@pytest.mark.parametrize("backbone", ["convnet", "resnet18", "efficientnet_lite0"])
def test_every_method_on_every_backbone(name: str, backbone: str, tiny: Path) -> None:
    settings = {**QUICK, "steps": 2, "evaluate_every": 2, "batch_size": 4, "image_size": 32, "hparams": {}}
    run = package.train(
        **{**settings, "backbone": backbone, "weights": "none"}, algorithm=name, data=str(tiny), target="sky", out="r"
    ).folder
    predictor = load(run)
    for format, ending in (("torch", "pt2"), ("onnx", "onnx")):
        out = tiny / f"m.{ending}"
        if get(name).method.name in ("mtl", "arm"):
            with pytest.raises(UsageError, match="adapts"):
                export(predictor, out, format, check=str(tiny))
        else:
            done = export(predictor, out, format, check=str(tiny)).agreement
            assert (done.images, done.same_class) == (90, 90)


# --- real images


def test_images_are_drawn_from_all_and_known_by_the_models_classes(run: Path, tiny: Path) -> None:
    predictor = load(run)
    few = real_images(str(tiny), predictor.card, 40)
    assert few.pixels.shape == (40, 3, 8, 8)
    assert few.pixels.dtype == torch.uint8
    again = real_images(str(tiny), predictor.card, 1000)
    assert torch.equal(again.pixels[:40], few.pixels)
    assert np.bincount(again.labels).tolist() == [30, 30, 30]
    by_pixels = {
        p.numpy().tobytes(): f.parent.name for p, f in zip(squares(files(tiny), predictor), files(tiny), strict=True)
    }
    assert [by_pixels[p.numpy().tobytes()] for p in again.pixels] == [CLASSES[i] for i in again.labels]
    for domain in DOMAINS:
        shutil.rmtree(tiny / domain / "cross")
    assert np.bincount(real_images(str(tiny), predictor.card, 1000).labels).tolist() == [0, 30, 30]
    (tiny / "sky" / "top").rename(tiny / "sky" / "topp")
    assert real_images(str(tiny), predictor.card, 1000).labels is None


def test_a_folder_of_any_images(run: Path, tiny: Path) -> None:
    card = load(run).card
    assert real_images(str(tiny / "sky"), card, 1000).labels is None
    assert len(real_images(str(tiny / "sky" / "top"), card, 1000).pixels) == 10
    (tiny / "sky" / "top" / "bad.png").write_text("text")
    with pytest.raises(UsageError, match=r"bad\.png: not an image"):
        real_images(str(tiny / "sky" / "top"), card, 1000)


def test_the_packages_own_images_do_for_any_number_of_channels(run: Path) -> None:
    card = load(run).card
    for channels in (1, 3):
        found = real_images("digits", card.model_copy(update={"channels": channels, "image_size": 20}), 5)
        assert found.pixels.shape == (5, channels, 20, 20)
    with pytest.raises(UsageError, match="2 channels"):
        real_images("digits", card.model_copy(update={"channels": 2}), 5)
