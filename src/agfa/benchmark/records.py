"""Run folders as one table: every evaluation of every run, and what tells the runs apart.

Polars reads the logs, many at a time; a log that it stumbles over (a torn line, a NaN) is read again line by line, by
what can name the line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from agfa.benchmark.rows import AVERAGES, method_of, row_of
from agfa.data.catalog import CATALOG
from agfa.errors import AgfaError, UsageError
from agfa.training.config import INCIDENTAL

CONFIG, METRICS, DONE, FAILED = "config.yaml", "metrics.jsonl", "done", "failed.json"
CHUNK = 500  # logs that are read at once

_IDENTITY: dict[str, Any] = {
    **{"run": pl.String, "dataset": pl.String, "sources": pl.List(pl.String), "targets": pl.List(pl.String)},
    **{"algorithm": pl.String, "averaging": pl.String, "backbone": pl.String, "seed": pl.Int64, "done": pl.Boolean},
    **{"failed": pl.String, "row": pl.String, "settings": pl.String},
}
_MEASURED: dict[str, Any] = {
    **{"kind": pl.String, "model": pl.String, "step": pl.Int64},
    **{"domain": pl.String, "role": pl.String, "split": pl.String},
    **{"accuracy": pl.Float64, "loss": pl.Float64, "n": pl.Int64, "seconds": pl.Float64},
}
_NUMBERED: dict[str, Any] = {"at": pl.Int64, **_MEASURED}  # with the number of the run
_EVALUATION = ["kind", "model", "step", "domain", "role", "split"]
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C: a seventh of the time

# Which of a training's models is looked at, and on which domains it learnt: not what its settings are.
_NO_SETTING = INCIDENTAL | {"data", "algorithm", "hparams", "target", "source", "seed", "selection", "track_target"}
_OF_AVERAGES = {"averaging", "stop_early", "swad_patience", "swad_tolerance", "swad_ratio"}


def find_runs(root: Path) -> list[Path]:
    """The run folders at or below `root`, sorted. A run has a configuration, and a log or the reason why not."""
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}; give a run, or a folder with runs in it")
    found = []
    for folder, folders, files in os.walk(root):
        if CONFIG in files and (METRICS in files or FAILED in files):
            found.append(Path(folder))
            folders.clear()  # a run holds no runs
    return sorted(found)


def read_config(run: Path) -> dict[str, Any]:
    """The run's `config.yaml`."""
    file = run / CONFIG
    try:
        config = _parse_config(_read(file).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AgfaError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise AgfaError(f"{file} has no settings in it")
    return config


def _parse_config(text: str) -> Any:
    """A configuration in YAML. The settings of many runs are mostly the same, and each is parsed once.

    A setting begins where a line does; what does not come apart in that way is parsed as a whole.
    """
    try:
        settings = [_parse_setting(setting) for setting in re.split(r"\n(?=[\w\"'])", text.rstrip())]
    except yaml.YAMLError:
        settings = [None]
    if all(isinstance(setting, dict) and len(setting) == 1 for setting in settings):
        return {key: value for setting in settings for key, value in setting.items()}
    return yaml.load(text, _LOADER)


@lru_cache(maxsize=4096)
def _parse_setting(text: str) -> Any:
    return yaml.load(text, _LOADER)  # a safe loader: plain values only


def read_runs(roots: Iterable[Path]) -> pl.DataFrame:
    """One row per evaluation of every run at or below `roots`; a run without any has one row, of nulls.

    The columns are what tells the run apart (`run`, `dataset`, `sources`, `targets`, `algorithm`, `averaging`,
    `backbone`, `seed`, `done`, `failed`: the reason, and the `seconds` of its training); the table `row` of the model
    and a digest of its `settings`: all that decides the outcome but for seed and domains; and the record itself
    (`kind`, `model`, `step`, `domain`, `role`, `split`, `accuracy`, `loss`, `n`).
    """
    # two roots may overlap; a run counts once
    runs = list({run.resolve(): run for root in roots for run in find_runs(root)}.values())
    with ThreadPoolExecutor(2) as pool:  # polars reads the logs while Python reads the configurations
        chunks = range(0, len(runs), CHUNK)
        logs = [pool.submit(_evaluations, runs[i : i + CHUNK], i) for i in chunks]
        identities = [identity for run in runs for identity in _identities(run)]
        measured = pl.concat([log.result() for log in logs]) if logs else pl.DataFrame(schema=_NUMBERED)
    unmeasured = pl.DataFrame({"at": range(len(runs))}, schema={"at": pl.Int64}).join(measured, on="at", how="anti")
    measured = pl.concat([measured, unmeasured], how="diagonal").sort("at", maintain_order=True)
    averaged = measured["model"].is_in(AVERAGES).fill_null(False)
    whose = pl.DataFrame(identities, schema=_IDENTITY, orient="row")[measured["at"] * 2 + averaged]
    return pl.concat([whose, measured.drop("at")], how="horizontal")


def _identities(run: Path) -> Iterator[tuple[Any, ...]]:
    """The values of `_IDENTITY`: for the run's models at a step, then for their average."""
    config = read_config(run)
    try:
        known = CATALOG.get(str(config["data"]).lower())
        algorithm, averaging = str(config["algorithm"]), str(config["averaging"] or "none")
        hparams = dict(config.get("hparams") or {})
        run_itself = (
            str(run),
            known.name if known else Path(str(config["data"])).name or str(config["data"]),
            [str(name) for name in config["source"] or ()],
            [str(name) for name in config["target"] or ()],
            algorithm,
            averaging,
            str(config["backbone"]),
            int(config["seed"]),
            (run / DONE).exists(),
            _failure(run),
        )
        for model in (None, averaging if averaging in AVERAGES else None):
            averaged = model is not None
            yield (*run_itself, row_of(algorithm, hparams, model), settings_digest(config, hparams, averaged))
    except KeyError as error:
        raise AgfaError(f"{run / CONFIG} does not say {error}") from error
    except (TypeError, ValueError) as error:
        raise AgfaError(f"{run / CONFIG} has a value of the wrong kind: {error}") from error


def settings_digest(config: dict[str, Any], hparams: dict[str, Any], averaged: bool) -> str:
    """A name for all that decides a model's outcome, but for the seed and the domains.

    How a training is averaged changes nothing of its model at a step, unless it stops where the average ends.
    """
    left_out = _NO_SETTING
    if not averaged and not (config.get("stop_early") and config["averaging"] == "swad"):
        left_out = left_out | _OF_AVERAGES
    values = {key: value for key, value in config.items() if key not in left_out}
    text = json.dumps([method_of(str(config["algorithm"])), hparams, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _failure(run: Path) -> str | None:
    """Why a run was given up, in a line."""
    if not (run / FAILED).exists():
        return None
    try:
        told = json.loads(_read(run / FAILED))
    except ValueError:
        told = None
    reason = told.get("reason") if isinstance(told, dict) else None
    return " ".join(str(reason).split()) if reason else f"{FAILED} gives no reason"


def _evaluations(runs: Sequence[Path], first: int) -> pl.DataFrame:
    """The evaluations of some runs, which are numbered from `first`, in the column `at`."""
    logs = [_read(run / METRICS) if (run / METRICS).exists() else b"" for run in runs]
    frame = _parse(runs, logs, first)
    kinds = frame.group_by("at").agg(training=pl.col("seconds").filter(pl.col("kind") == "train").max())
    # a resumed run measures again what came after its checkpoint: the later record is the one that counts
    return (
        frame.filter(pl.col("kind").is_in(["eval", "final"]))
        .unique(subset=["at", *_EVALUATION], keep="last", maintain_order=True)
        .drop("seconds")
        .join(kinds.rename({"training": "seconds"}), on="at", how="left")
        .select(*_NUMBERED)
    )


def _parse(runs: Sequence[Path], logs: Sequence[bytes], first: int) -> pl.DataFrame:
    """All records in the logs: at once where nothing is odd in them, else by halves, and the odd one by itself."""
    lines = [log.count(b"\n") + (not log.endswith(b"\n") and len(log) > 0) for log in logs]
    text = b"\n".join(log.removesuffix(b"\n") for log in logs if log)
    try:
        frame = pl.read_ndjson(io.BytesIO(text), schema=_MEASURED) if text else pl.DataFrame(schema=_MEASURED)
    except pl.exceptions.ComputeError:
        frame = None
    if frame is not None and frame.height == sum(lines):
        at = pl.Series("at", range(first, first + len(logs)), dtype=pl.Int64)
        return frame.with_columns(at=at.gather(_repeat(lines))).select(*_NUMBERED)
    if len(logs) == 1:
        rows = [{"at": first, **record} for record in _one_by_one(runs[0] / METRICS, logs[0])]
        return pl.DataFrame(rows, schema=_NUMBERED).select(*_NUMBERED)
    half = len(logs) // 2
    return pl.concat([_parse(runs[:half], logs[:half], first), _parse(runs[half:], logs[half:], first + half)])


def _repeat(counts: Sequence[int]) -> pl.Series:
    """0 as often as counts[0] says, 1 as often as counts[1] says, ..."""
    frame = pl.DataFrame({"i": range(len(counts)), "n": counts}, schema={"i": pl.UInt32, "n": pl.UInt32})
    return frame.select(pl.col("i").repeat_by("n").explode().drop_nulls())["i"]


def _one_by_one(file: Path, log: bytes) -> Iterator[dict[str, Any]]:
    """Every record, but for a torn last line (the process was killed while writing)."""
    lines = [(number, line) for number, line in enumerate(log.split(b"\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if number == lines[-1][0]:
                return
            raise AgfaError(f"{file}, line {number}: not a record ({error})") from error
        if not isinstance(record, dict):
            raise AgfaError(f"{file}, line {number}: not a record, but {type(record).__name__}")
        try:
            yield {name: _cast(record.get(name), kind) for name, kind in _MEASURED.items()}
        except (TypeError, ValueError) as error:
            what = f"a record of the wrong shape ({type(error).__name__}: {error})"
            raise AgfaError(f"{file}, line {number}: {what}") from error


def _cast(value: Any, kind: Any) -> Any:
    return None if value is None else {pl.String: str, pl.Int64: int}.get(kind, float)(value)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise AgfaError(f"cannot read {file}: {error.strerror or error}") from error
