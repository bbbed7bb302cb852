import io
import os
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tunediff.config import ConfigError, baseline
from tunediff.data import images, sources
from tunediff.data.knobs import Data


def encoded(mode: str = "RGB", size: tuple[int, int] = (8, 8), value: Any = 90, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, value).save(file, kind)
    return file.getvalue()


def colour(level: int) -> bytes:
    return encoded(value=(level, level, level))


CLASSES = {f"{name}/{i}.png": colour(10 * i + at) for at, name in enumerate(["cat", "ant"]) for i in range(3)}
SPLITS = {f"set/{split}/{name}": content for split in ("train", "test") for name, content in CLASSES.items()}


def folder(path: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return str(path)


def archive(path: Path, files: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return str(path)


def data(path: str | None, **changes: Any) -> Data:
    return Data(**({"name": "images", "path": path, "split": "all", "image_size": 8} | changes))


# ------------------------------------------------------------------------------------------------------------- digits
DIGITS = baseline("digits").data


def test_digits_are_scaled_to_bytes() -> None:
    from sklearn.datasets import load_digits

    digits = images.load(DIGITS)
    assert digits.pixels.shape == (1797, 1, 8, 8)
    assert digits.pixels.dtype == torch.uint8
    assert digits.pixels.max() == 255
    expected = np.rint(load_digits().images * 255 / 16)
    assert (digits.pixels[:, 0].numpy() == expected).all()
    assert digits.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.class_names == tuple("0123456789")
    assert digits.skipped == ()
    assert len(digits) == 1797


def test_digits_at_other_sizes_and_fewer() -> None:
    larger = images.load(Data(**{**vars(DIGITS), "image_size": 16, "max_images": 50}))
    assert larger.pixels.shape == (50, 1, 16, 16)
    again = images.load(Data(**{**vars(DIGITS), "max_images": 50}))
    assert (again.labels == larger.labels).all()
    assert len(set(again.labels.tolist())) > 5, "a shuffle, not the first of a sorted list"
    assert again.digest != larger.digest


def test_load_keeps_the_set_in_memory() -> None:
    assert images.load(DIGITS) is images.load(DIGITS)
    assert images.load(DIGITS) is images.load(Data(**{**vars(DIGITS), "horizontal_flip": True}))


# ---------------------------------------------------------------------------------------------------- folder and zips
@pytest.mark.parametrize("place", [folder, archive])
def test_class_folders_become_labels(tmp_path: Path, place: Any) -> None:
    found = images.load(data(place(tmp_path / "set", CLASSES)))
    assert found.class_names == ("ant", "cat")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.pixels[:, 0, 0, 0].tolist() == [1, 11, 21, 0, 10, 20], "files in sorted order"


def test_splits_below_a_top_folder(tmp_path: Path) -> None:
    path = archive(tmp_path / "set.zip", SPLITS | {"set/test/notes.txt": b"x", "set/cover.png": colour(1)})
    found = {split: images.load(data(path, split=split)) for split in ("train", "test", "all")}
    assert {split: len(one) for split, one in found.items()} == {"train": 6, "test": 6, "all": 12}
    skipped = {split: {*one.skipped} for split, one in found.items()}
    assert skipped["train"] == {"set/cover.png"}, "what belongs to test is not missed"
    assert skipped["test"] == skipped["all"] == {"set/cover.png", "set/test/notes.txt"}


def test_all_images_are_trained_on_where_there_are_no_splits(tmp_path: Path) -> None:
    flat = folder(tmp_path / "photos", {"a.png": colour(1), "b.png": colour(2), "notes.txt": b""})
    assert len(images.load(Data(name="images", path=flat, image_size=8))) == 2
    assert len(images.load(data(folder(tmp_path / "classes", CLASSES), split="train"))) == 6
    path = folder(tmp_path / "set", {f"train/{name}": content for name, content in CLASSES.items()})
    assert len(images.load(data(path, split="train"))) == 6
    with pytest.raises(ConfigError, match="data.path"):
        images.load(data(path, split="test"))


def test_flat_and_single_class_sets_have_no_labels(tmp_path: Path) -> None:
    flat = folder(tmp_path / "flat", {"a.png": colour(1), "b.png": colour(2)})
    single = folder(tmp_path / "single", {"cats/a.png": colour(1), "cats/b.png": colour(2)})
    mixed = folder(tmp_path / "mixed", {"cats/a.png": colour(1), "dogs/c.png": colour(1), "b.png": colour(2)})
    for path in (flat, single, mixed):
        found = images.load(data(path))
        assert found.labels is None
        assert found.class_names == ()
        assert not sources.has_labels(data(path))
    assert sources.has_labels(data(folder(tmp_path / "two", CLASSES)))


def test_formats_modes_and_orientation(tmp_path: Path) -> None:
    upright = Image.new("RGB", (8, 4), (255, 0, 0))
    upright.paste((0, 0, 255), (4, 0, 8, 4))
    turned, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 3  # turned by 180°
    upright.save(turned, "PNG", exif=exif)
    sixteen = io.BytesIO()
    Image.fromarray(np.full((8, 8), 200 * 256 + 7, np.uint16)).save(sixteen, "PNG")
    files = {
        "a.png": encoded("L", value=77),
        "b.png": encoded("RGBA", value=(1, 2, 3, 0)),
        "c.jpg": encoded("RGB", value=(50, 50, 50), kind="JPEG"),
        "d.jpeg": encoded("L", value=60, kind="JPEG"),
        "e.webp": encoded("RGB", value=(9, 9, 9), kind="WEBP"),
        "f.BMP": encoded("RGB", value=(5, 6, 7), kind="BMP"),
        "g.png": encoded("P", value=0),
        "h.png": sixteen.getvalue(),
        "i.png": encoded("1", value=1),
        "j.png": turned.getvalue(),
    }
    path = folder(tmp_path / "set", files)
    rgb = images.load(data(path, image_size=4))
    assert rgb.skipped == ()
    corner = rgb.pixels[:, :, 0, 0].tolist()
    assert corner[:2] == [[77, 77, 77], [1, 2, 3]]
    assert corner[5] == [5, 6, 7]
    assert corner[7:9] == [[200, 200, 200], [255, 255, 255]]
    assert corner[9][2] > 200, "the blue side comes first after turning"
    grey = images.load(data(path, image_size=4, channels=1))
    assert grey.pixels.shape == (10, 1, 4, 4)
    assert grey.pixels[0, 0, 0, 0] == 77


@pytest.mark.parametrize("size", [(12, 20), (20, 12), (4, 4), (3, 9), (100, 10)])
def test_any_shape_is_fitted(tmp_path: Path, size: tuple[int, int]) -> None:
    found = images.load(
        data(folder(tmp_path / "set", {"a.png": encoded(size=size, value=(9, 8, 7)), "b.png": colour(1)}))
    )
    assert found.pixels.shape == (2, 3, 8, 8)
    assert (found.pixels[0] == torch.tensor([9, 8, 7], dtype=torch.uint8)[:, None, None]).all()


def test_the_centre_is_kept(tmp_path: Path) -> None:
    wide, file = np.arange(8 * 24, dtype=np.uint8).reshape(8, 24), io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    found = images.load(data(folder(tmp_path, {"a.png": file.getvalue(), "b.png": colour(0)}), channels=1))
    assert (found.pixels[0, 0].numpy() == wide[:, 8:16]).all()


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    files = {
        "cat/broken.png": b"\x89PNG\r\n\x1a\nrubbish", "cat/cut.png": encoded(size=(64, 64))[:60], "labels.csv": b"x",
        "cat/empty.jpg": b"", "cat/.hidden.png": colour(3), ".DS_Store": b"x", "__MACOSX/cat/1.png": b"x", "README": b"x",
    }  # fmt: skip
    for path in (folder(tmp_path / "set", CLASSES | files), archive(tmp_path / "set.zip", CLASSES | files)):
        found = images.load(data(path))
        assert {*found.skipped} == files.keys()
        assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert "8 of 14 files" in found.summary[1]


def test_damaged_zip_entry_is_skipped(tmp_path: Path) -> None:
    path = Path(archive(tmp_path / "set.zip", CLASSES))
    content = bytearray(path.read_bytes())
    content[content.index(CLASSES["cat/1.png"]) + 20] ^= 255
    path.write_bytes(content)
    assert images.load(data(str(path))).skipped == ("cat/1.png",)


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    elsewhere, own = Path(folder(tmp_path / "elsewhere", CLASSES)), tmp_path / "set"
    own.mkdir()
    for link, target in ((own / "link", elsewhere), (elsewhere / "back", own), (own / "gone.png", own / "nowhere")):
        link.symlink_to(target)
    found = images.load(data(str(own)))
    assert (len(found), found.skipped) == (6, ("gone.png",))


def test_max_images_is_a_fixed_choice(tmp_path: Path) -> None:
    path = folder(tmp_path / "set", {f"{i:03}.png": colour(i) for i in range(100)})
    few, more = (images.load(data(path, max_images=n)).pixels[:, 0, 0, 0].tolist() for n in (10, 20))
    assert (len(few), few[-1] > 20, few) == (10, True, sorted({*few} & {*more}))
    assert images.load(data(path, max_images=1000)).digest == images.load(data(path)).digest


# -------------------------------------------------------------------------------------------------------------- cache
def forget() -> None:
    images.load_source.cache_clear()
    sources.zip_listing.cache_clear()


@pytest.mark.parametrize("place", [folder, archive])
def test_second_load_decodes_nothing(tmp_path: Path, cache: Path, place: Any) -> None:
    asked = data(place(tmp_path / "set", CLASSES | {"cat/broken.png": b"", "x.txt": b""}))
    first = images.load(asked)
    forget()
    with mock.patch.object(images, "decode_files", side_effect=AssertionError("decoded again")):
        second = images.load(asked)
    assert second is not first
    for name in ("name", "digest", "class_names", "skipped"):
        assert getattr(second, name) == getattr(first, name)
    assert torch.equal(second.labels, first.labels)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), PermissionError(13, "no")])
