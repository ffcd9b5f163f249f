"""What goes wrong, said in one line: what, where, and what to do about it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError

# Whether this process says what goes wrong. Of several that are alike one does, until they can settle which.
speaks = os.environ.get("LOCAL_RANK", "0") == "0"


class AgfaError(Exception):
    """Something failed although it was asked for properly (exit status 1)."""

    exit_status = 1


class UsageError(AgfaError):
    """Something was asked for that cannot be: a wrong name, value, file or folder (exit status 2)."""

    exit_status = 2


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not one of `known`, with the nearest that is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    few = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {few}"
    return UsageError(f"unknown {kind} {name!r}; {hint}")


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing wrong with a configuration in one line: the key, the value, what is allowed."""
    first, count = error.errors()[0], error.error_count()
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = str(unknown("key", key, model.model_fields))
    elif key:
        text = f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}"
    else:
        text = first["msg"].removeprefix("Value error, ")
    return text + (f" (and {count - 1} more)" if count > 1 else "")
