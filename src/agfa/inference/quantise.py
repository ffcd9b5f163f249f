"""An ONNX model in 8 bits: convolutions and products quantised for the range that calibration images give them.

The head stays as it is: it costs next to nothing, and its variances span too many magnitudes for 8 bits. Weights take
7 bits, so that no processor's sums of 16 bits overflow; activations are unsigned, which is the faster on x86.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTISED = ["Conv", "Relu", "Clip", "Add", "MaxPool", "MatMul", "Gemm"]
PRODUCTS = ("MatMul", "Gemm")


def quantised(model: bytes, images: npt.NDArray[np.uint8], batch_size: int = 32) -> bytes:
    """The model with weights and activations of 8 bits, calibrated on images of its own."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # untyped
        batches = iter(np.split(images, range(batch_size, len(images), batch_size)))

        def get_next(self) -> dict[str, npt.NDArray[np.uint8]] | None:
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch}

    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.onnx"), Path(folder, "made.onnx")
        given.write_bytes(model)
        quantize_static(
            given,
            made,
            Reader(),
            op_types_to_quantize=QUANTISED,
            nodes_to_exclude=_head(onnx.load_from_string(model).graph),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            reduce_range=True,
        )
        return made.read_bytes()


def _head(graph: Any) -> list[str]:
    """The nodes from the last product on the way to each output on."""
    maker = {output: node for node in graph.node for output in node.output}
    found: dict[str, Any] = {}
    ahead = [output.name for output in graph.output]
    while ahead:
        node = maker.get(ahead.pop())
        if node is not None and node.name not in found:
            found[node.name] = node
            ahead += [] if node.op_type in PRODUCTS else node.input
    return list(found)