def test_a_file_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = data(folder(tmp_path / "set", CLASSES))
    with monkeypatch.context() as fault, pytest.raises(type(error)):
        fault.setattr(Path, "read_bytes", mock.Mock(side_effect=error))
        images.load(asked)
    assert not list(cache.glob("*.npz"))
    assert len(images.load(asked)) == 6


def test_many_files_are_decoded_by_several_threads_as_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{index:02}.png": colour(index) for index in range(50)} | {"broken.png": b"", "link.png": b"x"}
    path = Path(folder(tmp_path / "set", files))
    names = sorted(files)
    pixels, readable = images.decode_files(data(str(path)), path, names)
    assert pixels[:50, 0, 0, 0].tolist() == [*range(50)]
    monkeypatch.setattr(images, "PART", 7)
    with mock.patch("tunediff.core.machine.cores", return_value=3):
        others, again = images.decode_files(data(str(path)), path, names)
        assert (again.tolist(), sum(again)) == (readable.tolist(), 50)
        assert (others == pixels).all()
        (path / names[20]).unlink()
        (path / names[20]).mkdir()
        with pytest.raises(IsADirectoryError):
            images.decode_files(data(str(path)), path, names)


@pytest.mark.parametrize("place", [folder, archive])
def test_changed_files_are_read_again(tmp_path: Path, place: Any) -> None:
    first = images.load(data(place(tmp_path / "set", CLASSES)))
    path = place(tmp_path / "set", CLASSES | {"cat/1.png": colour(200)})
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))
    second = images.load(data(path))
    assert second.digest != first.digest
    assert second.pixels[4, 0, 0, 0] == 200


