"""What a run records, which of its models is the result, and what the target may and may not change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

import agfa as package
from agfa.averaging import Swad
from agfa.errors import UsageError
from agfa.training import trainer
from agfa.training.evaluate import mean_accuracy
from agfa.training.state import Best
from agfa.training.trainer import Run
from support import CLASSES, DOMAINS, Agfa, records, weights

SWAD = {"swad_patience": 1, "swad_tolerance": 2}


def run(tiny: Path, quick: dict[str, Any], out: str = "run", **settings: Any) -> Run:
    return package.train(**{**quick, "data": str(tiny), "target": "sky", **settings}, out=out)


def tensors(path: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- records


def test_a_run_folder(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick)
    assert sorted(path.name for path in Path("run").glob("[!.]*")) == [
        "README.md",
        "checkpoint",
        "config.yaml",
        "done",
        "environment.json",
        "metrics.jsonl",
        "model.json",
        "model.safetensors",
        "models",
        "players.safetensors",
        "predictions.parquet",
    ]
    environment = json.loads(Path("run/environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0] or environment["versions"]["torch"]
    assert {"python", "cores", "threads", "commit"} <= environment.keys()
    assert finished.folder == Path("run")
    assert set(finished.scores) == {"last", "best", "swad", "oracle"}


def test_a_record_for_each_evaluation(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, steps=7)
    found = records(Path("run"))
    assert [line["step"] for line in found if line["kind"] == "train"] == [2, 4, 6, 7]
    for line in found:
        if line["kind"] == "train":
            assert set(line["losses"]) == {"nll", "kl", "median_v", "discrepancy"}
    parts = [
        ("ink", "source", "val"),
        ("paper", "source", "val"),
        ("sky", "target", "test"),
        ("sky", "target", "oracle"),
    ]
    for step in (2, 4, 6, 7):
        lines = [line for line in found if line["kind"] == "eval" and line["step"] == step]
        assert [(line["domain"], line["role"], line["split"]) for line in lines] == parts
        assert [line["n"] for line in lines] == [6, 6, 24, 6]
    for line in found:
        if line["kind"] == "final":
            score = finished.scores[line["model"]][line["role"], line["domain"], line["split"]]
            assert (line["accuracy"], line["loss"], line["n"]) == score
    assert finished.accuracy == finished.scores["swad"]["target", "sky", "test"].accuracy


def test_losses_are_means_since_the_last_record(tiny: Path, quick: dict[str, Any]) -> None:
    run(tiny, quick, "each", steps=5, evaluate_every=1, averaging="none")
    run(tiny, quick, "some", steps=5, evaluate_every=3, averaging="none")
    each = [line["losses"] for line in records(Path("each"), "train")]
    some = [line["losses"] for line in records(Path("some"), "train")]
    assert len(some) == 2
    assert some[0]["nll"] == pytest.approx(sum(losses["nll"] for losses in each[:3]) / 3)
    assert some[1]["nll"] == pytest.approx(sum(losses["nll"] for losses in each[3:]) / 2)


def test_evaluating_does_not_change_what_is_learned(tiny: Path, quick: dict[str, Any]) -> None:
    for out, every, track in (("one", 1, True), ("three", 3, False)):
        run(
            tiny,
            quick,
            out,
            evaluate_every=every,
            track_target=track,
            averaging="none",
            selection="last",
            augment=True,
        )
    assert equal(tensors("one/model.safetensors"), tensors("three/model.safetensors"))


def test_the_seed_decides(tiny: Path, quick: dict[str, Any]) -> None:
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tiny, quick, out, seed=seed, augment=True)
    assert weights(Path("a")) == weights(Path("b"))
    assert records(Path("a")) == records(Path("b"))
    assert weights(Path("a"))["model.safetensors"] != weights(Path("c"))["model.safetensors"]


# --- which model is the result


@pytest.mark.parametrize(
    ("selection", "chosen"), [("swad", "swad"), ("validation", "best"), ("last", "last"), ("oracle", "oracle")]
)
def test_the_result_is_what_was_asked_for(selection: str, chosen: str, tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, selection=selection, steps=10, **SWAD)
    for end in ("safetensors", "json"):
        assert Path(f"run/model.{end}").read_bytes() == Path(f"run/models/{chosen}.{end}").read_bytes()
    assert json.loads(Path("run/model.json").read_text())["model"] == chosen
    assert finished.accuracy == mean_accuracy(finished.scores[chosen], "test")


def test_best_is_the_first_maximum_of_source_validation(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, steps=14)
    means: dict[int, list[float]] = {}
    for line in records(Path("run"), "eval"):
        if line["split"] == "val":
            means.setdefault(line["step"], []).append(line["accuracy"])
    accuracy = {step: sum(values) / len(values) for step, values in means.items()}
    best = max(accuracy.values())
    first = min(step for step, value in accuracy.items() if value == best)
    assert json.loads(Path("run/models/best.json").read_text())["step"] == first
    assert mean_accuracy(finished.scores["best"], "val") == best
    assert len(set(accuracy.values())) > 1
    run(tiny, quick, "short", steps=14, stop_early=False, averaging="none")
    assert Path("short/models/best.safetensors").read_bytes() == Path("run/models/best.safetensors").read_bytes()


def test_best_keeps_the_first_of_equals_and_a_copy() -> None:
    network = torch.nn.Linear(1, 1)
    best = Best()
    for step, score in enumerate([0.0, 0.5, 0.2, 0.5, None], start=1):
        torch.nn.init.constant_(network.weight, step)
        best.offer(score, step, network)
    assert (best.step, best.score, best.state["weight"].item()) == (2, 0.5, 2)


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Let these be the mean validation losses of the evaluations."""
    found = iter(losses)
    last = losses[-1]
    monkeypatch.setattr(trainer, "mean_loss", lambda scores, split: next(found, last))
    monkeypatch.setattr(trainer, "_line", lambda step, scores: "")


