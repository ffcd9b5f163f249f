"""Run folders as tables: what was measured, and its mean and standard error over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from agfa.errors import AgfaError, UsageError

CONFIG, METRICS, DONE = "config.yaml", "metrics.jsonl", "done"

_Schema = dict[str, type[pl.DataType]]
_NAMES = ("run", "dataset", "target", "algorithm", "averaging", "backbone")
_IDENTITY: _Schema = {**dict.fromkeys(_NAMES, pl.String), "seed": pl.Int64, "done": pl.Boolean}
_MEASURED: _Schema = {
    **{"kind": pl.String, "model": pl.String, "step": pl.Int64},
    **{"domain": pl.String, "role": pl.String, "split": pl.String},
    **{"accuracy": pl.Float64, "loss": pl.Float64, "n": pl.Int64, "seconds": pl.Float64},
}


def find_runs(root: Path) -> list[Path]:
    """The run folders at or below `root`, sorted."""
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}; give a run, or a folder with runs in it")
    return sorted(config.parent for config in root.rglob(CONFIG) if (config.parent / METRICS).is_file())


def read_config(run: Path) -> dict[str, Any]:
    """The run's `config.yaml`."""
    file = run / CONFIG
    try:
        config = yaml.safe_load(_read(file))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AgfaError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise AgfaError(f"{file} has no settings in it")
    return config


def is_done(run: Path) -> bool:
    """Whether the run got to its end."""
    return (run / DONE).exists()


def read_runs(roots: Iterable[Path]) -> pl.DataFrame:
    """One row per evaluation, of every run at or below `roots`.

    The columns are what tells the run apart (`run`, `dataset`, `target`, `algorithm`, `averaging`,
    `backbone`, `seed`, `done`) and the record itself (`kind`, `model`, `step`, `domain`, `role`, `split`,
    `accuracy`, `loss`, `n`, `seconds`).
    """
    # two roots may overlap; a run counts once
    runs = {run.resolve(): run for root in roots for run in find_runs(root)}
    rows = [row for run in runs.values() for row in _evaluations(run)]
    frame = pl.DataFrame(rows, schema={**_IDENTITY, **_MEASURED}, orient="row")
    # a resumed run measures again what came after its checkpoint: the later record is the one that counts
    key = ["run", "kind", "model", "step", "domain", "role", "split"]
    return frame.unique(subset=key, keep="last", maintain_order=True)


def read_losses(run: Path) -> pl.DataFrame:
    """The training records: `step`, `seconds`, `images_per_second`, and a column `loss_<name>` per loss."""
    rows: dict[int, dict[str, int | float | None]] = {}
    names: list[str] = []
    for number, record in _records(run / METRICS):
        if record.get("kind") != "train":
            continue
        try:
            losses = {f"loss_{name}": _cast(value, pl.Float64) for name, value in record.get("losses", {}).items()}
            rates = {name: _cast(record.get(name), pl.Float64) for name in ("seconds", "images_per_second")}
            step = int(record["step"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _odd_record(run / METRICS, number, error) from error
        names += [name for name in losses if name not in names]
        rows[step] = {"step": step, **rates, **losses}
    floats = ["seconds", "images_per_second", *names]
    schema = {"step": pl.Int64(), **dict.fromkeys(floats, pl.Float64())}
    return pl.DataFrame([rows[step] for step in sorted(rows)], schema=schema, orient="row")


def summarise(frame: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Target test accuracy of the final models, one row per group of `by`.

    Within a seed the mean is taken over the target domains; then `mean` and `standard_error` (null for a
    single seed) are over the `seeds`. A seed that lacks one of the group's `targets` (a training failed, or
    is still going on) would be a mean of something else: it is left out, and counted in `incomplete`.
    """
    if not by:
        raise UsageError("summarise by what? Give at least one column, such as 'algorithm'")
    finals = frame.filter(
        pl.col("kind") == "final",
        pl.col("role") == "target",
        pl.col("split") == "test",
        pl.col("accuracy").is_not_null(),
    )
    where = ["dataset", "target", "domain"]
    _refuse_mixtures(finals, by, where)
    over_seeds = pl.col("accuracy").filter("complete")
    return (
        finals.with_columns(targets=pl.struct(where).n_unique().over(by))
        .group_by(_distinct([*by, "seed"]))
        .agg(pl.col("accuracy").mean(), pl.col("targets").first(), n=pl.len())
        .with_columns(complete=pl.col("n") == pl.col("targets"))
        .group_by(by)
        .agg(
            mean=over_seeds.mean(),
            standard_error=over_seeds.std(ddof=1) / over_seeds.len().sqrt(),
            seeds=pl.col("complete").sum(),
            incomplete=pl.col("complete").not_().sum(),
            targets=pl.col("targets").first(),
        )
        .sort(by)
    )


def _refuse_mixtures(finals: pl.DataFrame, by: list[str], where: list[str]) -> None:
    """A mean over two models of one training, or over two settings, is the accuracy of nothing."""
    for _, cell in finals.group_by(_distinct([*by, "seed", *where]), maintain_order=True):
        if cell.height > 1:
            first = cell.row(0, named=True)
            models = ", ".join(sorted(set(map(str, cell["model"]))))
            raise AgfaError(
                f"several results for {first['algorithm']}, seed {first['seed']}, domain {first['domain']} "
                f"(models: {models}; runs: {', '.join(sorted(set(cell['run'])))}): keep one of them, "
                "or add the column that tells them apart"
            )


def _distinct(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _evaluations(run: Path) -> Iterator[dict[str, Any]]:
    identity = _identity(run)
    for number, record in _records(run / METRICS):
        if record.get("kind") not in ("eval", "final"):
            continue
        try:
            values = {name: _cast(record.get(name), kind) for name, kind in _MEASURED.items()}
        except (TypeError, ValueError) as error:
            raise _odd_record(run / METRICS, number, error) from error
        yield {**identity, **values}


def _identity(run: Path) -> dict[str, Any]:
    config = read_config(run)
    try:
        return {
            "run": str(run),
            "dataset": str(config["data"]),
            "target": "+".join(map(str, config["target"] or ())),
            "algorithm": str(config["algorithm"]),
            "averaging": str(config["averaging"] or "none"),
            "backbone": str(config["backbone"]),
            "seed": int(config["seed"]),
            "done": is_done(run),
        }
    except KeyError as error:
        raise AgfaError(f"{run / CONFIG} does not say {error}") from error
    except (TypeError, ValueError) as error:
        raise AgfaError(f"{run / CONFIG} has a value of the wrong kind: {error}") from error


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record with its line number, but for a torn last line (the process was killed while writing)."""
    lines = [(number, line) for number, line in enumerate(_read(file).split(b"\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            record = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if number == lines[-1][0]:
                return
            raise AgfaError(f"{file}, line {number}: not a record ({error})") from error
        if not isinstance(record, dict):
            raise AgfaError(f"{file}, line {number}: not a record, but {type(record).__name__}")
        yield number, record


def _cast(value: Any, kind: type[pl.DataType]) -> Any:
    return None if value is None else {pl.String: str, pl.Int64: int}.get(kind, float)(value)


def _odd_record(file: Path, number: int, error: Exception) -> AgfaError:
    return AgfaError(f"{file}, line {number}: a record of the wrong shape ({type(error).__name__}: {error})")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise AgfaError(f"cannot read {file}: {error.strerror or error}") from error
