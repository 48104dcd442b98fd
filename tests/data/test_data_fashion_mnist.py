"""Fashion-MNIST: found, checked, fetched without touching the system, or refused with the file's name."""

import gzip
import hashlib
import http.server
import os
import stat
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import fashion_mnist as fm
from shoal.data import fetch_fashion_mnist, load_fashion_mnist
from shoal.errors import UsageError

SHAPES = {
    "train-images-idx3-ubyte": (6, 28, 28),
    "train-labels-idx1-ubyte": (6,),
    "t10k-images-idx3-ubyte": (4, 28, 28),
    "t10k-labels-idx1-ubyte": (4,),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    """A tiny set in the place of the real one, whose sums are the ones checked, and empty places."""
    chance = np.random.default_rng(0)
    files = {}
    for name, shape in SHAPES.items():
        values = chance.integers(0, 10, shape, dtype=np.uint8)
        head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        files[name] = head + values.tobytes()
        monkeypatch.setitem(fm.SUMS, name, hashlib.md5(files[name]).hexdigest())
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fm, "DEBIAN_FOLDER", tmp_path / "debian" / "fashion-mnist")
    return files


def put(folder: Path, files: dict[str, bytes], packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        else:
            (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", ["", "fashion-mnist"])
def test_the_four_files_are_read(tiny, tmp_path: Path, packed: bool, below: str) -> None:
    folder = put(tmp_path / "mine" / below, tiny, packed)
    data = load_fashion_mnist(tmp_path / "mine")
    assert data.source == str(folder)
    assert data.train_images.shape == (6, 28, 28) and data.train_images.dtype == torch.uint8
    assert data.test_images.shape == (4, 28, 28)
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.train_images.numpy().tobytes() == tiny["train-images-idx3-ubyte"][16:]
    assert data.test_labels.tolist() == list(tiny["t10k-labels-idx1-ubyte"][8:])
    data.train_images.zero_()  # writable, not a view of the file


def test_places_are_tried_in_order(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fm.DataMissing, match=r"debian.*cache"):
        load_fashion_mnist()
    places = [fm.cache_folder(), fm.DEBIAN_FOLDER, tmp_path / "told"]
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "told"))
    with pytest.raises(fm.DataMissing, match=r"SHOAL_DATA = .*told"):
        load_fashion_mnist()
    for place in places:
        put(place, tiny)
        assert load_fashion_mnist().source == str(place)


def test_a_damaged_file_is_named(tiny, tmp_path: Path) -> None:
    folder = put(tmp_path / "mine", tiny)
    name = "t10k-labels-idx1-ubyte"
    (folder / f"{name}.gz").write_bytes(gzip.compress(tiny[name][:-1] + b"\x0b"))
    with pytest.raises(UsageError, match=rf"{name}.gz is damaged: its decompressed MD5.*fetch it"):
        load_fashion_mnist(folder)
    (folder / f"{name}.gz").write_bytes(gzip.compress(tiny[name])[:-9])
    with pytest.raises(UsageError, match=rf"{name}.gz cannot be read.*remove it"):
        load_fashion_mnist(folder)
    (folder / f"{name}.gz").write_bytes(b"no gzip file")
    with pytest.raises(UsageError, match=rf"{name}.gz cannot be read"):
        load_fashion_mnist(folder)
    (folder / f"{name}.gz").unlink()
    with pytest.raises(UsageError, match=f"has some of the Fashion-MNIST files but not {name}"):
        load_fashion_mnist(folder)


def test_a_folder_without_them_is_refused(tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"folder = .*train-images-idx3-ubyte.*neither there nor"):
        load_fashion_mnist(tmp_path)


