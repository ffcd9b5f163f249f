"""One image is one image, in whatever form it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agfa.errors import UsageError
from agfa.inference.pictures import one_by_one, square
from agfa.inference.predictor import Predictor, load
from support_models import make_model

COLOR = np.random.default_rng(0).integers(0, 256, (60, 40, 3), np.uint8)
GRAY = COLOR[..., 0]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return load(make_model(tmp_path_factory.mktemp("model")))


def chw(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).permute(2, 0, 1)


FORMS: dict[str, Any] = {
    "PIL": Image.fromarray(COLOR),
    "float array": COLOR / 255,
    "float32 array": (COLOR / 255).astype(np.float32),
    "float16 array": (COLOR / 255).astype(np.float16),
    "16 bit array": COLOR.astype(np.uint16) << 8 | 7,
    "read-only array": np.broadcast_to(COLOR, COLOR.shape),
    "strided array": np.asfortranarray(COLOR),
    "opaque array": np.dstack([COLOR, np.full((60, 40), 255, np.uint8)]),
    "tensor": chw(COLOR),
    "float tensor": chw(COLOR).float() / 255,
    "tensor that learns": (chw(COLOR).float() / 255).requires_grad_(),
    "tensor elsewhere": chw(COLOR).contiguous(memory_format=torch.contiguous_format).clone(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_color_image(form: str, predictor: Predictor) -> None:
    (want,) = predictor.predict([COLOR])
    assert predictor.predict([FORMS[form]]) == [want]
    assert predictor.predict(FORMS[form]) == [want]  # one image is a list of one


@pytest.mark.parametrize(
    "form",
    [GRAY, GRAY[..., None], GRAY / 255, torch.from_numpy(GRAY), torch.from_numpy(GRAY)[None], Image.fromarray(GRAY)],
    ids=range(6),
)
def test_forms_of_a_gray_image(form: Any, predictor: Predictor) -> None:
    assert predictor.predict(form) == predictor.predict([np.dstack([GRAY] * 3)])


def test_bits_are_black_and_white(predictor: Predictor) -> None:
    assert predictor.predict(GRAY > 127) == predictor.predict(np.where(GRAY > 127, 255, 0).astype(np.uint8))


def test_files_and_addresses(predictor: Predictor, tmp_path: Path) -> None:
    import fsspec

    file = tmp_path / "a.png"
    Image.fromarray(COLOR).save(file)
    with fsspec.open("memory://pictures/a.png", "wb") as remote:
        remote.write(file.read_bytes())
    want = predictor.predict(COLOR)
    for form in (file, str(file), [file], "memory://pictures/a.png", file.as_uri()):
        assert predictor.predict(form) == want


def test_several_at_once(predictor: Predictor) -> None:
    some = np.random.default_rng(1).integers(0, 256, (5, 20, 24, 3), np.uint8)
    want = predictor.predict(list(some))
    assert len({p.probability for p in want}) == 5
    x = torch.from_numpy(some).permute(0, 3, 1, 2)
    for form in (some, x, x.float() / 255, tuple(some), iter(some), (x[i] for i in range(5)), [x[:2], x[2:4], x[4]]):
        assert predictor.predict(form) == want


def test_float_images_are_the_bytes_that_they_were_made_of() -> None:
    """So a loader that gives floats gets the figures of the files."""
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for kind in (np.float16, np.float32, np.float64):
        assert np.array_equal(square((every / 255).astype(kind), 1, 16)[0], every)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (COLOR.astype(np.float32), "floats are taken as [0, 1]"),
        (np.full((4, 4), np.nan), "go from nan to nan"),
        (COLOR / 255 - 0.5, "go from -0.5 to"),
        (COLOR.astype(np.int64), "int64 numbers could mean anything; give uint8"),
        (np.zeros((4, 4, 5), np.uint8), "4 x 4 x 5 is not the shape of an image"),
        (np.zeros((0, 4, 3), np.uint8), "0 x 4 x 3 is not the shape"),
        (np.zeros(4, np.uint8), "4 is not the shape"),
        (torch.zeros(7, 20, 30), "20 x 30 x 7 is not the shape"),
        ("nowhere.png", "nowhere.png: "),
        ("memory://pictures/none.png", "memory://pictures/none.png: "),
        (3, "'int' object is not iterable"),
    ],
    ids=range(11),
)
def test_what_is_no_image(form: Any, said: str, predictor: Predictor) -> None:
    with pytest.raises((UsageError, TypeError)) as error:
        predictor.predict(form)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_an_array_is_called_by_its_place(predictor: Predictor) -> None:
    with pytest.raises(UsageError, match="image 2: 4 is not the shape"):
        predictor.predict([COLOR, COLOR, np.zeros(4, np.uint8)])


def test_a_model_of_two_channels_takes_arrays_only(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", channels=2, mean=(0.0, 0.0), std=(1.0, 1.0))
    predictor = load(model)
    some = np.random.default_rng(1).integers(0, 256, (3, 8, 8, 2), np.uint8)
    want = predictor.predict(some)
    assert torch.equal(square(some[0], 2, 8), chw(some[0]))
    assert predictor.predict(torch.from_numpy(some).permute(0, 3, 1, 2)) == want
    with pytest.raises(UsageError, match="the model takes images of 2 channels; give arrays, height x width x 2"):
        predictor.predict(Image.fromarray(COLOR))


def test_one_by_one_is_lazy() -> None:
    taken = []

    def some() -> Any:
        for i in range(3):
            taken.append(i)
            yield f"{i}.png"

    images = one_by_one(some())
    assert (next(images), taken) == ("0.png", [0])
