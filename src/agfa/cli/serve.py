"""`agfa serve`: a model over HTTP, with a page to try images on."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from agfa.cli.app import app
from agfa.errors import UsageError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@app.command
def serve(
    model: str,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: Annotated[str | None, Parameter(env_var="AGFA_TOKEN")] = None,
    accuracy: float | None = None,
    batch_size: int = 64,
    max_megabytes: float = 32,
    max_images: int = 128,
    max_megapixels: float = 50,
    max_seconds: float = 30,
    device: str = "cpu",
) -> None:
    """Serve a model: a page to try images on, and POST /predict, /healthz, /metrics, /openapi.json.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
        host: the address to listen on; 0.0.0.0 is every network that the machine is in.
        port: 0 takes a free one.
        token: what clients must send as "Authorization: Bearer TOKEN"; better given as AGFA_TOKEN, as others on the
            machine see command lines.
        accuracy: abstain from images of which the model is too unsure to be right this often (0.95) on domains
            that were held out from models like it; needs a model that was trained with --audit.
        batch_size: images that the model works on together, at most.
        max_megabytes: of a request.
        max_images: of a request.
        max_megapixels: of an image.
        max_seconds: from a request to its answer.
        device: cpu, cuda or mps.
    """
    try:
        from agfa.inference.serve import make_app, run
    except ImportError as error:
        raise UsageError(f"serving needs an extra: pip install 'agfa[serve]' ({error})") from error
    from agfa.inference import places
    from agfa.inference.imagine import imagination
    from agfa.inference.limits import Limits
    from agfa.inference.predictor import Predictor
    from agfa.training import model_file

    if min(batch_size, max_megabytes, max_images, max_megapixels, max_seconds) <= 0:
        raise UsageError("--batch-size and what begins with --max must be above 0")
    limits = Limits(int(max_megabytes * 2**20), max_images, int(max_megapixels * 1e6), max_seconds)
    with places.here(model) as here:
        predictor = Predictor(*model_file.load(here), device, accuracy)
        imagined = imagination(here, predictor.card)
    served = make_app(predictor, imagined, limits=limits, token=token or None, batch_size=batch_size)
    if host not in LOOPBACK and not token:
        print("anyone who reaches this address can use it; --token TOKEN asks for one", file=sys.stderr)
    run(served, host, port, lambda url: print(f"serving {model} at {url} (Ctrl-C ends it)", flush=True), max_seconds)
