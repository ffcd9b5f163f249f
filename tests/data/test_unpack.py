"""Archives from strangers: what is good in them arrives, what is hostile leaves nothing behind."""

import gzip
import io
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from agfa.data.unpack import UnusableError, unpack
from agfa.data.unpack_parquet import unpack_parquet
from serving import contents

FILES = {"top/a/1.jpg": b"one" * 1000, "top/a/deep/2.jpg": b"", "top/b/ü 3.jpg": b"three", "readme.txt": b"hello"}
MODES = {"tar": "w", "tar.gz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}
MOST = 1 << 20


def make(path: Path, kind: str, files: dict[str, bytes] = FILES) -> Path:
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, MODES[kind]) as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def refused(archive: Path, reason: str, most: int = MOST, **more: object) -> None:
    """It is refused for that reason, and nothing of it is left, beside or outside."""
    around = sorted(archive.parent.parent.rglob("*"))
    with pytest.raises(UnusableError, match=reason):
        unpack(archive, archive.parent / "out", max_bytes=most, **more)
    assert sorted(archive.parent.parent.rglob("*")) == around


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder in a folder: what climbs out of it is seen."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize("kind", ["zip", *MODES])
def test_every_kind_of_archive_whatever_it_is_called(kind, here):
    archive = make(here / "download", kind)
    unpack(archive, here / "out", max_bytes=MOST)
    assert contents(here / "out") == FILES
    for out, inside in enumerate(("top", "t*", "/top/")):
        unpack(archive, here / f"out{out}", inside=inside, max_bytes=MOST)
    wanted = {name.removeprefix("top/"): content for name, content in FILES.items() if name.startswith("top/")}
    assert contents(here / "out0") == contents(here / "out1") == contents(here / "out2") == wanted
    refused(archive, "no files in 'bottom'", inside="bottom")


BAD_NAMES = {
    "/etc/absolute": "leaves the folder",
    "../outside": "leaves the folder",
    "a/../../outside": "leaves the folder",
    "a/./b": "leaves the folder",
    "a//b": "leaves the folder",
    "..\\outside": "leaves the folder",
    "C:/windows": "leaves the folder",
    "a/new\nline": "control characters",
    "a/" + "x" * 300: "too long",
    "d/" * 40 + "x": "too long",
}


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: name[:12].strip())
def test_names_that_lead_out_or_are_none(name, kind, here):
    refused(make(here / "x", kind, {"good": b"1", name: b"2"}), BAD_NAMES[name])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a pipe"),
        (b"V", "of a kind that no dataset needs"),
    ],
)
def test_what_is_neither_file_nor_folder_in_a_tar(kind, reason, here):
    (here.parent / "secret").write_text("secret")
    with tarfile.open(here / "x", "w") as archive:
        archive.addfile(tarfile.TarInfo("good"))
        info = tarfile.TarInfo("odd")
        info.type, info.linkname = kind, "../../secret"
        archive.addfile(info)
        info = tarfile.TarInfo("odd/through")  # through the link, were it made
        info.size = 4
        archive.addfile(info, io.BytesIO(b"evil"))
    refused(here / "x", reason)
    assert (here.parent / "secret").read_text() == "secret"


@pytest.mark.parametrize(("mode", "reason"), [(stat.S_IFLNK, "a symbolic link"), (stat.S_IFCHR, "a device")])
def test_what_is_neither_file_nor_folder_in_a_zip(mode, reason, here):
    with zipfile.ZipFile(here / "x", "w") as archive:
        info = zipfile.ZipInfo("odd")
        info.external_attr = (mode | 0o777) << 16
        archive.writestr(info, "../../secret")
    refused(here / "x", reason)


def bomb(path: Path, kind: str) -> Path:
    """10 GB of zeros in 10 MB: the same 64 MB of them compressed once, and repeated."""
    count, header = 160, tarfile.TarInfo("zeros.jpg")
    header.size = count << 26
    if kind == "tar.gz":
        path.write_bytes(gzip.compress(header.tobuf()) + gzip.compress(bytes(1 << 26)) * count)
        return path
    packer = zlib.compressobj(wbits=-15)
    chunk = packer.compress(bytes(1 << 26)) + packer.flush(zlib.Z_FULL_FLUSH)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zeros.jpg", chunk * count + packer.flush())
    content = bytearray(path.read_bytes())
    for place in (0, content.index(b"PK\1\2") + 2):  # in the member's header and in the list of members
        content[place + 8 : place + 10] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        content[place + 22 : place + 26] = struct.pack("<I", (1 << 32) - 2)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_ten_gigabytes_of_zeros_stop_at_the_limit(kind, here, monkeypatch):
    archive, written, remove = bomb(here / "x", kind), [], shutil.rmtree
    assert archive.stat().st_size < 12 << 20

    def measured(folder, **more):
        written.extend(path.stat().st_size for path in folder.rglob("*"))
        remove(folder, **more)

    monkeypatch.setattr(shutil, "rmtree", measured)
    refused(archive, "beyond the 8388608 bytes", most=8 << 20)
    assert written == [8 << 20]


