"""`agfa predict`: many images, stopped and gone on with, some of them damaged, in every format."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from agfa.data.walk import image_files
from agfa.inference.predictor import Prediction, Predictor, load
from agfa.training.run_folder import locked
from support import CLASSES, Agfa
from support_models import AUDIT, make_model

COLUMNS = ["image", "label", "probability", "disagreement", "abstain", "error"]
KINDS = ("csv", "jsonl", "parquet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), audit=AUDIT)


def read(file: Path | str, kind: str = "") -> list[dict[str, Any]]:
    """The rows of an output, without the probabilities of each class."""
    kind = kind or Path(file).suffix[1:]
    if kind == "jsonl":
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        assert all(list(row) == [*COLUMNS, "probabilities"] for row in rows)
    elif kind == "parquet":
        rows = pl.read_parquet(file).to_dicts()
    else:
        rows = pl.read_csv(file, schema_overrides={"error": pl.String}).to_dicts()
    return [{key: row[key] for key in COLUMNS} for row in rows]


def expected(model: Path, files: list[Path], batch_size: int = 64) -> list[dict[str, Any]]:
    return [
        {
            "image": str(file),
            "label": said.label,
            "probability": round(said.probability, 6),
            "disagreement": round(said.disagreement or 0, 6),
            "abstain": said.abstain,
            "error": None,
        }
        for file, said in zip(files, load(model).predict(files, batch_size), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_into_a_file(kind: str, agfa: Agfa, model: Path, tiny: Path) -> None:
    ended = agfa("predict", model, tiny, "--out", f"deep/out.{kind}")
    assert (ended.status, ended.out, ended.err) == (0, f"deep/out.{kind}: 90 images\n", "")
    assert read(f"deep/out.{kind}") == expected(model, sorted(image_files(tiny)))
    assert [p.name for p in Path("deep").iterdir()] == [f"out.{kind}"]
    agfa("predict", model, tiny, "--out", "other", "--format", kind)
    assert Path("other").read_bytes() == Path(f"deep/out.{kind}").read_bytes()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_probabilities_of_every_class(kind: str, agfa: Agfa, model: Path, tiny: Path) -> None:
    agfa("predict", model, tiny / "sky" / "top", "--out", f"out.{kind}")
    found = pl.read_ndjson("out.jsonl") if kind == "jsonl" else pl.read_parquet("out.parquet")
    for row in found.to_dicts():
        assert tuple(row["probabilities"]) == CLASSES
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["probabilities"][row["label"]] == row["probability"]


def test_printed(agfa: Agfa, model: Path, tiny: Path) -> None:
    files = sorted((tiny / "sky" / "top").iterdir())
    want = expected(model, files)
    ended = agfa("predict", model, tiny / "sky" / "top", "--format", "jsonl")
    assert (ended.status, ended.err) == (0, "")
    agfa("predict", model, tiny / "sky" / "top", "--out", "out.jsonl")
    assert agfa("predict", model, *files, "--format", "jsonl").out == Path("out.jsonl").read_text() == ended.out
    ended = agfa("predict", model, *files, "--format", "csv")
    assert (ended.status, ended.err) == (0, "")
    header, *rows = csv.reader(io.StringIO(ended.out))
    assert header == COLUMNS
    assert [(r[0], r[1], float(r[2]), r[4]) for r in rows] == [
        (w["image"], w["label"], w["probability"], "false") for w in want
    ]
    ended = agfa("predict", model, *files)
    assert (ended.status, ended.err) == (0, "")
    for row in want:
        (line,) = [line for line in ended.out.splitlines() if row["image"] in line]
        assert line.split()[1:3] == [row["label"], f"{row['probability']:.4f}"]


# --- stopped and gone on with

KILLED = """
import os, signal, sys
from agfa.inference.predictor import Predictor

answer, calls = Predictor.answer, 0

