"""SIGKILL at random moments: nothing that was finished is lost, nothing half written is read, the end is the same.

`pytest tests/faults/test_kills.py -m slow -s` kills a hundred times and prints a table.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import yaml

import agfa as package
from agfa.training import checkpoint
from serving import Server, contents
from support import QUICK, flags, make_images, same
from support_forks import Forks

RUN = {
    **QUICK,
    **{"target": "sky", "augment": True, "steps": 20, "evaluate_every": 2},
    **{"swad_patience": 1, "swad_tolerance": 2, "checkpoint_seconds": 0},
}
KILLED = -9
Act = Callable[[float | None], tuple[int, float]]  # do it, and be killed after so many seconds
Check = Callable[[], object]


class Counts(dict[str, float]):
    """What happened to one victim: kills, ends, seconds."""


def torment(act: Act, fresh: Check, halfway: Check, whole: Check, kills: int, seed: int) -> Counts:
    """Kill `act` at random moments, so often in all; let it go on each time, and in the end look if all is there.

    `fresh` makes it start from nothing, `halfway` looks after each kill, `whole` when it has ended.
    """
    rng, counts, began = random.Random(seed), Counts(killed=0, ended=0), time.monotonic()
    fresh()
    status, usual = act(None)
    assert status == 0, Path("out.txt").read_text()
    whole()
    while counts["killed"] < kills:
        fresh()
        status = KILLED
        while status == KILLED:
            status, took = act(rng.uniform(0, usual) if counts["killed"] < kills else None)
            if status == KILLED:
                counts["killed"] += 1
                halfway()
            else:
                usual = min(usual, took)  # others may have kept the machine busy at first
        assert status == 0, Path("out.txt").read_text()
        counts["ended"] += 1
        whole()
    counts["seconds"] = time.monotonic() - began
    return counts


def readable(run: Path) -> None:
    """Whatever is there under its own name is whole."""
    for file in run.rglob("[!.]*.safetensors"):
        safetensors.torch.load_file(file)
    for file in run.rglob("[!.]*.json"):
        json.loads(file.read_text())
    for file in run.rglob("[!.]*.yaml"):
        yaml.safe_load(file.read_text())
    said: list[str] = []
    checkpoint.load(run / "checkpoint" / "latest.pt", said.append)
    assert said == []


def training(forks: Forks, tiny: Path, server: Server, kills: int) -> Counts:
    """`agfa train`, decoding included."""
    package.train(**RUN, data=str(tiny), out="undisturbed")
    command = ["train", *flags(**RUN, data=tiny, out="run")]

    def fresh() -> None:
        shutil.rmtree("run", ignore_errors=True)
        shutil.rmtree("cache", ignore_errors=True)

    return torment(
        lambda seconds: forks.agfa(*command, seconds=seconds),
        fresh,
        lambda: readable(Path("run")),
        lambda: same(Path("run"), Path("undisturbed")),
        kills,
        seed=1,
    )


def sweeping(forks: Forks, tiny: Path, server: Server, kills: int) -> Counts:
    """`agfa sweep` of three runs, one after the other."""
    settings = {key: value for key, value in RUN.items() if key not in ("backbone", "hparams", "target", "steps")}
    sweep = {"datasets": str(tiny), "methods": "erm", "backbones": "convnet", "hparams": RUN["hparams"]}
    Path("s.yaml").write_text(yaml.safe_dump({**sweep, "settings": {**settings, "steps": 8}}))
    finished: dict[Path, dict[str, bytes]] = {}
    want: dict[Path, dict[str, bytes]] = {}

    def fresh() -> None:
        shutil.rmtree("sweep", ignore_errors=True)
        finished.clear()

    def halfway() -> None:
        for run, files in finished.items():
            assert contents(run) == files  # what is done stays as it is
        for config in Path("sweep").glob("*/config.yaml"):
            readable(config.parent)
            if (config.parent / "done").exists():
                shutil.rmtree(config.parent / "checkpoint", ignore_errors=True)
                finished[config.parent] = contents(config.parent)

    def whole() -> None:
        runs = sorted(config.parent for config in Path("sweep").glob("*/config.yaml"))
        assert len(runs) == 3
        for run in runs:
            models = {name: data for name, data in contents(run).items() if name.endswith("safetensors")}
            assert want.setdefault(run, models) == models
            assert (run / "done").exists()

    return torment(
        lambda seconds: forks.agfa("sweep", "s.yaml", "--out", "sweep", seconds=seconds),
        fresh,
        halfway,
        whole,
        kills,
        seed=2,
    )


def storing(forks: Forks, tiny: Path, server: Server, kills: int) -> Counts:
    """Decoding images into the store."""
    make_images(Path("many"), per_class=40)
    code = (
        "from pathlib import Path\nfrom agfa.data.domains import from_folder\n"
        "from agfa.data.store import open_images\n"
        "images = open_images(from_folder(Path('many')), 16)\n"
    )
    want: dict[str, bytes] = {}

    def there() -> dict[str, bytes]:
        return {name: data for name, data in contents(Path("cache/store")).items() if not name.startswith(".")}

    def halfway() -> None:
        assert there() in ({}, want)  # all of it, or nothing

    def whole() -> None:
        assert contents(Path("cache/store")) == there()  # drafts of the dead are gone
        want.update(want or there())
        assert there() == want
        assert want

    return torment(
        lambda seconds: forks.agfa(code=code, seconds=seconds),
        lambda: shutil.rmtree("cache", ignore_errors=True),
        halfway,
        whole,
        kills,
        seed=3,
    )


DOWNLOAD = """
from agfa.data.benchmark import Benchmark, File, Place, Settings, Source
from agfa.data.download import get
places = tuple(Place(name, name, (4, 4)) for name in ("ink", "paper", "sky"))
source = Source((File(URL, inside="pets"),))
get(Benchmark(name="Pets", places=places, classes=2, licence="none", citation="nobody", settings=Settings(),
    sources=(source,)), say=print, waits=(0, 0))
