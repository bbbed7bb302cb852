from __future__ import annotations

import os
import signal
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tunediff.config import ConfigError, baseline, override
from tunediff.data import loader
from tunediff.data.images import in_unit_range
from tunediff.data.items import Uniform, to_device


def numbered(count: int = 23) -> Tensor:
    """Image i holds i in its left half and 200 in its right half."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].repeat(1, 1, 4, 4)
    pixels[..., 2:] = 200
    return pixels


def config(**changes: Any) -> Any:
    values = {"loader.batch_size": 8, "loader.workers": 0, "data.horizontal_flip": False}
    return override(baseline("cifar10"), values | {name.replace("__", "."): value for name, value in changes.items()})


def numbers(batch: Tensor) -> list[int]:
    """Which images a batch holds, mirrored or not."""
    pixels = ((batch + 1) * 127.5).round().int()
    return torch.minimum(pixels[:, 0, 0, 0], pixels[:, 0, 0, -1]).tolist()


def build(
    conf: Any, source: Any = None, rank: int = 0, world: int = 1, device: str = "cpu", seed: int = 0, start: int = 0,
    prepare: Any = None,
) -> loader.Batches:  # fmt: skip
    source, section = numbered() if source is None else source, conf.loader
    length = len(source[0] if isinstance(source, tuple) else source)
    order = loader.Order(length, section.batch_size, section.accumulation, rank, world, seed)
    prepare = prepare or in_unit_range(conf.data.horizontal_flip)
    return loader.build(source, section, order, torch.device(device), start, prepare)


def following(batches: loader.Batches) -> Any:
    return batches.move(batches.fetch())


def take(count: int, conf: Any, source: Any = None, **how: Any) -> list[Any]:
    with build(conf, source, **how) as batches:
        return [following(batches) for _ in range(count)]


def test_range_shape_and_type() -> None:
    (batch,) = take(1, config())
    assert batch.shape == (8, 1, 4, 4)
    assert batch.dtype == torch.float32
    assert batch[0, 0, 0, -1] == pytest.approx(200 / 127.5 - 1)
    extremes = torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None]
    (batch,) = take(1, config(), extremes)
    assert (batch.min(), batch.max()) == (-1, 1)


def test_every_epoch_holds_every_image_once_in_a_new_order() -> None:
    stream = [number for batch in take(23, config()) for number in numbers(batch)]  # 8 epochs of 23 images
    epochs = [stream[start : start + 23] for start in range(0, len(stream), 23)]
    assert len(epochs) == 8
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8


def test_a_batch_may_exceed_the_set() -> None:
    (batch,) = take(1, config(loader__batch_size=64))
    assert sorted(numbers(batch)[:46]) == sorted([*range(23)] * 2)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_step_is_the_same_however_it_is_divided(world: int, accumulation: int) -> None:
    whole = take(6, config(data__horizontal_flip=True))
    conf = config(data__horizontal_flip=True, loader__accumulation=accumulation)
    ranks = [take(6 * accumulation, conf, rank=rank, world=world) for rank in range(world)]
    assert ranks[0][0].shape[0] == 8 // world // accumulation
    for step in range(6):
        passes = range(step * accumulation, (step + 1) * accumulation)
        assert torch.equal(whole[step], torch.cat([ranks[rank][i] for i in passes for rank in range(world)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_resident_and_loaded_batches_are_equal(workers: int) -> None:
    place = {"rank": 1, "world": 2, "seed": 5}
    resident = take(9, config(data__horizontal_flip=True, loader__resident=True), **place)
    loaded = take(9, config(data__horizontal_flip=True, loader__workers=workers), **place)
    assert all(map(torch.equal, resident, loaded))


@pytest.mark.parametrize("resident", [True, False])
def test_resume_continues_the_stream(resident: bool) -> None:
    conf = config(data__horizontal_flip=True, loader__resident=resident, loader__accumulation=2)
    whole = take(20, conf)
    with build(conf, start=7) as resumed:
        assert all(torch.equal(following(resumed), batch) for batch in whole[7:])


def test_half_of_the_images_are_mirrored() -> None:
    plain = take(50, config(loader__batch_size=64))
    mirrored = take(50, config(loader__batch_size=64, data__horizontal_flip=True))
    assert [numbers(batch) for batch in plain] == [numbers(batch) for batch in mirrored]
    turned = torch.cat([(a != b).flatten(1).any(1) for a, b in zip(plain, mirrored, strict=True)])
    assert turned.float().mean().item() == pytest.approx(0.5, abs=0.04)
    for before, after in zip(plain, mirrored, strict=True):
        assert all(torch.equal(a, b) or torch.equal(a.flip(-1), b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("resident", [True, False])
def test_the_training_generator_and_the_set_stay_as_they_are(resident: bool) -> None:
    pixels = numbered()
    before, state = pixels.clone(), torch.get_rng_state()
    take(3, config(data__horizontal_flip=True, loader__resident=resident), pixels)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_that_do_not_persist_are_new_in_each_pass_and_give_the_same_batches(workers: int) -> None:
    conf = config(loader__workers=workers, loader__persistent_workers=False)  # 23 images in batches of 8
    plain, seen = take(7, config()), []
    with build(conf) as batches:
        for expected in plain:
            assert torch.equal(following(batches), expected)
            seen.append(frozenset(process.pid for process in active_children()))
    assert len(set(seen)) == (4 if workers else 1)  # a pass of two batches each
    resumed = build(conf, start=3)
    assert torch.equal(following(resumed), plain[3])
    resumed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_copied_to_the_device(workers: int) -> None:
    found = {}
    for transfer in ("uint8", "float32"):
        with build(config(loader__workers=workers, loader__transfer=transfer)) as batches:
            _, found[transfer] = batches.fetch()
    assert (found["uint8"].dtype, found["float32"].dtype) == (torch.uint8, torch.float32)
    assert found["float32"].nbytes == 4 * found["uint8"].nbytes
    assert torch.equal(found["uint8"].float(), found["float32"])


@pytest.mark.parametrize("how", [{"loader__transfer": "float32"}, {"loader__resident": True}, {}], ids=str)
def test_a_fetched_batch_may_be_asked_for_again(how: dict[str, Any]) -> None:
    """The first one comes twice: for the warm-up, and for the first step."""
    with build(config(data__horizontal_flip=True, **how)) as batches:
        fetched = batches.fetch()
        first = batches.move(fetched).clone()
        batches.fetch()
        assert torch.equal(batches.move(fetched), first)


def test_loader_processes_run_no_script_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setitem(sys.modules, "__main__", script)
    take(1, config(loader__workers=1))
    assert not (tmp_path / "ran").exists()
    assert sys.modules["__main__"] is script


def test_close_stops_the_workers_and_may_be_repeated() -> None:
    others = active_children()
    batches = build(config(loader__workers=1))
    batches.fetch()
    workers = [process for process in active_children() if process not in others]
    batches.close()
    batches.close()
    assert workers
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.training  # waits for a process
def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    others = active_children()
    with build(config(loader__workers=1, loader__prefetch_factor=1)) as batches:
        batches.fetch()
        (worker,) = (process for process in active_children() if process not in others)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            for _ in range(5):
                batches.fetch()


# ----------------------------------------------------------------------------------------------- any source of items
ROWS = torch.arange(23)
PAIR = (ROWS.float()[:, None] * torch.ones(23, 4), ROWS)


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "square": torch.full((2,), float(index * index))}


def untouched(batch: Any, uniform: Uniform) -> Any:
    return batch


@pytest.mark.parametrize("how", [{"loader__workers": 0}, {"loader__workers": 1}, {"loader__resident": True}], ids=str)
def test_rows_of_several_tensors_stay_together(how: dict[str, Any]) -> None:
    expected = [numbers(batch) for batch in take(6, config())]  # the same items as of one tensor
    for batch, items in zip(take(6, config(**how), PAIR, prepare=untouched), expected, strict=True):
        assert isinstance(batch, tuple)
        inputs, labels = batch
        assert labels.tolist() == items
        assert torch.equal(inputs, labels.float()[:, None].expand(8, 4))


@pytest.mark.parametrize("workers", [0, 1])
def test_items_of_a_dataset_are_put_together(workers: int) -> None:
    expected = [numbers(batch) for batch in take(4, config())]
    for batch, items in zip(
        take(4, config(loader__workers=workers), Squares(), prepare=untouched), expected, strict=True
    ):
        assert batch["number"].tolist() == items
        assert batch["square"].tolist() == [[float(i * i)] * 2 for i in items]


class Shifted(TensorDataset):
    """Augments rows: adds 100."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + 100, label