class Mirror:
    """A small web server on loopback, whose answers a test can spoil."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.answers = {f"/data/{name}.gz": gzip.compress(data) for name, data in files.items()}
        self.asked: list[str] = []
        self.cut = 0
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                body = mirror.answers.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) - mirror.cut])

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/data/"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def mirror(tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "*")
    one = Mirror(tiny)
    yield one
    one.close()


def test_a_mirror_fills_the_cache_once(mirror: Mirror) -> None:
    folder = fetch_fashion_mnist(mirrors=[mirror.address], use_apt=False)
    assert folder == fm.cache_folder()
    assert load_fashion_mnist().source == str(folder)
    assert len(mirror.asked) == 4
    assert fetch_fashion_mnist(mirrors=[mirror.address], use_apt=False) == folder
    assert len(mirror.asked) == 4
    assert os.listdir(folder.parent) == ["fashion-mnist"]  # no scratch folder is left


def test_the_second_mirror_serves_when_the_first_does_not(mirror: Mirror, tmp_path: Path) -> None:
    dest = tmp_path / "there"
    missing = mirror.address.replace("/data/", "/elsewhere/")
    assert fetch_fashion_mnist(dest, mirrors=[missing, mirror.address], use_apt=False) == dest
    assert len(load_fashion_mnist(dest).train_labels) == 6


def test_nothing_is_left_of_a_bad_download(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "there"
    with pytest.raises(fm.DataMissing, match=r"could not be fetched. .*elsewhere/: HTTP Error 404"):
        fetch_fashion_mnist(
            dest, mirrors=[mirror.address.replace("/data/", "/elsewhere/")], use_apt=False
        )
    name = "/data/t10k-labels-idx1-ubyte.gz"
    whole = mirror.answers[name]
    mirror.answers[name] = gzip.compress(b"something else altogether")
    with pytest.raises(fm.DataMissing, match=r"t10k-labels-idx1-ubyte.gz is damaged"):
        fetch_fashion_mnist(dest, mirrors=[mirror.address], use_apt=False)
    mirror.answers[name] = whole
    mirror.cut = 5
    with pytest.raises(fm.DataMissing, match=r"could not be fetched"):
        fetch_fashion_mnist(dest, mirrors=[mirror.address], use_apt=False)
    mirror.cut = 0
    monkeypatch.setattr(fm, "_LARGEST_BYTES", 10)
    with pytest.raises(fm.DataMissing, match=r"no file of 10 bytes or less within 120 s"):
        fetch_fashion_mnist(dest, mirrors=[mirror.address], use_apt=False)
    assert not dest.exists() and os.listdir(tmp_path) == []


def test_no_way_left(tiny, tmp_path: Path) -> None:
    with pytest.raises(fm.DataMissing, match="Fashion-MNIST could not be fetched"):
        fetch_fashion_mnist(tmp_path / "there", mirrors=[], use_apt=False)


def command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_debians_package_is_unpacked_and_not_installed(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for apt-get and dpkg-deb that do what these do to files."""
    monkeypatch.setattr(fm, "DEBIAN_FOLDER", Path("/usr/share/datasets/fashion-mnist"))
    package = put(tmp_path / "package", tiny)
    tools = tmp_path / "tools"
    command(
        tools,
        "apt-get",
        "assert sys.argv[1:] == ['download', 'dataset-fashion-mnist'], sys.argv\n"
        "pathlib.Path('dataset-fashion-mnist_1_all.deb').write_text('deb')",
    )
    command(
        tools,
        "dpkg-deb",
        "assert sys.argv[1] == '-x' and pathlib.Path(sys.argv[2]).read_text() == 'deb'\n"
        f"shutil.copytree({str(package)!r}, sys.argv[3] + '/usr/share/datasets/fashion-mnist')",
    )
    monkeypatch.setenv("PATH", str(tools))
    dest = tmp_path / "there"
    assert fetch_fashion_mnist(dest, mirrors=[]) == dest
    assert len(load_fashion_mnist(dest).train_labels) == 6

    command(tools, "apt-get", "sys.exit('E: Unable to locate package dataset-fashion-mnist')")
    with pytest.raises(fm.DataMissing, match=r"apt-get ended with 1 \(E: Unable to locate package"):
        fetch_fashion_mnist(tmp_path / "nowhere", mirrors=[])
    command(tools, "apt-get", "import time; time.sleep(60)")
    with pytest.raises(fm.DataMissing, match="timed out"):
        fetch_fashion_mnist(tmp_path / "nowhere", mirrors=[], limit_seconds=0.2)
    (tools / "dpkg-deb").unlink()
    with pytest.raises(fm.DataMissing, match="there is no dpkg-deb here"):
        fetch_fashion_mnist(tmp_path / "nowhere", mirrors=[])


@pytest.mark.skipif(
    not (fm.DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").exists(),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_the_real_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    data = load_fashion_mnist()
    assert data.train_images.shape == (60_000, 28, 28)
    assert data.test_images.shape == (10_000, 28, 28)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    values = data.train_images.float() / 255
    assert float(values.mean()) == pytest.approx(0.2860, abs=1e-4)
    assert float(values.std()) == pytest.approx(0.3530, abs=1e-4)
