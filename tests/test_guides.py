"""The two guides, command by command, in their order: on tiny images, with settings that take seconds."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from agfa import algorithms
from support import CLASSES, Agfa, fenced

DOCS = Path(__file__).parent.parent / "docs"
SMALL = "--backbone convnet --weights none --image-size 8 --no-augment --batch-size 4"
# What makes a command take a second; flags that the guide gives are replaced.
QUICK = {
    "train": f"{SMALL} --steps 4 --evaluate-every 2",
    "audit": f"{SMALL} --steps 4 --evaluate-every 2 --rounds 1 --budget 10m",
    "bench": "--backbone convnet --image-size 8 --images 12 --samples 2 --repeats 1 --matrix 64",
}
SETTINGS = (
    "{weights: none, image_size: 8, augment: false, batch_size: 4, steps: 2, evaluate_every: 1}\nbackbones: convnet"
)


def blocks(page: str, language: str) -> list[str]:
    return fenced((DOCS / page).read_text(), language)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("agfa ")]


def quickly(words: list[str]) -> list[str]:
    """The command with its quick settings in place of the guide's."""
    extra = shlex.split(QUICK.get(words[0], ""))
    if "--accuracy" in words:
        extra += ["--accuracy", "0.01"]  # these models are not right nine times in ten
    ours = {word for word in extra if word.startswith("--")}
    kept = list(words)
    for flag in ours & set(words):
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept + extra


def test_a_folder_becomes_a_model_that_serves(agfa: Agfa, tiny: Path) -> None:
    tiny.rename("photos")
    shutil.copytree("photos/sky", "new_photos/place")
    done = []
    for words in commands("practitioner.md"):
        if words[0] == "serve":
            serve(words, blocks("practitioner.md", "sh"))
        else:
            if words[0] == "train":  # the audit says which method
                words[words.index("--algorithm") + 1] = json.loads(Path("audit/audit.json").read_text())["algorithm"]
            ended = agfa(*quickly(words))
            assert ended.status == 0, (words, ended.err)
        done.append(words[0] if words[0] != "data" else "check")
    assert set(done) >= {"check", "audit", "train", "evaluate", "predict", "export", "serve", "push"}
    assert Path("answers.csv").read_text().count("\n") == 31
    assert Path("final/model.onnx").exists()
    assert Path("final/model.int8.onnx").exists()


def serve(words: list[str], clients: list[str]) -> None:
    """Start the server, let the guide's clients at it, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = words[words.index("--port") + 1]
    words = [port if word == given else word for word in words]
    process = subprocess.Popen([sys.executable, "-m", "agfa", *words])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert clients
        image = next(Path("new_photos/place").rglob("*.jpg"))
        for block in clients:
            for line in block.splitlines():
                asked = line.replace(given, port).replace("new_photos/place/class/image.jpg", str(image))
                said = subprocess.run(shlex.split(asked), capture_output=True, text=True, check=True).stdout
                assert any(name in said for name in CLASSES)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_method_gets_its_table(agfa: Agfa, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((method,), (sweep,)) = (blocks("researcher.md", language) for language in ("python", "yaml"))
    Path("entropy.py").write_text(method, encoding="utf-8")
    Path("entropy.yaml").write_text(on_tiny(sweep, tiny) + f"settings: {SETTINGS}\n", encoding="utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(Path.cwd())])
    monkeypatch.setitem(sys.modules, "agfa.algorithms.entropy", None)  # so that it is forgotten in the end
    del sys.modules["agfa.algorithms.entropy"]
    done = []
    for words in commands("researcher.md"):
        ended = agfa(*(on_tiny(word, tiny) for word in quickly(words)))
        assert ended.status == 0, (words, ended.err)
        done.append(words[0])
    assert set(done) == {"algorithms", "train", "sweep", "report", "bench"}
    assert len(list(Path("sweeps/entropy").glob("*/done"))) == 9
    assert "entropy" in Path("entropy.tex").read_text().lower()
    assert Path("entropy.html").exists()


def on_tiny(text: str, tiny: Path) -> str:
    return text.replace("digits", str(tiny)).replace("mnist_m", "sky")