def test_every_setting_has_its_own_cache(tmp_path: Path, cache: Path) -> None:
    path = archive(tmp_path / "set.zip", SPLITS)
    changes = (
        {},
        {"split": "train"},
        {"image_size": 4},
        {"channels": 1},
        {"max_images": 5},
        {"horizontal_flip": False},
    )
    assert len({images.load(data(path, **change)).digest for change in changes}) == 5, "mirroring is done later"
    assert len(list(cache.glob("*.npz"))) == 5


@pytest.mark.parametrize("damage", [b"", b"PK rubbish", None])
def test_damaged_cache_is_made_again(tmp_path: Path, cache: Path, damage: bytes | None) -> None:
    asked = data(folder(tmp_path / "set", CLASSES))
    first = images.load(asked)
    (file,) = cache.glob("*.npz")
    good = file.read_bytes()
    file.write_bytes(good[:-30] if damage is None else damage)
    forget()
    assert images.load(asked).digest == first.digest
    assert len(file.read_bytes()) == len(good)


def test_unusable_cache_folder_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TUNEDIFF_CACHE", str(tmp_path / "file" / "cache"))
    assert len(images.load(data(folder(tmp_path / "set", CLASSES)))) == 6


def test_full_disk_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    asked = data(folder(tmp_path / "set", CLASSES))
    with mock.patch.object(np, "savez", side_effect=OSError(28, "No space left on device")):
        assert len(images.load(asked)) == 6
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


