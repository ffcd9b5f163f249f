"""One file from the internet: what is there already is not fetched again, and a changed file is never spliced."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agfa.data.unpack import PIECE, UnusableError
from agfa.errors import AgfaError
from agfa.files import put, writing

TIMEOUT = 30.0  # seconds without a byte
WAITS = (1.0, 4.0, 10.0)  # seconds before the tries that follow one which brought nothing new
PASSING = (408, 425, 429, 500, 502, 503, 504)  # answers that may be others in a moment

Progress = Callable[[int, int], None]  # (bytes there, bytes in all; 0 where nobody says)


class Limits(NamedTuple):
    """What is known of a file before it comes."""

    size: int | None  # to the byte
    most: int  # bytes; whatever goes beyond is refused
    verified: bool  # its checksum is known, and looked at afterwards


def fetch(
    url: str, path: Path, limits: Limits, *, progress: Progress | None = None, waits: Sequence[float] = WAITS
) -> bool:
    """Make `path` the file at `url`, going on from what earlier tries left beside it (`.part`).

    A part is only added to while the server says that the file is still the same one (If-Range), or where a checksum
    will tell. Cut connections are taken up again as long as each brings something new.

    Returns:
        Whether it came in several parts.

    Raises:
        UnusableError: the file cannot be had there.
        AgfaError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    furthest, failures, tries = _size(part), 0, int(part.exists())
    while True:
        tries += 1
        try:
            reason = _receive(url, part, limits, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # there is no such range: not the file that the part is of
                part.unlink(missing_ok=True)
            elif error.code not in PASSING:
                raise UnusableError(f"the server answers {error.code} {error.reason}") from error
            reason = f"the server answers {error.code} {error.reason}"
        except urllib.error.URLError as error:
            reason = f"no connection ({error.reason})"
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"the connection broke ({error or type(error).__name__})"
        if not reason:
            break
        failures = 0 if _size(part) > furthest else failures + 1
        furthest = max(furthest, _size(part))
        if failures > len(waits):
            raise UnusableError(reason)
        time.sleep(waits[failures - 1] if failures else 0)
    with writing(path):
        part.replace(path)
        _note(part).unlink(missing_ok=True)
    return tries > 1


def _receive(url: str, part: Path, limits: Limits, progress: Progress | None) -> str:
    """Add to the part until the file is whole; otherwise the reason why it is not."""
    have, (same, total) = _size(part), _read_note(part)
    if have and have == total:
        return ""
    headers = {"User-Agent": "agfa", "Accept-Encoding": "identity"}
    if have and (same or limits.verified):
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": same} if same else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
        if answer.headers.get_content_type() == "text/html":
            raise UnusableError("it answers with a web page, not with the file (a quota, a login, or it has moved)")
        length = int(answer.headers.get("Content-Length", 0))
        if answer.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
            if span is None or int(span[1]) != have:
                part.unlink(missing_ok=True)
                return "the server sends another range than it was asked for"
            total = have + length if span[2] == "*" else int(span[2])
        else:
            have, total = 0, length
            etag = answer.headers.get("ETag", "")
            same = answer.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
            part.unlink(missing_ok=True)  # first: the note must never be of another file than the part
            put(_note(part), json.dumps([same, total]).encode())
        if limits.size is not None and total and total != limits.size:
            raise UnusableError(f"it has {total} bytes, not {limits.size}")
        if total > limits.most:
            raise UnusableError(f"it has {total} bytes, more than the {limits.most} that it may have")
        free = shutil.disk_usage(part.parent).free
        if total - have > free:
            raise AgfaError(
                f"cannot write {part.parent}: no space left on the disk for {total - have} bytes, there are {free}; "
                "free some and run the same command again"
            )
        with writing(part):
            file = part.open("ab" if have else "wb")
        with file:
            while not total or have < total:
                piece = answer.read1(PIECE)
                if not piece:
                    break
                with writing(part):
                    file.write(piece)
                    file.flush()
                have += len(piece)
                if have > limits.most:
                    raise UnusableError(f"it has more than the {limits.most} bytes that it may have")
                if progress is not None:
                    progress(have, total)
            with writing(part):
                os.fsync(file.fileno())
    return f"the connection was cut after {have} of {total} bytes" if have < total else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _note(part: Path) -> Path:
    """Beside a part: what the server called the version of the file that it is of, and how long that is."""
    return part.with_name(f"{part.name}.json")


def _read_note(part: Path) -> tuple[str, int]:
    try:
        same, total = json.loads(_note(part).read_text())
        return str(same), int(total)
    except (OSError, ValueError, TypeError):
        return "", 0
