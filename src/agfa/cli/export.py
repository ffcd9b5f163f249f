"""`agfa export`: a model as one file that runs without agfa."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agfa.cli.app import app
from agfa.cli.show import table

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}


@app.command
def export(
    model: str,
    /,
    *,
    format: Literal["onnx", "torch"] = "onnx",
    int8: bool = False,
    check: str | None = None,
    out: Path | None = None,
) -> None:
    """Write a model as one file that runs without agfa, and compare its answers with the model's on real images.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
        format: onnx (needs the extra agfa[export]), or torch: a program of torch.export.
        int8: weights and activations of 8 bits; what that costs is measured and printed.
        check: the images to compare on, a dataset or a folder of images; without it, digits. Of --int8, some of them
            are to calibrate on.
        out: the file; by default beside the model, or here for one from elsewhere. How to run it stands in FILE.json.
    """
    from agfa.inference.export import export as write
    from agfa.inference.predictor import load

    ending = (".int8" if int8 else "") + ENDINGS[format]
    done = write(load(model), out or _beside(model, ending), format, int8, check)

    found = done.agreement
    table(("output", "largest difference"), [(name, f"{most:.1e}") for name, most in found.largest.items()])
    print(f"the same class for {found.same_class} of {found.images} images of {check or 'digits'}")
    if done.calibrated_on:
        print(f"8 bits, their ranges from {done.calibrated_on} other images")
    if found.accuracy is not None:
        before, after = found.accuracy
        print(f"accuracy {after:.1%}, the model's {before:.1%}: {100 * (after - before):+.1f} points")
    elif done.calibrated_on:
        print("no classes are known of these images, so what 8 bits cost in accuracy is not")
    print(f"model: {done.file} ({done.file.stat().st_size / 1e6:.1f} MB) and {done.file.name}.json")


def _beside(model: str, ending: str) -> Path:
    place = Path(model).expanduser()
    if place.is_file():
        return place.with_name(place.stem + ending)
    return (place if place.is_dir() else Path()) / f"model{ending}"