"""


def downloading(forks: Forks, tiny: Path, server: Server, kills: int) -> Counts:
    """`agfa data get`, of an archive without a known checksum, from a server that takes its time."""
    names = [f"{d}/{c}/{i}.jpg" for d in ("ink", "paper", "sky") for c in ("cat", "dog") for i in range(4)]
    rng = random.Random(0)
    images = {name: rng.randbytes(20_000) for name in names}
    for name, data in images.items():
        Path("pets", name).parent.mkdir(parents=True, exist_ok=True)
        Path("pets", name).write_bytes(data)
    shutil.make_archive("archive", "zip", ".", "pets")
    server.files["/pets.zip"], server.pause = Path("archive.zip").read_bytes(), 0.003
    home = Path("data/Pets")

    def whole() -> None:
        assert contents(home) == images
        assert sorted(path.name for path in home.parent.iterdir()) == [".Pets.lock", "Pets"]

    def halfway() -> None:
        assert not home.exists() or contents(home) == images

    return torment(
        lambda seconds: forks.agfa(code=DOWNLOAD.replace("URL", repr(f"{server.url}/pets.zip")), seconds=seconds),
        lambda: shutil.rmtree("data", ignore_errors=True),
        halfway,
        whole,
        kills,
        seed=4,
    )


def predicting(forks: Forks, tiny: Path, server: Server, kills: int) -> Counts:
    """`agfa predict` on a folder."""
    package.train(**{**RUN, "steps": 4}, data=str(tiny), out="model")
    before = contents(Path("model"))
    answers: list[str] = []

    def whole() -> None:
        answers[:] = answers or [Path("out.txt").read_text()]
        assert [Path("out.txt").read_text()] == answers
        assert answers[0].count("\n") == 90
        assert contents(Path("model")) == before

    def halfway() -> None:
        assert answers[0].startswith(Path("out.txt").read_text())  # what was answered, was right
        assert contents(Path("model")) == before

    return torment(
        lambda seconds: forks.agfa("predict", "model", str(tiny), "--format", "jsonl", seconds=seconds),
        lambda: None,
        halfway,
        whole,
        kills,
        seed=5,
    )


VICTIMS = {training: 40, sweeping: 20, storing: 15, downloading: 15, predicting: 10}  # kills of a hundred


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGFA_DATA", str(tmp_path / "data"))


@pytest.mark.parametrize("victim", [v for v in VICTIMS if v is not sweeping], ids=lambda victim: victim.__name__)
def test_killed_a_few_times(victim: Callable[..., Counts], forks: Forks, tiny: Path, server: Server) -> None:
    counts = victim(forks, tiny, server, 3)
    print(counts)
    assert counts["killed"] == 3


@pytest.mark.slow  # a hundred kills, and as many new starts
def test_killed_a_hundred_times(forks: Forks, tiny: Path, server: Server) -> None:
    found = {victim.__name__: victim(forks, tiny, server, kills) for victim, kills in VICTIMS.items()}
    print(f"\n{'killed while':14} {'kills':>6} {'ended as undisturbed':>21} {'seconds':>8}")
    for name, counts in found.items():
        print(f"{name:14} {counts['killed']:6} {counts['ended']:21} {counts['seconds']:8.0f}")
    assert sum(counts["killed"] for counts in found.values()) == 100
