"""A model as one file that runs without agfa, in ONNX or as torch.export's program; compared with the model it is of.

It takes images as the network sees them when they have been squashed to its size: uint8, n x C x S x S, any n.
Squashing rounds to 8 bits, so these are the very numbers that the model was trained and evaluated on; all that
follows is in the graph (to [0, 1], normalisation, network, head, temperature). Squashing itself is not: an ONNX
`Resize` rounds elsewhere, and images of several sizes are no batch before they are squashed.

The outputs are `logits_mean`, from which the class is read, and `probabilities`, calibrated; and `logits_variance`
where the head holds a posterior. An ordinary head holds one classifier: nothing varies, and there is no such output.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from agfa.algorithms.base import Network
from agfa.errors import AgfaError, UsageError
from agfa.files import put
from agfa.inference.predictor import Predictor
from agfa.inference.real_images import RealImages, real_images
from agfa.nn.heads import logits_of
from agfa.nn.predictive import DRAWS, WIDE, closed_form, even_noise

TOLERANCE = 1e-4  # of probabilities
MOST, FEW = 1000, 100  # images to check on: of those that are given, of those that the package has
CALIBRATION = 200  # images, at most, that int8 takes its ranges from; it is measured on the others
BATCH = 64
EXTRA = "onnx", "onnxscript", "onnxruntime"

Format = Literal["onnx", "torch"]
Outputs = dict[str, Tensor]
Run = Callable[[Tensor], Outputs]


class Graph(nn.Module):
    """What is exported: from squashed images in 8 bits to logits and calibrated probabilities."""

    noise: Tensor

    def __init__(self, network: Network, n_classes: int, temperature: float) -> None:
        super().__init__()
        self.network, self.temperature = network, temperature
        self.register_buffer("noise", even_noise(DRAWS, n_classes).float())

    def forward(self, images: Tensor) -> Outputs:
        """The outputs by name."""
        mu, sigma = logits_of(self.network.head, self.network.features(images.float() / 255))
        if sigma is None:
            return {"logits_mean": mu, "probabilities": (mu / self.temperature).softmax(-1)}
        probabilities = self.expected(mu / self.temperature, sigma / self.temperature)
        return {"logits_mean": mu, "logits_variance": sigma.square(), "probabilities": probabilities}

    def expected(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """`mean_softmax`, by both of its ways for every image: a graph does not branch."""
        drawn = (mu + sigma * self.noise).softmax(-1).mean(0)
        return torch.where((sigma > WIDE).any(-1, keepdim=True), drawn, closed_form(mu, sigma))


class Agreement(NamedTuple):
    """How near a file's answers come to the model's."""

    images: int
    same_class: int
    largest: dict[str, float]  # difference of each output
    accuracy: tuple[float, float] | None  # of the model and of the file, where classes are known


class Export(NamedTuple):
    """A file that was written, and what it was measured to do."""

    file: Path
    agreement: Agreement
    calibrated_on: int  # images; 0: not quantised


def export(
    predictor: Predictor, out: Path, format: Format = "onnx", int8: bool = False, check: str | None = None
) -> Export:
    """Write the model to `out`, and to `out`.json what there is to know of it, if it does as the model does.

    Args:
        check: a dataset, or a folder of images, that it is checked on, and that int8 is calibrated on; without it the
            package's own digits.

    Raises:
        UsageError: the model cannot be exported, or not like this.
        AgfaError: the file's probabilities are not the model's.
    """
    if predictor.network.adapts:
        raise UsageError(
            f"a model of {predictor.card.algorithm} adapts to the batch it is given: an image's answer depends on "
            "those beside it, and a file knows of no such groups; export a model of another method"
        )
    if int8 and (format != "onnx" or check is None):
        raise UsageError(
            "--int8 is for --format onnx"
            if format != "onnx"
            else "--int8 takes its ranges from images like those to come: give some with --check"
        )
    if format == "onnx" and (missing := [name for name in EXTRA if find_spec(name) is None]):
        raise UsageError(f"--format onnx needs {', '.join(missing)}: pip install 'agfa[export]'")

    images = real_images(check or "digits", predictor.card, MOST + CALIBRATION * int8 if check else FEW)
    if int8 and len(images.pixels) < 2:
        raise UsageError(
            f"{check} has one image, and --int8 needs some to take its ranges from, and others to measure"
        )
    graph = Graph(copy.deepcopy(predictor.network), len(predictor.classes), predictor.card.temperature).cpu().eval()
    program = _program(graph, predictor)
    content, run = _onnx(program) if format == "onnx" else _torch(program)
    calibrated_on = min(CALIBRATION, len(images.pixels) // 2) if int8 else 0
    measured = images.after(calibrated_on)
    agreement = compare(run, predictor, graph, measured)
    _refuse_other_answers(agreement)
    if int8:
        from agfa.inference.quantise import quantised

        with _said_in_one_line():
            content = quantised(content, images.pixels[:calibrated_on].numpy())
        agreement = compare(_session(content), predictor, graph, measured)
    notes = json.dumps(_notes(predictor, agreement, calibrated_on, format, check), indent=2).encode()
    put(out.with_name(f"{out.name}.json"), notes + b"\n")
    put(out, content)  # last, so that a model that is there is whole
    return Export(out, agreement, calibrated_on)


@torch.inference_mode()
def compare(run: Run, predictor: Predictor, graph: Graph, images: RealImages) -> Agreement:
    """Run the file and the model on images, in batches of several sizes, the last of one image."""
    n = len(images.pixels)
    differences: dict[str, list[Tensor]] = {}
    classes: list[Tensor] = []
    for batch in torch.split(images.pixels, list(_sizes(n))):
        got, want = run(batch), graph(batch)
        answers = predictor.answer(batch)
        said = [list(answer.probabilities.values()) for answer in answers]
        want |= {"probabilities": torch.tensor(said)}  # by the predictor's own way
        for name, value in want.items():
            differences.setdefault(name, []).append((got[name] - value).abs().max())
        named = [predictor.classes.index(answer.label) for answer in answers]
        classes.append(torch.stack([torch.tensor(named), got["logits_mean"].argmax(-1)]))
    model, file = torch.cat(classes, dim=1).numpy()
    accuracy = None
    if images.labels is not None:
        accuracy = float((model == images.labels).mean()), float((file == images.labels).mean())
    largest = {name: torch.stack(each).max().item() for name, each in differences.items()}  # of NaN: NaN
    return Agreement(n, int((model == file).sum()), largest, accuracy)


def _sizes(n: int) -> Iterator[int]:
    """Sizes of batches: BATCH each, what is left but one, one."""
    yield from (BATCH for _ in range((n - 1) // BATCH))
    if (n - 1) % BATCH:
        yield (n - 1) % BATCH
    yield 1


def _refuse_other_answers(agreement: Agreement) -> None:
    difference = agreement.largest["probabilities"]
    if not difference <= TOLERANCE:  # NaN is refused too
        raise AgfaError(
            f"nothing was written: on {agreement.images} images the exported model's probabilities differ from the "
            f"model's by up to {difference:.2g}, and {TOLERANCE:g} is allowed"
        )


def _program(graph: Graph, predictor: Predictor) -> torch.export.ExportedProgram:
    card = predictor.card
    example = torch.zeros(2, card.channels, card.image_size, card.image_size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad(), _said_in_one_line():
        return torch.export.export(graph, (example,), dynamic_shapes={"images": {0: batch}})


def _torch(program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
    with _said_in_one_line():
        torch.export.save(program, file := io.BytesIO())
        content = file.getvalue()
        return content, torch.export.load(io.BytesIO(content)).module()


def _onnx(program: torch.export.ExportedProgram) -> tuple[bytes, Run]:
    with _said_in_one_line():
        names = list(program.module()(torch.zeros_like(program.example_inputs[0][0])))
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["images"],
            output_names=names,
            dynamic_shapes={"images": {0: "batch"}},
            verbose=False,
        )
        assert made is not None  # with dynamo there is a program
        content = made.model_proto.SerializeToString()
        return content, _session(content)


def _session(content: bytes) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> Outputs:
        found = session.run(None, {"images": images.numpy()})
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, found, strict=True)}

    return run


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """Exporters warn of their own affairs at length, and fail at greater length."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise AgfaError(f"this network cannot be exported: {first}") from error
    finally:
        logging.disable(logging.NOTSET)


def _notes(
    predictor: Predictor, agreement: Agreement, calibrated_on: int, format: Format, check: str | None
) -> dict[str, Any]:
    """What stands beside the file: all that whoever runs it needs, and what it was measured to do."""
    card = predictor.card
    return {
        "classes": card.classes,
        "input": {"images": ["n", card.channels, card.image_size, card.image_size], "type": "uint8"},
        "outputs": list(agreement.largest),
        "normalisation": {"mean": card.mean, "std": card.std, "in_the_graph": True},
        "temperature": card.temperature,
        "format": format,
        "int8": bool(calibrated_on),
        "algorithm": card.algorithm,
        "backbone": card.backbone,
        "model": card.model,
        "step": card.step,
        "checked": {
            "on": check or "digits",
            **agreement._asdict(),
            "calibrated_on": calibrated_on,
        },
    }