def test_a_zip_that_lies_about_its_sizes(here):
    archive = make(here / "x", "zip", {"a.jpg": bytes(1 << 16)})
    content = bytearray(archive.read_bytes())
    place = content.index(b"PK\1\2")
    content[place + 24 : place + 28] = struct.pack("<I", 10)  # "10 bytes when unpacked"
    archive.write_bytes(content)
    refused(archive, "damaged")


def test_many_members(here):
    refused(make(here / "x", "tar", {f"{i}": b"" for i in range(30)}), "more than 20 members", max_files=20)


@pytest.mark.parametrize(
    "files", [[("a", b"1"), ("a", b"2")], [("a", b"1"), ("a/b", b"2")], [("a/b", b"1"), ("a", b"2")]]
)
def test_members_in_each_others_place(files, here):
    with tarfile.open(here / "x", "w") as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    refused(here / "x", "there twice|lies in a file")


@pytest.mark.parametrize("kind", ["zip", *MODES])
def test_cut_anywhere_it_is_refused(kind, here):
    rng = np.random.default_rng(0)
    whole = make(here / "x", kind, {f"{i}.jpg": rng.bytes(3000) for i in range(5)}).read_bytes()
    end = len(whole.rstrip(b"\0")) if kind == "tar" else len(whole)  # zeros fill the last block of a tar
    for cut in rng.integers(1, end, 25).tolist():
        (here / "x").write_bytes(whole[:cut])
        refused(here / "x", "damaged|neither")


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.xz", "tar.bz2"])
def test_a_wrong_byte_never_passes_for_the_original(kind, here):
    """Flipped anywhere, it is refused, or (in a date, say) changes nothing that is unpacked."""
    rng = np.random.default_rng(1)
    files = {f"{i}.jpg": rng.bytes(300) for i in range(5)}
    whole = make(here / "x", kind, files).read_bytes()
    for place in rng.integers(0, len(whole), 40).tolist():
        (here / "x").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            unpack(here / "x", here / f"out{place}", max_bytes=MOST)
        except UnusableError:
            assert not (here / f"out{place}").exists()
        else:
            assert sorted(contents(here / f"out{place}").values()) == sorted(files.values())


def test_what_is_no_archive(here):
    for content in (b"", b"<html>quota exceeded</html>", os.urandom(5000)):
        (here / "x").write_bytes(content)
        refused(here / "x", "neither a zip nor a tar")


# --- Parquet, as on the hub


def table(path: Path, rows: list[dict[str, object]], metadata: dict[str, str] | None = None) -> Path:
    pl.DataFrame(rows).write_parquet(path, metadata=metadata)
    return path


NAMES = (
    '{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}}}'
)


def test_a_table_becomes_a_folder_byte_for_byte(here):
    rows = [
        {"image": {"bytes": b"\xff\xd8one", "path": "1.jpg"}, "domain": "sky", "label": 0},
        {"image": {"bytes": b"\xff\xd8two", "path": "1.jpg"}, "domain": "sky", "label": 0},
        {"image": {"bytes": b"\x89PNGthree", "path": None}, "domain": "Real World", "label": 1},
    ]
    unpack_parquet(table(here / "x", rows, {"huggingface": NAMES}), here / "out", max_bytes=MOST)
    assert contents(here / "out") == {
        "sky/cat/1.jpg": b"\xff\xd8one",
        "sky/cat/x-0000001-1.jpg": b"\xff\xd8two",
        "Real World/dog/0000002.png": b"\x89PNGthree",
    }


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"domain": ".."}, "leaves the folder"),
        ({"domain": "a/b"}, "no plain name"),
        ({"label": 7}, "only 2 names"),
        ({"label": -1}, "only 2 names"),
        ({"image": {"bytes": None, "path": "/etc/passwd"}}, "has no image"),
        ({"image": {"bytes": bytes(2 * MOST), "path": "1.jpg"}}, "beyond the"),
        ({"image": 3}, "has no image"),
    ],
)
def test_a_hostile_table(row, reason, here):
    good = {"image": {"bytes": b"\xff\xd8", "path": "../../1.jpg"}, "domain": "sky", "label": 0}
    with pytest.raises(UnusableError, match=reason):
        unpack_parquet(table(here / "x", [good | row], {"huggingface": NAMES}), here / "out", max_bytes=MOST)
    assert [p.name for p in here.parent.iterdir()] == ["in"]


def test_another_table_or_none(here):
    with pytest.raises(UnusableError, match="no column 'domain'"):
        unpack_parquet(table(here / "x", [{"image": b"1", "label": "cat"}]), here / "out", max_bytes=MOST)
    (here / "x").write_bytes((here / "x").read_bytes()[:-20])
    with pytest.raises(UnusableError, match="damaged"):
        unpack_parquet(here / "x", here / "out", max_bytes=MOST)
