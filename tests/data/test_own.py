"""Own data in its other forms: tables with the images in them, from a disk or the hub, and WILDS' metadata."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from agfa.data import sources
from agfa.data.catalog import load
from agfa.data.check import check
from agfa.data.domains import DomainDataset, from_folder
from agfa.data.store import open_images
from agfa.errors import AgfaError, UsageError
from support import CLASSES, DOMAINS, Agfa, listing

NAMES = tuple(reversed(CLASSES))  # Hugging Face's classes keep their own order


def save_shards(root: Path, folder: Path, shards: int = 3, row_group_size: int = 7) -> Path:
    """The images of a folder as `datasets` saves them: structs {bytes, path}, and numbers with noted names."""
    files = sorted(root.rglob("*.*"))
    np.random.default_rng(0).shuffle(files)  # type: ignore[arg-type]
    table = pl.DataFrame(
        {
            "image": [{"bytes": f.read_bytes(), "path": f.name} for f in files],
            "label": [NAMES.index(f.parent.name) for f in files],
            "domain": [f.parts[-3] for f in files],
        }
    )
    features = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}
    note = {"huggingface": json.dumps({"info": {"features": features}})}
    folder.mkdir(parents=True)
    for i in range(shards):
        part = table[i::shards]
        part.write_parquet(
            folder / f"train-{i:05}-of-{shards:05}.parquet", metadata=note, row_group_size=row_group_size
        )
    return folder


def read(data: object) -> DomainDataset:
    return load(str(data))[0]


def pixels(dataset: DomainDataset) -> set[tuple[str, str, bytes]]:
    """Every image with its domain and class."""
    images = open_images(dataset, 16)
    return {
        (d.name, dataset.classes[label], image.numpy().tobytes())
        for d in dataset.domains
        for label, image in zip(d.labels, images[d.name], strict=True)
    }


# --- images in Parquet


@pytest.mark.parametrize("below", ["saved", "saved/data"])
def test_a_dataset_saved_as_parquet(below: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_shards(tiny, Path(below))
    monkeypatch.setattr(sources, "BLOCK", 4)  # more blocks than are kept
    dataset = read("saved")
    assert (dataset.name, dataset.classes, dataset.domain_names) == ("saved", NAMES, DOMAINS)
    assert dataset["ink"].keys[0].startswith(f"{below}/train-00000-of-00003.parquet:".removeprefix("saved/"))
    assert len({key for d in dataset.domains for key in d.keys}) == 90
    assert pixels(dataset) == pixels(from_folder(tiny))


def test_trained_on(train: Agfa, agfa: Agfa, tiny: Path) -> None:
    save_shards(tiny, Path("saved"))
    ended = agfa("data", "check", "saved")
    assert (ended.status, ended.err) == (0, "")
    assert train(data="saved", target="sky").status == 0


def test_the_store_is_built_again_when_a_shard_changes(tiny: Path) -> None:
    folder = save_shards(tiny, Path("saved"))
    open_images(read("saved"), 8)
    open_images(read("saved"), 8)
    assert len(list(Path("cache/store").iterdir())) == 1
    shard = next(folder.iterdir())
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    open_images(read("saved"), 8)
    assert len(list(Path("cache/store").iterdir())) == 2


def test_one_file_of_plain_bytes_and_names(tiny: Path) -> None:
    files = sorted(tiny.rglob("*.*"))
    pl.DataFrame(
        {
            "image": [f.read_bytes() for f in files],
            "label": [f.parent.name for f in files],
            "domain": [f.parts[-3] for f in files],
        }
    ).write_parquet("all.parquet")
    assert pixels(read("all.parquet")) == pixels(from_folder(tiny))


def test_rows_without_bytes_are_named(tiny: Path) -> None:
    save_shards(tiny, Path("saved"), shards=1)
    (shard,) = Path("saved").iterdir()
    table = pl.read_parquet(shard).with_row_index()
    spoiled = pl.when(pl.col("index") == 5).then(None).when(pl.col("index") == 6).then(pl.lit(b"text"))
    bytes_ = spoiled.otherwise(pl.col("image").struct.field("bytes"))
    table.with_columns(image=pl.struct(bytes=bytes_, path=pl.lit(None, pl.String))).write_parquet(shard)
    assert sorted(str(p) for p in check(read("saved")) if p.fatal) == [
        f"{shard}:5: no bytes in its column 'image'; mend it or remove it from {_domain(table, 5)!r}",
        f"{shard}:6: not an image; mend it or remove it from {_domain(table, 6)!r}",
    ]


def _domain(table: pl.DataFrame, row: int) -> str:
    return str(table["domain"][row])


def test_a_number_that_is_no_class(tiny: Path) -> None:
    save_shards(tiny, Path("saved"), shards=1)
    (shard,) = Path("saved").iterdir()
    note = {"huggingface": pl.read_parquet_metadata(shard)["huggingface"]}
    table = pl.read_parquet(shard).with_columns(label=pl.when(pl.col("domain") == "sky").then(-1).otherwise("label"))
    table.write_parquet(shard, metadata=note)
    with pytest.raises(
        UsageError, match=r"saved/train-00000-of-00001.parquet: row \d+ is wrong, it has no label; so"
    ):
        read("saved")


def test_images_and_paths_do_not_mix(tiny: Path) -> None:
    save_shards(tiny, Path("saved"))
    pl.DataFrame({"path": ["a.png"], "label": ["x"], "domain": ["y"]}).write_parquet("saved/b.parquet")
    with pytest.raises(UsageError, match="some tables of saved hold images and others paths"):
        read("saved")


# --- folders with metadata


def test_metadata_beside_the_images(tiny: Path) -> None:
    rows = [(str(f.relative_to(tiny)), f.parent.name, f.parts[-3]) for f in sorted(tiny.rglob("*.*"))]
    table = pl.DataFrame(rows, schema=["file_name", "class", "domain"], orient="row")
    table.filter(pl.col("domain") != "ink").write_csv(tiny / "metadata.csv")
    dataset = read(tiny)
    assert (dataset.name, dataset.domain_names) == ("tiny", ("paper", "sky"))


def test_metadata_about_something_else_leaves_the_folder_a_folder(tiny: Path) -> None:
    (tiny / "metadata.csv").write_text("camera,lens\n1,2\n")
    assert listing(read(tiny)) == listing(from_folder(tiny))
    (tiny.parent / "flat").mkdir()
    (tiny / "metadata.csv").rename(tiny.parent / "flat" / "metadata.csv")
    with pytest.raises(UsageError, match="has no column 'path'"):
        read(tiny.parent / "flat")


WILDS = {
    "Camelyon17": (
        ",patient,node,x_coord,y_coord,tumor,slide,center,split\n"
        "0,004,4,3328,21792,1,0,0,0\n1,017,1,32,64,0,1,3,0\n2,017,1,64,64,1,1,3,1\n",
        "metadata.csv",
        {
            "0": [("1", "patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png")],
            "3": [
                ("0", "patches/patient_017_node_1/patch_patient_017_node_1_x_32_y_64.png"),
                ("1", "patches/patient_017_node_1/patch_patient_017_node_1_x_64_y_64.png"),
            ],
        },
    ),
    "iWildCam": (
        ",split,location_remapped,location,sequence_remapped,y,filename\n"
        "0,train,12,9,1,5,a.jpg\n1,test,3,8,2,0,b.jpg\n2,train,12,9,1,0,c.jpg\n",
        "metadata.csv",
        {"3": [("0", "train/b.jpg")], "12": [("0", "train/c.jpg"), ("5", "train/a.jpg")]},
    ),
    "RxRx1": (
        "site_id,cell_type,dataset,experiment,plate,well,site,sirna_id\n"
        "x,HEPG2,train,HEPG2-01,1,B03,1,513\ny,HEPG2,test,HEPG2-02,2,C04,2,840\n",
        "metadata.csv",
        {
            "HEPG2-01": [("513", "images/HEPG2-01/Plate1/B03_s1.png")],
            "HEPG2-02": [("840", "images/HEPG2-02/Plate2/C04_s2.png")],
        },
    ),
    "FMoW": (
        "split,img_filename,category,country_code,timestamp\n"
        "train,a.jpg,airport,FRA,2014-07-08T10:09:39Z\nseq,b.jpg,zoo,USA,2016-01-01T00:00:00Z\n"
        "test,c.jpg,zoo,USA,2016-01-01T00:00:00Z\n",
        "rgb_metadata.csv",
        {"2014": [("airport", "images/rgb_img_0.png")], "2016": [("zoo", "images/rgb_img_2.png")]},
    ),
}


@pytest.mark.parametrize("name", WILDS)
def test_wilds(name: str, tmp_path: Path) -> None:
    text, file, wanted = WILDS[name]
    (tmp_path / "v1.0").mkdir()
    (tmp_path / "v1.0" / file).write_text(text)
    dataset = read(tmp_path / "v1.0")
    assert dataset.name == name
    assert {
        d.name: [(dataset.classes[y], key) for y, key in zip(d.labels, d.keys, strict=True)] for d in dataset.domains
    } == wanted
    assert dataset.domains[0].images[0] == tmp_path / "v1.0" / dataset.domains[0].keys[0]


def test_wilds_by_other_columns(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text(WILDS["Camelyon17"][0])
    assert read(f"{tmp_path}?domain=slide&label=center").classes == ("0", "3")
    with pytest.raises(UsageError, match=r"unknown column of .*metadata.csv 'slides'; did you mean 'slide'"):
        read(f"{tmp_path}?domain=slides")
    with pytest.raises(UsageError, match=r"the paths of Camelyon17 follow from metadata.csv; leave out path=slide"):
        read(f"{tmp_path}?path=slide")


# --- the hub


class Hub(http.server.SimpleHTTPRequestHandler):
    """The few addresses of the hub that a dataset needs; files lie in REVISION/PATH below the directory."""

    def do_GET(self) -> None:
        self._answer(super().do_GET)

    def do_HEAD(self) -> None:
        self._answer(super().do_HEAD)

    def _answer(self, send: object) -> None:
        from urllib.parse import unquote

        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        root = Path(self.directory)  # type: ignore[attr-defined]
        if parts[0] == "api":  # api/datasets/OWNER/NAME/(revision|tree)/REVISION
            revision = "/".join(parts[5:])
            if parts[2:4] != ["someone", "tiny"] or not (root / _commit(revision)).is_dir():
                self.send_error(404)
                return
            files = [f for f in (root / _commit(revision)).rglob("*") if f.is_file()]
            names = [f.relative_to(root / _commit(revision)).as_posix() for f in files]
            info = {"id": "someone/tiny", "sha": _commit(revision), "siblings": [{"rfilename": n} for n in names]}
            tree = [
                {"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40}
                for n, f in zip(names, files, strict=True)
            ]
            body = json.dumps(tree if parts[4] == "tree" else info).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            super().end_headers()
            self.wfile.write(body)
            return
        self.commit = parts[4]
        self.path = "/" + "/".join(parts[4:])  # datasets/OWNER/NAME/resolve/COMMIT/PATH
        send()  # type: ignore[operator]

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{abs(hash(self.path)):032x}"')
        self.send_header("X-Repo-Commit", getattr(self, "commit", "0"))
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _commit(revision: str) -> str:
    return {"main": "1" * 40, "refs/convert/parquet": "2" * 40}.get(revision, revision)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A hub with the dataset someone/tiny, still empty, and the environment that points at it."""
    folder = tmp_path / "hub"
    (folder / _commit("main")).mkdir(parents=True)
    (folder / _commit("main") / "README.md").write_text("nothing")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield folder, {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()


def read_elsewhere(environment: dict[str, str], name: str = "hf:someone/tiny") -> str:
    """The domains and counts in a process of its own, as huggingface_hub reads the environment once; or the error."""
    code = f"from agfa.data.own import read_own; d = read_own({name!r}); print(d.domain_names, d.counts().tolist())"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or ended.stderr.splitlines()[-1]


ALL = f"{DOMAINS} {[[10, 10, 10]] * 3}"


def test_from_the_hub_and_then_from_its_cache(hub: tuple[Path, dict[str, str]], tiny: Path) -> None:
    folder, environment = hub
    save_shards(tiny, folder / _commit("main") / "data")
    for more in ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert read_elsewhere(environment | more) == ALL


def test_what_the_hub_itself_makes_of_a_dataset(hub: tuple[Path, dict[str, str]], tiny: Path) -> None:
    folder, environment = hub
    save_shards(tiny, folder / _commit("refs/convert/parquet") / "default" / "train")
    assert read_elsewhere(environment) == ALL


def test_the_hub_does_not_have_it(hub: tuple[Path, dict[str, str]]) -> None:
    folder, environment = hub
    assert "AgfaError: hf:someone/else cannot be had from the hub: " in read_elsewhere(environment, "hf:someone/else")
    (folder / _commit("refs/convert/parquet")).mkdir()
    (folder / _commit("refs/convert/parquet") / "x.txt").write_text("")
    assert "UsageError: hf:someone/tiny has no Parquet files" in read_elsewhere(environment)


def test_no_name_for_the_hub() -> None:
    for name in ("hf:", "hf:a/b/c", "hf:a b"):
        with pytest.raises(AgfaError, match="cannot be had from the hub"):
            read(name)
