"""All that is wrong with a folder is found in one pass, and training refuses what `check` calls fatal."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from agfa.data.check import check, require_trainable
from agfa.data.domains import from_folder
from agfa.data.splits import Roles, assign_roles
from agfa.errors import UsageError
from support import Agfa


def found(root: Path) -> list[str]:
    return [str(problem).removeprefix(f"{root}/") for problem in check(from_folder(root))]


def test_nothing_is_wrong(tiny: Path) -> None:
    assert found(tiny) == []


def test_everything_at_once(tiny: Path) -> None:
    shutil.rmtree(tiny / "paper" / "left")
    shutil.copytree(tiny / "sky" / "top", tiny / "sky" / "zigzag")
    (tiny / "ink" / "nothing").mkdir()
    (tiny / "ink" / "top" / "01.png").write_text("text")
    cut = tiny / "sky" / "left" / "02.jpg"
    cut.write_bytes(cut.read_bytes()[:-100])
    (tiny / "void" / "top").mkdir(parents=True)
    what = found(tiny)
    assert what[0] == "tiny/void: has no images; add some, or remove the folder"
    assert "tiny/paper: has no images of class 'left'; add some" in what
    assert "tiny: class 'zigzag' is in 'sky' alone; add it to the other domains, or remove it" in what
    assert "tiny: class 'nothing' is empty in every domain; add images, or remove its folders" in what
    assert "ink/top/01.png: not an image; mend it or remove it from 'ink'" in what
    assert sum(line.startswith("sky/left/02.jpg: ") for line in what) == 1
    assert sum("has the same bytes as" in line and "of another class" in line for line in what) == 10
    assert len(what) == 16


def test_one_domain_is_no_reason_to_refuse(tiny: Path) -> None:
    shutil.rmtree(tiny / "ink")
    shutil.rmtree(tiny / "sky")
    (problem,) = check(from_folder(tiny))
    assert "one domain only, 'paper'" in problem.what
    assert not problem.fatal
    dataset = from_folder(tiny)
    require_trainable(dataset, assign_roles(dataset, (), ()), allow_missing_classes=False)


def test_progress_counts_every_file(tiny: Path) -> None:
    seen = []
    check(from_folder(tiny), lambda done, total: seen.append((done, total)))
    assert seen == [(n, 90) for n in range(1, 91)]


def test_what_check_calls_fatal_stops_training(tiny: Path) -> None:
    roles = Roles(("ink", "paper"), ("sky",))
    require_trainable(from_folder(tiny), roles, allow_missing_classes=False)
    shutil.rmtree(tiny / "paper" / "left")
    with pytest.raises(UsageError, match=r"tiny/paper: has no images of class 'left'.*--allow-missing-classes"):
        require_trainable(from_folder(tiny), roles, allow_missing_classes=False)
    require_trainable(from_folder(tiny), roles, allow_missing_classes=True)


def test_a_class_that_no_source_has_is_always_refused(tiny: Path) -> None:
    shutil.copytree(tiny / "sky" / "top", tiny / "sky" / "zigzag")
    with pytest.raises(UsageError, match="class 'zigzag' is in no source domain, only in sky"):
        require_trainable(from_folder(tiny), Roles(("ink", "paper"), ("sky",)), allow_missing_classes=True)


def test_a_missing_class_can_be_trained_without(train: Agfa, tiny: Path) -> None:
    shutil.rmtree(tiny / "paper" / "left")
    assert train(target="sky", out="run").status == 2
    assert train(target="sky", out="run", allow_missing_classes=True).status == 0


def test_the_command(agfa: Agfa, tiny: Path) -> None:
    ended = agfa("data", "check", tiny)
    assert (ended.status, ended.err) == (0, "")
    assert "no problems" in ended.out
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["ink", "30", "10", "10", "10"] in rows
    (tiny / "ink" / "top" / "01.png").write_text("text")
    shutil.rmtree(tiny / "paper" / "left")
    ended = agfa("data", "check", tiny)
    assert (ended.status, ended.err) == (1, "")
    assert "2 problems, 2 of them would stop training" in ended.out
    assert "01.png" in ended.out
    assert "has no images of class 'left'" in ended.out


def test_embedded_data_is_all_right(agfa: Agfa) -> None:
    ended = agfa("data", "check", "digits")
    assert (ended.status, ended.err) == (0, "")
    assert "no problems" in ended.out


def test_domains_made_in_memory_have_no_files_to_read() -> None:
    from agfa.data.digits import digits

    assert check(digits()) == []
    assert all(isinstance(domain.images, np.ndarray) for domain in digits().domains)
