"""Weights from the hub, along the real path: huggingface_hub against a server on this machine."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from agfa.nn.backbones import build_backbone, weights_hash

TAG = "resnet18.tv_in1k"
LOAD = "from agfa.nn.backbones import *; print(weights_hash(build_backbone('resnet18')))"


class Hub(http.server.SimpleHTTPRequestHandler):
    """Serves files with the headers that the hub gives them."""

    def end_headers(self):
        self.send_header("ETag", '"0123456789abcdef"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """A server with one repository, and the environment that points at it."""
    folder = tmp_path / "hub" / "timm" / TAG / "resolve" / "main"
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    safetensors.torch.save_file(timm.create_model("resnet18").state_dict(), folder / "model.safetensors")
    handler = functools.partial(Hub, directory=tmp_path / "hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield folder / "model.safetensors", {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
    server.shutdown()


def load(environment: dict[str, str], **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", LOAD],
        env=os.environ | environment | more,
        capture_output=True,
        text=True,
        check=False,
    )


def test_pretrained_weights_come_from_the_hub_and_then_from_its_cache(hub):
    file, environment = hub
    expected = weights_hash(build_backbone("resnet18", weights=str(file)))
    first = load(environment)
    assert first.stdout.strip() == expected, first.stderr
    again = load(environment, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert again.stdout.strip() == expected, again.stderr
    assert Path(environment["HF_HOME"]).is_dir()
