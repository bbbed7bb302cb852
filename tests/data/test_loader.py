from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tunediff.config import Config, ConfigError, override
from tunediff.data import loader
from tunediff.data.images import Images


def numbered(count: int = 23) -> Images:
    """Image i holds i in its left half and 200 in its right half."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].repeat(1, 1, 4, 4)
    pixels[..., 2:] = 200
    return Images("numbered", pixels, None, (), (), "0")


def config(**changes: Any) -> Config:
    values = {"loader.batch_size": 8, "loader.workers": 0, "data.horizontal_flip": False}
    return override(Config(), values | {name.replace("__", "."): value for name, value in changes.items()})


def numbers(batch: Tensor) -> list[int]:
    """Which images a batch holds, mirrored or not."""
    pixels = ((batch + 1) * 127.5).round().int()
    return torch.minimum(pixels[:, 0, 0, 0], pixels[:, 0, 0, -1]).tolist()


def take(count: int, conf: Config, images: Images | None = None, **place: Any) -> list[Tensor]:
    with loader.build(images or numbered(), conf, **place) as batches:
        return [next(batches) for _ in range(count)]


def test_range_shape_and_type() -> None:
    (batch,) = take(1, config())
    assert batch.shape == (8, 1, 4, 4)
    assert batch.dtype == torch.float32
    assert batch[0, 0, 0, -1] == pytest.approx(200 / 127.5 - 1)
    extremes = Images("x", torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None], None, (), (), "0")
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
    with loader.build(numbered(), conf) as batches:
        for _ in range(7):
            next(batches)
        assert batches.consumed == 7
        resumed = loader.build(numbered(), conf, start=batches.consumed)
    assert all(torch.equal(next(resumed), batch) for batch in whole[7:])
    assert resumed.consumed == 20


def test_seed_decides_order_and_flips() -> None:
    conf = config(data__horizontal_flip=True)
    assert torch.equal(take(1, conf)[0], take(1, conf, seed=0)[0]), "config.seed is the default"
    assert not torch.equal(take(1, conf)[0], take(1, conf, seed=1)[0])


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
    images = numbered()
    before, state = images.pixels.clone(), torch.get_rng_state()
    take(3, config(data__horizontal_flip=True, loader__resident=resident), images)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images.pixels, before)


def test_indivisible_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loader\.batch_size: 8 .*3 processes × loader\.accumulation = 3"):
        loader.build(numbered(), config(), world=3)


def test_seeds_differ() -> None:
    seeds = {loader.mix(name, seed, step) for name in ("flip", "epoch") for seed in range(20) for step in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert loader.mix("a", 1) == loader.mix("a", 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_that_do_not_persist_are_new_in_each_pass_and_give_the_same_batches(workers: int) -> None:
    conf = config(loader__workers=workers, loader__persistent_workers=False)  # 23 images in batches of 8
    plain, seen = take(7, config()), []
    with loader.build(numbered(), conf) as batches:
        for expected in plain:
            assert torch.equal(next(batches), expected)
            seen.append(tuple(worker.pid for worker in getattr(batches._source._batches, "_workers", ())))  # type: ignore[union-attr]
    assert len(set(seen)) == (4 if workers else 1)  # a pass of two batches each
    resumed = loader.build(numbered(), conf, start=3)
    assert torch.equal(next(resumed), plain[3])
    resumed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_copied_to_the_device(workers: int) -> None:
    found = {}
    for transfer in ("uint8", "float32"):
        with loader.build(numbered(), config(loader__workers=workers, loader__transfer=transfer)) as batches:
            found[transfer] = next(batches._source)
    assert (found["uint8"].dtype, found["float32"].dtype) == (torch.uint8, torch.float32)
    assert found["float32"].nbytes == 4 * found["uint8"].nbytes
    assert torch.equal(found["uint8"].float(), found["float32"])


def test_close_stops_the_workers_and_may_be_repeated() -> None:
    batches = loader.build(numbered(), config(loader__workers=1))
    next(batches)
    workers = batches._source._batches._workers  # type: ignore[union-attr]
    started = time.perf_counter()
    batches.close()
    batches.close()
    assert time.perf_counter() - started < 3
    assert not any(worker.is_alive() for worker in workers)


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with loader.build(numbered(), config(loader__workers=1, loader__prefetch_factor=1)) as batches:
        next(batches)
        (worker,) = batches._source._batches._workers  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(itertools.islice(batches, 5))


@pytest.mark.parametrize("error", [ConnectionResetError(), EOFError(), FileNotFoundError()], ids=repr)
def test_a_worker_killed_while_it_hands_over_a_batch_is_the_same_error(error) -> None:
    """What multiprocessing says then; seen once in many kills."""

    def broken() -> Iterator[Tensor]:
        raise error
        yield

    with loader.build(numbered(), config(loader__workers=1)) as batches:
        next(batches)
        batches._source.close()  # type: ignore[union-attr]
        batches._source._batches = broken()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="DataLoader worker exited unexpectedly"):
            next(batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [True, False])
def test_cuda_batches_are_those_of_the_cpu(resident: bool) -> None:
    conf = config(data__horizontal_flip=True, loader__resident=resident, loader__workers=2)
    on_gpu = take(5, conf, device="cuda")
    assert on_gpu[0].is_cuda
    assert all(torch.allclose(a.cpu(), b) for a, b in zip(on_gpu, take(5, conf), strict=True))
