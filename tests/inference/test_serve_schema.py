"""The server under schemathesis, which makes requests of all kinds out of the server's own schema."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

from support_serve import png, serving

pytestmark = pytest.mark.slow  # two servers, and some hundred requests to each
HOOKS = """
import base64, random, schemathesis

IMAGE = base64.b64decode({image!r})
choose = random.Random(0)

@schemathesis.hook
def map_body(context, body):
    if not isinstance(body, dict) or choose.random() < 0.5:
        return body
    image = IMAGE[: choose.choice([len(IMAGE), len(IMAGE), 60, 30])]
    return {{**body, "images": [image] * choose.randint(1, 3), "image": image}}
"""


def attack(url: str, folder: Path, *flags: str) -> str:
    """Every check but the one that every upload which the schema allows is taken: it cannot say what an image is."""
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"),
        *("--checks", "all", "--exclude-checks", "positive_data_acceptance,negative_data_rejection"),
        *("--max-examples", "300", "--seed", "1", "--suppress-health-check", "all", "--no-color", *flags),
    ]
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def statuses(url: str, token: str) -> dict[str, int]:
    """How often each status was answered."""
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith("agfa_requests_total")]
    counted: dict[str, int] = {}
    for line in lines:
        status = line.split('status="')[1][:3]
        counted[status] = counted.get(status, 0) + int(float(line.split()[-1]))
    return counted


def test_what_the_schema_allows_and_forbids(agfa_run: Path, tmp_path: Path) -> None:
    with serving(agfa_run, "--token", "sesame") as served:
        attack(served.url, tmp_path, "--header", "Authorization: Bearer sesame")
        counted = statuses(served.url, "sesame")
    print(counted)
    assert {"200", "401", "405", "415", "422"} <= set(counted)
    assert not [status for status in counted if status.startswith("5")]


def test_uploads_that_reach_the_model(agfa_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are images, whole or cut."""
    (tmp_path / "hooks.py").write_text(HOOKS.format(image=base64.b64encode(png()).decode()))
    monkeypatch.setenv("SCHEMATHESIS_HOOKS", "hooks")
    with serving(agfa_run) as served:
        attack(served.url, tmp_path)
        counted = statuses(served.url, "")
    print(counted)
    assert counted["200"] > 20
    assert not [status for status in counted if status.startswith("5")]