def answer_or_die(self, pixels):
    global calls
    calls += 1
    if calls > int(os.environ["ANSWERS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(self, pixels)

Predictor.answer = answer_or_die
from agfa.cli import main
main()
"""


def test_killed_again_and_again_it_ends_with_the_same_bytes(agfa: Agfa, model: Path, tiny: Path) -> None:
    (tiny / "ink" / "bad.png").write_text("text")
    command = ["predict", str(model), str(tiny), "--batch-size", "7", "--on-error", "skip"]
    for kind in KINDS:
        assert agfa(*command, "--out", f"whole.{kind}").status == 1
    killed = 0
    for answers in (3, 0, 4):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *command, "--out", "out.jsonl"],
            env=os.environ | {"ANSWERS": str(answers)},
            check=False,
            capture_output=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not Path("out.jsonl").exists()
        killed += answers
        assert Path(".out.jsonl.part").read_bytes().count(b"\n") == killed * 7
    part, note = Path(".out.jsonl.part").read_bytes(), Path(".out.jsonl.part.json").read_bytes()
    for kind in KINDS:
        Path(f".out.{kind}.part").write_bytes(part + b'{"image": "torn')
        Path(f".out.{kind}.part.json").write_bytes(note)
        ended = agfa(*command, "--out", f"out.{kind}")
        assert ended.status == 1
        assert ended.out == f"out.{kind}: 91 images, 49 of them before\n"
        assert "1 of 91 images cannot be read, the first is" in ended.error
        assert Path(f"out.{kind}").read_bytes() == Path(f"whole.{kind}").read_bytes()
    assert [p.name for p in Path().iterdir() if p.name.startswith(".")] == []


class StoppedError(Exception):
    """Stands for anything that ends a process."""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A predictor that stops at its third batch, until undone."""
    answer, calls = Predictor.answer, []

    def answer_or_stop(self: Predictor, pixels: Any) -> list[Prediction]:
        calls.append(1)
        if len(calls) > 2:
            raise StoppedError
        return answer(self, pixels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "answer", answer_or_stop)
        yield patch


def test_only_the_same_command_goes_on(agfa: Agfa, model: Path, tiny: Path, stopped: pytest.MonkeyPatch) -> None:
    command = ["predict", model, tiny, "--batch-size", "8", "--out", "out.csv"]
    assert agfa(*command).status == 1
    stopped.undo()
    other = make_model(Path("other"), seed=1)
    for changed, said in (
        (["predict", model, tiny, "--batch-size", "9"], "another batch size;"),
        (["predict", model, tiny / "ink", "--batch-size", "8"], "another images;"),
        (["predict", other, tiny, "--batch-size", "8"], "another model;"),
        (["predict", model, tiny, "--batch-size", "8", "--accuracy", "0.9"], "another accuracy;"),
    ):
        ended = agfa(*changed, "--out", "out.csv")
        assert ended.status == 2
        assert f"out.csv was begun with {said} choose another file with --out, or delete .out.csv.part" in ended.error
    first = next(image_files(tiny))
    first.rename(first.with_name("zz.png"))
    ended = agfa(*command)
    assert ended.status == 2
    assert f"has come in place of {first}" in ended.error
    first.with_name("zz.png").rename(first)
    assert agfa(*command).out == "out.csv: 90 images, 16 of them before\n"
    assert read("out.csv") == expected(model, sorted(image_files(tiny)), 8)
    ended = agfa(*command)
    assert ended.status == 2
    assert "out.csv exists; delete it, or choose another file" in ended.error


def test_fewer_images_than_before(agfa: Agfa, model: Path, tiny: Path, stopped: pytest.MonkeyPatch) -> None:
    command = ["predict", model, tiny, "--batch-size", "8", "--out", "out.csv"]
    assert agfa(*command).status == 1
    stopped.undo()
    files = sorted(image_files(tiny))
    for file in files[10:]:
        file.unlink()
    ended = agfa(*command)
    assert ended.status == 2
    assert f"nothing has come in place of {files[10]}" in ended.error


def test_two_at_once(agfa: Agfa, model: Path, tiny: Path) -> None:
    with Path(".out.csv.part").open("a") as file:
        assert locked(file, exclusively=True)
        ended = agfa("predict", model, tiny, "--out", "out.csv")
    assert ended.status == 2
    assert "out.csv is being written by another process" in ended.error


def test_names_that_need_quotes(agfa: Agfa, model: Path, tiny: Path) -> None:
    names = ['a,b".png', "new\nline.png", "ü ' x.png", os.fsdecode(b"\xff.png")]
    source = tiny / "sky" / "top" / "01.png"
    Path("odd").mkdir()
    for name in names:
        try:
            Path("odd", name).write_bytes(source.read_bytes())
        except OSError:
            pytest.skip("this file system does not take such names")
    want = [str(f).encode(errors="surrogateescape").decode(errors="replace") for f in image_files(Path("odd"))]
    for kind in KINDS:
        assert agfa("predict", model, "odd", "--out", f"out.{kind}").status == 0
        assert [row["image"] for row in read(f"out.{kind}")] == want


# --- images that cannot be read


@pytest.mark.parametrize("place", ["first", "middle", "last", "alone"])
def test_bad_images_are_skipped(place: str, agfa: Agfa, model: Path, tiny: Path) -> None:
    folder = tiny / "sky" / "top"
    bad = folder / {"first": "!.png", "middle": "05a.png", "last": "zz.png", "alone": "!.png"}[place]
    bad.write_text("text")
    if place == "alone":
        for file in folder.iterdir():
            file.unlink() if file != bad else None
    good = [f for f in sorted(folder.iterdir()) if f != bad]
    n = len(good) + 1
    for kind in KINDS:
        ended = agfa("predict", model, folder, "--out", f"out.{kind}", "--on-error", "skip", "--batch-size", 4)
        assert (ended.status, ended.out) == (1, f"out.{kind}: {n} images\n")
        assert ended.error == f"agfa: 1 of {n} images cannot be read, the first is {bad}: not an image"
        found = read(f"out.{kind}")
        assert [row["image"] for row in found] == [str(f) for f in sorted(folder.iterdir())]
        (row,) = [row for row in found if row["error"]]
        assert row == {**dict.fromkeys(COLUMNS), "image": str(bad), "error": f"{bad}: not an image"}
        for row, said in zip((r for r in found if not r["error"]), load(model).predict(good), strict=True):
            assert row["label"] == said.label
            assert row["probability"] == pytest.approx(said.probability, abs=1e-5)
    for kind in ("table", "csv", "jsonl"):
        ended = agfa("predict", model, folder, "--format", kind, "--on-error", "skip")
        assert ended.status == 1
        assert f"1 of {n} images cannot be read" in ended.error
        assert ended.out.count("not an image") == 1


def test_a_bad_image_stops_it_and_mended_it_goes_on(agfa: Agfa, model: Path, tiny: Path) -> None:
    good = sorted(image_files(tiny))
    content = good[40].read_bytes()
    good[40].write_bytes(b"")
    command = ["predict", model, tiny, "--batch-size", "16", "--out", "out.csv"]
    ended = agfa(*command)
    assert (ended.status, ended.out) == (2, "")
    assert ended.error == f"agfa: {good[40]}: not an image"
    assert not Path("out.csv").exists()
    good[40].write_bytes(content)
    assert agfa(*command).out == "out.csv: 90 images, 32 of them before\n"
    assert read("out.csv") == expected(model, good, 16)


def test_a_bad_image_stops_what_is_printed(agfa: Agfa, model: Path, tiny: Path) -> None:
    image = tiny / "sky" / "top" / "00.jpg"
    (tiny / "bad.png").write_text("text")
    for kind, lines in (("table", 0), ("csv", 2), ("jsonl", 1)):
        ended = agfa("predict", model, image, tiny / "bad.png", "--format", kind)
        assert (ended.status, ended.out.count("\n")) == (2, lines)
        assert "bad.png: not an image" in ended.error


# --- abstaining


@pytest.mark.parametrize(("accuracy", "least"), [(0.7, 0.0), (0.9, 0.36), (0.95, 0.5), (0.99, 0.9), (1.0, 0.9)])
def test_it_abstains_when_less_sure_than_it_took(accuracy: float, least: float, model: Path, tiny: Path) -> None:
    predictor = load(model, accuracy=accuracy)
    assert predictor.threshold == least
    said = predictor.predict(sorted(image_files(tiny)))
    assert [s.abstain for s in said] == [s.probability < least for s in said]


def test_abstain_in_every_format(agfa: Agfa, model: Path, tiny: Path) -> None:
    middle = sorted(p.probability for p in load(model).predict(sorted(image_files(tiny))))[45]
    model = make_model(Path("halfway"), audit=AUDIT.model_copy(update={"coverage": ((middle, 0.5, 0.9),)}))
    want = [p.abstain for p in load(model, accuracy=0.9).predict(sorted(image_files(tiny)))]
    assert 30 < sum(want) <= 45
    for kind in KINDS:
        assert agfa("predict", model, tiny, "--accuracy", "0.9", "--out", f"out.{kind}").status == 0
        assert [row["abstain"] for row in read(f"out.{kind}")] == want
    ended = agfa("predict", model, tiny, "--accuracy", "0.9")
    assert sum(line.split()[-1:] == ["yes"] for line in ended.out.splitlines()) == sum(want)


def test_abstaining_needs_an_audit(agfa: Agfa, model: Path, tiny: Path) -> None:
    bare = make_model(Path("bare"))
    for folder, accuracy, said in (
        (bare, 0.95, "trained without an audit: run agfa audit, then agfa train with --audit"),
        (model, 95, "accuracy is 95.0; it must be in (0, 1], 0.95 for 95%"),
        (model, 0, "must be in (0, 1]"),
    ):
        ended = agfa("predict", folder, tiny, "--accuracy", accuracy)
        assert (ended.status, ended.out) == (2, "")
        assert said in ended.error
    never = make_model(Path("never"), audit=AUDIT.model_copy(update={"coverage": ((0.0, 1.0, 0.71),)}))
    ended = agfa("predict", never, tiny, "--accuracy", 0.8)
    assert "on held-out domains the model was never right 80.0% of the time, at best 71.0%" in ended.error


# --- what is asked for


def test_what_cannot_be(agfa: Agfa, model: Path, tiny: Path) -> None:
    image = tiny / "sky" / "top" / "00.jpg"
    (tiny / "empty").mkdir()
    for arguments, said in (
        ((model, tiny / "none.jpg"), "no image"),
        ((model, tiny / "empty"), f"no images in {tiny / 'empty'}"),
        ((tiny, image), "has no model.safetensors"),
        ((tiny / "none", image), "does not exist"),
        ((model, image, "--out", "out.xlsx"), "out.xlsx: which format is that? Give --format csv, jsonl or parquet"),
        ((model, image, "--out", "out.csv", "--format", "table"), "which format is that"),
        ((model, image, "--format", "parquet"), "parquet is no text to print"),
        ((model, image, "--batch-size", "0"), "batch_size is 0; it must be 1 or more"),
        ((model, image, "--out", "out.csv", "--batch-size", "0"), "batch_size is 0; it must be 1 or more"),
        ((model, image, "--device", "gpu"), "device 'gpu' cannot be used"),
        ((model, image, "--device", "cuda:99"), "device 'cuda:99' cannot be used"),
    ):
        ended = agfa("predict", *arguments)
        assert (ended.status, ended.out) == (2, "")
        assert said in ended.error
    assert not list(Path().glob("out*"))
