"""The commands: parse, call, print. What is slow to import is imported in the command that needs it."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

import cyclopts
from pydantic import ValidationError

from agfa import errors
from agfa.cli import (  # their commands join the application
    audit,
    bench,
    benchmark,
    data,
    export,
    models,
    predict,
    report,
    serve,
    training,
)
from agfa.cli.app import app
from agfa.errors import AgfaError, describe
from agfa.training.config import TrainConfig

__all__ = [
    "app",
    "audit",
    "bench",
    "benchmark",
    "data",
    "export",
    "main",
    "models",
    "predict",
    "report",
    "serve",
    "training",
]


def main() -> NoReturn:
    """Run the command line: one line for what went wrong, 2 for bad use, 1 for failure."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        status = app(
            [a for a in arguments if a != "--debug"],
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.exit(status if isinstance(status, int) else 0)
    except KeyboardInterrupt:
        print("agfa: stopped; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if errors.speaks:
            print(f"agfa: {_one_line(error)}", file=sys.stderr)
        bad_use = isinstance(error, cyclopts.CycloptsError)
        sys.exit(2 if bad_use else getattr(error, "exit_status", 1))


def _one_line(error: Exception) -> str:
    if isinstance(error, AgfaError):
        return " ".join(str(error).splitlines())
    if isinstance(error, cyclopts.CycloptsError):
        cause = error.__cause__
        text = describe(cause, TrainConfig) if isinstance(cause, ValidationError) else str(error)
        return f"{' '.join(text.split())} (agfa --help)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}; the same command goes on where it stopped"
    return f"{type(error).__name__}: {' '.join(str(error).split())} (run it again with --debug for the traceback)"