@pytest.mark.parametrize("workers", [0, 1])
def test_subclass_of_tensor_dataset_makes_its_own_items(workers: int) -> None:
    ((inputs, labels),) = take(1, config(loader__workers=workers), Shifted(*PAIR), prepare=untouched)
    assert torch.equal(inputs, labels.float()[:, None].expand(8, 4) + 100)
    for source in (Shifted(*PAIR), Squares()):
        with pytest.raises(ConfigError, match=r"loader\.resident: True is not allowed: only tensors.*allowed: false"):
            build(config(loader__resident=True), source)


def test_too_little_shared_memory_is_refused_with_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Tensor) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(ConfigError, match=r"loader\.workers: 2 is not allowed: .*No space left.*allowed: a larger"):
        build(config(loader__workers=2))
    take(1, config())  # without loader processes nothing is shared


def test_numbers_that_are_drawn_for_items_do_not_depend_on_how_a_step_is_divided() -> None:
    def drawn(batch: Any, uniform: Uniform) -> Tensor:
        return torch.stack((uniform("a"), uniform("b")))

    whole = take(2, config(), prepare=drawn)
    assert whole[0].shape == (2, 8)
    assert 0 <= float(whole[0].min()) <= float(whole[0].max()) < 1
    assert len(torch.stack(whole).flatten().unique()) == 32, "other numbers for each step and purpose"
    halves = [take(4, config(loader__accumulation=2), rank=rank, world=2, prepare=drawn) for rank in (0, 1)]
    parts = [halves[rank][turn] for turn in (0, 1) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts, dim=1), whole[0])


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("kind", [tuple, list, Pair])
def test_all_tensors_of_a_batch_are_moved(kind: Any) -> None:
    parts = kind(torch.ones(1), "name") if kind is Pair else kind([torch.ones(1), "name"])
    moved = to_device({"x": parts, "n": 3}, torch.device("meta"))
    assert isinstance(moved["x"], kind)
    assert (moved["x"][0].device.type, moved["x"][1], moved["n"]) == ("meta", "name", 3)