def iterates(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """What the model was after each step, filled as the run goes on."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    after_step = Swad.after_step

    def kept(self: Swad, model: torch.nn.Module) -> None:
        seen[len(seen) + 1] = {key: value.clone() for key, value in model.state_dict().items()}
        after_step(self, model)

    monkeypatch.setattr(Swad, "after_step", kept)
    return seen


def mean_of(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([state[key] for state in states]).mean(0) for key in states[0]}


def test_swad_is_the_mean_of_its_iterates(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses whose start (step 4) and end (step 8) are known."""
    scripted(monkeypatch, [3, 1, 1.1, 1.05, 2, 2.1, 1, 1])
    seen = iterates(monkeypatch)
    run(tiny, quick, steps=16, swad_patience=2, swad_tolerance=2, swad_ratio=1.3)
    want = mean_of([seen[step] for step in range(4, 9)])
    for key, value in tensors("run/models/swad.safetensors").items():
        torch.testing.assert_close(value, want[key])
    assert equal(tensors("run/models/last.safetensors"), seen[16])


def test_stopping_early_stops_there_with_the_same_average(
    tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 16, "swad_patience": 2, "swad_tolerance": 2, "swad_ratio": 1.3}
    for out, stop in (("whole", False), ("early", True)):
        with monkeypatch.context() as patch:
            scripted(patch, [3, 1, 1.1, 1.05, 2, 2.1, 1, 1])
            run(tiny, quick, out, stop_early=stop, **settings)
    assert records(Path("early"), "eval")[-1]["step"] == 12
    assert records(Path("whole"), "eval")[-1]["step"] == 16
    assert Path("early/models/swad.safetensors").read_bytes() == Path("whole/models/swad.safetensors").read_bytes()
    assert json.loads(Path("early/models/last.json").read_text())["step"] == 12


def test_without_a_start_swad_is_the_last_model_and_says_so(train: Agfa) -> None:
    ended = train(target="sky", out="run", steps=4)
    assert ended.status == 0
    assert "swad found no start: its model is the last one; more steps may help" in ended.err.splitlines()
    assert Path("run/models/swad.safetensors").read_bytes() == Path("run/models/last.safetensors").read_bytes()


def test_no_averaging(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, averaging="none")
    assert set(finished.scores) == {"last", "best", "oracle"}
    assert finished.config.chosen == "best"


def test_swa_is_the_mean_of_the_second_half(tiny: Path, quick: dict[str, Any]) -> None:
    run(tiny, quick, averaging="swa", steps=8)
    states = []
    for steps in (4, 6, 8):
        run(tiny, quick, f"to{steps}", averaging="none", selection="last", steps=steps)
        states.append(tensors(f"to{steps}/model.safetensors"))
    for key, value in tensors("run/models/swa.safetensors").items():
        torch.testing.assert_close(value, mean_of(states)[key])


def test_steps_that_are_no_multiple_of_evaluate_every(tiny: Path, quick: dict[str, Any], monkeypatch: Any) -> None:
    """The last evaluation is recorded and may be the best; SWAD sees multiples alone and averages to the end."""
    scripted(monkeypatch, [1, 1, 9, 9])  # were the last one seen, there would be an end
    seen = iterates(monkeypatch)
    run(tiny, quick, steps=7, **SWAD)
    assert sorted({line["step"] for line in records(Path("run"), "eval")}) == [2, 4, 6, 7]
    assert {line["step"] for line in records(Path("run"), "final") if line["model"] == "last"} == {7}
    want = mean_of([seen[step] for step in range(2, 8)])
    for key, value in tensors("run/models/swad.safetensors").items():
        torch.testing.assert_close(value, want[key])


def test_more_steps_between_evaluations_than_steps(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, steps=3, evaluate_every=100)
    assert [line["step"] for line in records(Path("run"), "train")] == [3]
    assert mean_accuracy(finished.scores["best"], "val") is not None


# --- protocols


def test_all_domains_as_sources(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, target=())
    assert finished.accuracy is None
    assert set(finished.scores) == {"last", "best", "swad"}
    assert {line["role"] for line in records(Path("run"), "eval", "final")} == {"source"}
    assert json.loads(Path("run/model.json").read_text())["sources"] == list(DOMAINS)


def test_a_single_source(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, target=(), source="ink")
    domains = {line["domain"]: line["role"] for line in records(Path("run"), "eval")}
    assert domains == {"ink": "source", "paper": "target", "sky": "target"}
    scores = finished.scores["swad"]
    assert (
        finished.accuracy
        == (scores["target", "paper", "test"].accuracy + scores["target", "sky", "test"].accuracy) / 2
    )


def test_targets_not_tracked_are_measured_at_the_end(tiny: Path, quick: dict[str, Any]) -> None:
    finished = run(tiny, quick, track_target=False)
    assert {line["role"] for line in records(Path("run"), "eval")} == {"source"}
    assert finished.accuracy is not None
    assert set(finished.scores) == {"last", "best", "swad"}


def test_validation_images_are_never_trained_on(tiny: Path, quick: dict[str, Any], monkeypatch: Any) -> None:
    seen: dict[str, set[int]] = {}
    original = trainer.training_batches

    def watched(parts: list[Any], **options: Any) -> Any:
        seen["train"] = {(d, int(i)) for d, part in enumerate(parts) for i in part.indices}
        return original(parts, **options)

    monkeypatch.setattr(trainer, "training_batches", watched)
    run(tiny, quick)
    assert len(seen["train"]) == 48
    assert {d for d, _ in seen["train"]} == {0, 1}
    clean = weights(Path("run"))["models/last.safetensors"]
    dataset = package.data.domains.from_folder(tiny)
    for d, name in enumerate(("ink", "paper")):
        for i, path in enumerate(dataset[name].images):
            if (d, i) not in seen["train"]:
                Image.radial_gradient("L").convert("RGB").save(path)
    run(tiny, quick, "poisoned")
    assert weights(Path("poisoned"))["models/last.safetensors"] == clean


def test_the_oracle_sees_no_image_that_is_reported(tiny: Path, quick: dict[str, Any]) -> None:
    """20% and 80% of the target: poisoning what is reported leaves the oracle's choice alone."""
    run(tiny, quick, "clean", steps=10)
    dataset = package.data.domains.from_folder(tiny)
    from agfa.data.splits import hold_out

    reported, for_oracle = hold_out(dataset["sky"], 0.2, 0)
    assert (len(reported), len(for_oracle)) == (24, 6)
    for i in reported.tolist():
        Image.radial_gradient("L").convert("RGB").save(dataset["sky"].images[i])
    run(tiny, quick, "poisoned", steps=10)
    assert weights(Path("clean")) == weights(Path("poisoned"))


def test_learning_happens(tiny: Path, quick: dict[str, Any]) -> None:
    for algorithm in ("erm", "agfa"):
        finished = run(tiny, quick, algorithm, algorithm=algorithm, steps=60, evaluate_every=20, batch_size=8)
        assert mean_accuracy(finished.scores["best"], "val") == 1.0


def test_precision_bf16_is_close(tiny: Path, quick: dict[str, Any]) -> None:
    for precision in ("32", "bf16-mixed"):
        run(tiny, quick, precision, precision=precision, averaging="none", selection="last", evaluate_every=1)
    exact, rough = tensors("32/model.safetensors"), tensors("bf16-mixed/model.safetensors")
    assert not equal(exact, rough)
    assert {value.dtype for value in rough.values()} == {torch.float32}
    one, other = (records(Path(p), "train") for p in ("32", "bf16-mixed"))
    for a, b in zip(one, other, strict=True):
        assert a["losses"]["nll"] == pytest.approx(b["losses"]["nll"], rel=0.05)


def test_one_channel(tiny: Path, quick: dict[str, Any]) -> None:
    run(tiny, quick, channels=1, augment=True)
    assert json.loads(Path("run/model.json").read_text())["channels"] == 1


def test_three_lines_of_python(tiny: Path, quick: dict[str, Any]) -> None:
    from agfa import load, train

    finished = train(data=str(tiny), target="sky", **quick)
    assert finished.folder == Path("runs/tiny/agfa-swad-target-sky-seed0")
    (prediction,) = load(finished.folder).predict([tiny / "sky" / "top" / "00.jpg"])
    assert prediction.label in CLASSES


def test_mistakes_in_python_are_errors_too(tiny: Path) -> None:
    with pytest.raises(UsageError, match="unknown key 'tagret'; did you mean 'target'"):
        package.train(data=str(tiny), tagret="sky")


def test_quiet_by_default(tiny: Path, quick: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    run(tiny, quick)
    assert tuple(capfd.readouterr()) == ("", "")


def test_the_working_folder_may_be_a_link(tiny: Path, quick: dict[str, Any]) -> None:
    Path("real").mkdir()
    Path("link").symlink_to("real")
    run(tiny, quick, "link")
    assert Path("real/done").exists()
    shutil.rmtree("real")