# ------------------------------------------------------------------------------------------------------ refused input
def refused(asked: Data, *words: str) -> None:
    for ask in (sources.check, images.load):
        with pytest.raises(ConfigError) as error:
            ask(asked)
        assert all(word in str(error.value) for word in words)


def test_refused_paths_and_splits(tmp_path: Path) -> None:
    text = tmp_path / "set.zip"
    text.write_text("no zip")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "nowhere.zip", text, tmp_path / "empty"):
        refused(data(str(path)), "data.path", path.name)
    refused(data(None), "data.path", "None")
    for path in (archive(tmp_path / "no.zip", {}), folder(tmp_path / "one", {"a.png": colour(1), "b.txt": b""})):
        refused(data(path), "data.path", path)
    refused(data(folder(tmp_path / "set", CLASSES), split="test"), "data.split", "'test'", "train, all")
    refused(Data(name="digits", split="train", image_size=8, channels=1), "data.split", "allowed: all")
    asked = data(folder(tmp_path / "unreadable", {"a.png": colour(1), "b.png": b"", "c.png": b""}))
    sources.check(asked)
    with pytest.raises(ConfigError, match=r"1 readable.*b\.png"):
        images.load(asked)


# ----------------------------------------------------------------------------------------------------------- CIFAR-10
def test_cifar10_offline_names_both_ways(tmp_path: Path, internet: Any) -> None:
    """torchvision's own download has no time limit."""
    internet(urllib.error.URLError("no route"))
    for path in (None, str(tmp_path / "new")):
        refused(data(path, name="cifar10", split="train"), "data.path", "no route")


def test_cifar10_from_image_files(tmp_path: Path) -> None:
    asked = data(archive(tmp_path / "set.zip", SPLITS), name="cifar10", split="test")
    found = images.load(asked)
    assert (found.name.partition(" ")[0], found.class_names, sources.has_labels(asked)) == (
        "cifar10",
        ("ant", "cat"),
        True,
    )
    assert images.load(data(folder(tmp_path / "set", SPLITS), name="cifar10", split="test")).digest == found.digest
    refused(data(str(tmp_path / "nowhere.zip"), name="cifar10"), "nowhere.zip")


class FakeCifar:
    classes = ("airplane", "automobile")

    def __init__(self, root: str, train: bool, download: bool) -> None:
        (Path(root) / sources.CIFAR10_FOLDER).mkdir(parents=True, exist_ok=True)
        self.data = np.full((5 if train else 3, 32, 32, 3), [10, 20, 30], np.uint8)
        self.data[..., 2] += np.arange(len(self.data), dtype=np.uint8)[:, None, None]
        self.targets = list(range(len(self.data)))


def test_cifar10_from_torchvision(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, internet: Any) -> None:
    import torchvision

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", FakeCifar)
    internet(b"")
    assert sources.cifar10_root(Data()) == cache / "cifar10"
    found = images.load(Data())
    assert found.pixels.shape == (5, 3, 32, 32)
    assert found.pixels[0, :, 0, 0].tolist() == [10, 20, 30]
    assert len(images.load(Data(split="all"))) == 8
    few = images.load(Data(max_images=2))
    assert few.labels.tolist() == (few.pixels[:, 2, 0, 0] - 30).tolist()
    assert images.load(Data(image_size=16, channels=1)).pixels.shape == (5, 1, 16, 16)
    inside = Data(path=str(cache / "cifar10" / sources.CIFAR10_FOLDER), split="test")
    assert sources.cifar10_root(inside) == cache / "cifar10"
    sources.check(inside)
    assert len(images.load(inside)) == 3