class Encoding(UserDict[str, Any]):
    """A batch as tokenizers of transformers make it."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def test_a_batch_on_the_device_has_the_type_that_it_had() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = OrderedDict(encoding=Encoding(ids=torch.ones(2)), packed=packed, lengths=defaultdict(list, a=torch.ones(1)))
    moved = to_device(batch, torch.device("meta"))
    assert [type(part) for part in (moved, *moved.values())] == [OrderedDict, Encoding, type(packed), defaultdict]
    tensors = moved["encoding"]["ids"], moved["packed"].data, moved["lengths"]["a"]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch["encoding"]["ids"].device.type == "cpu", "the batch itself stays, for the next step of the warm-up"


def test_data_on_a_device_are_refused_unless_resident() -> None:
    with pytest.raises(
        ConfigError, match="loader.resident: False is not allowed: the data lie on meta, .*allowed: true"
    ):
        build(config(), numbered().to("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [True, False])
def test_cuda_batches_are_those_of_the_cpu(resident: bool) -> None:
    conf = config(data__horizontal_flip=True, loader__resident=resident, loader__workers=2)
    on_gpu = take(5, conf, device="cuda")
    assert on_gpu[0].is_cuda
    assert all(torch.allclose(a.cpu(), b) for a, b in zip(on_gpu, take(5, conf), strict=True))
