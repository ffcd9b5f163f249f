"""Where datasets can be had that several records of the catalog, or long ones, speak of.

Checksums are those that public code gives; where there is none, none is made up. Original addresses die, or come and
go (DomainNet's, PACS's): hence the copies.
"""

from __future__ import annotations

from agfa.data.arrange import remove_duplicates
from agfa.data.benchmark import File, Source

MNIST_FILES = (
    ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
MNIST_SOURCES = tuple(
    Source(tuple(File(mirror + name, f"sha256:{digest}", size, "file") for name, size, digest in MNIST_FILES))
    for mirror in (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    )
)
TSINGHUA = "https://cloud.tsinghua.edu.cn/f/{}/?dl=1"  # of the Transfer Learning Library
LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/"
DOMAINNET = "http://csr.bu.edu/ftp/visda/2019/multi-source/"
DOMAINNET_TABLES = (
    ("train-00000-of-00003", 758577202, "37dfda4256254a53d58352ba6f3ea8a1ae24d13f3d39eb27a143b859f73b3e5a"),
    ("train-00001-of-00003", 7205696451, "c5d86606a2fa7b1418895717803cfa7c3e7adad37454ee7b1ad44f1ec0eb3e15"),
    ("train-00002-of-00003", 4959599036, "bb3dd680e02ac1cf539fb6d32959b096a06535892aa8c494e31378762f02613c"),
    ("test-00000-of-00001", 5597563518, "7eb34c7c9c020f265db6c4b2405c873f4bda0259cd06b43aa31df45a17a55409"),
)
DUPLICATES = File(
    "https://raw.githubusercontent.com/facebookresearch/DomainBed/8ff97a7b159eda90ad2171eac5f6c8988d31a285/domainbed/misc/"
    "domain_net_duplicates.txt",
    "sha256:a52b4ab70203f4f3df381077694dba3e33ff44c26407e1c5faca76919c702770",
    365663,
    "file",
)


def tsinghua(**folders: str) -> tuple[File, ...]:
    """The library's archives, one a domain; nobody published their checksums."""
    return tuple(File(TSINGHUA.format(key), inside=name, into=name) for name, key in folders.items())


def domainnet(path: str, sha512: str) -> File:
    """An archive of the authors', with the beginning of its checksum in kwcoco's script."""
    name = path.rpartition("/")[2].removesuffix(".zip")
    return File(DOMAINNET + path, f"sha512:{sha512}", inside=name, into=name)


DOMAINNET_SOURCES = (
    Source(
        tuple(
            File(
                f"hf:wltjr1007/DomainNet@ee20570ae7a29c51571e55a9a17983f7625295d6/data/{name}.parquet",
                f"sha256:{digest}",
                size,
                "parquet",
            )
            for name, size, digest in DOMAINNET_TABLES
        )
    ),
    Source(
        (
            domainnet("groundtruth/clipart.zip", "3bcfb9ec1b4061e8d5b0b887d4ebd4a708732787fc563c6dfc2d"),
            domainnet("infograph.zip", "47841f0d1b8606e4b02d508b250484d54f5cf04ef6c4875c6c5a39c"),
            domainnet("groundtruth/painting.zip", "4c98b02563075948668a298c488660fda1d1a7ed85fd69caa7985fba"),
            domainnet("quickdraw.zip", "127cce1dd57fc99992f8614de77d03ae8ed6af242973f7a013ec0a"),
            domainnet("real.zip", "751713d4592d1278b50bf69787988cfae280cabdac80ee34ec4016e"),
            domainnet("sketch.zip", "369b8b6d78ac61bfcc85f660d878ba5fc701524b82bbc2eb65ca9a"),
            DUPLICATES,
        ),
        remove_duplicates,
    ),
    Source(
        (
            *tsinghua(
                clipart="f0515164a4864220b98b",
                infograph="98b19d5fc9884109a9cb",
                painting="11285ce9fbd34bb7b28c",
                quickdraw="6faa9efb498b494abf66",
                real="17a101842c564959b525",
                sketch="b305add26e9d47349495",
            ),
            DUPLICATES,
        ),
        remove_duplicates,
    ),
)
