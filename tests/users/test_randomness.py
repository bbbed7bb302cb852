"""What `seed` rules of the numbers that data sets, collate functions and loops draw from global generators."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset

from tests.helpers import CPU, Dies, KilledError, toy, train
from tests.toy.train import INPUTS, TARGETS, begin, error
from tests.users.test_data import seen
from tunediff.data import loader
from tunediff.distributed import World


def draw():
    """A number from each generator, and their sum."""
    return [torch.rand(1).item(), numpy.random.rand(), random.random()]


class Augmented(Dataset):
    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return torch.tensor([index, *draw()])


class AugmentedStream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(44).tolist()  # drawn before the first item
        return (torch.tensor([index, *draw()]) for index in order)


def jittered(items):
    return torch.stack(items), torch.tensor(draw())


def test_seed_rules_what_items_draw():
    """Also on repetition in a process that has drawn meanwhile."""
    settings = {"seed": 3}
    first = torch.cat(seen(Augmented(), settings=settings))
    assert torch.equal(first, torch.cat(seen(Augmented(), settings=settings)))
    other = torch.cat(seen(Augmented(), settings=settings | {"seed": 4}))
    for generator in (1, 2, 3):
        assert len({*first[:, generator].tolist(), *other[:, generator].tolist()}) == 48, "no number comes twice"


def test_items_draw_the_same_with_and_without_loader_processes():
    none, two = (torch.cat(seen(Augmented(), settings={"loader__workers": n})) for n in (0, 2))
    assert torch.equal(none, two)


@pytest.mark.parametrize("source", [Augmented(), list(INPUTS)], ids=["data set", "list"])
def test_collate_draws_the_same_with_and_without_loader_processes(source):
    none, two = (seen(source, collate=jittered, settings={"loader__workers": n}) for n in (0, 2))
    for (items, drawn), (same, also) in zip(none, two, strict=True):
        assert torch.equal(items, same)
        assert torch.equal(drawn, also)
    drawn = torch.cat([drawn for _, drawn in none]).tolist()
    other = torch.cat([drawn for _, drawn in seen(source, collate=jittered, settings={"seed": 1})]).tolist()
    assert len({*drawn, *other}) == 18


def _batches(count, rank=0, world=1, passes=1, start=0):
    config = toy(loader__accumulation=passes)
    order = loader.Order(len(INPUTS), 8, passes, rank, world, 5)
    with loader.build(Augmented(), config.loader, order, CPU.device, start) as batches:
        return [batches.move(batches.fetch()) for _ in range(count)]


@pytest.mark.parametrize(("world", "passes"), [(2, 1), (1, 2), (2, 2)])
def test_items_draw_the_same_however_a_step_is_divided(world, passes):
    whole = torch.cat(_batches(8))
    ranks = [_batches(8 * passes, rank, world, passes) for rank in range(world)]
    parts = [ranks[rank][number] for number in range(8 * passes) for rank in range(world)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_goes_on_with_the_draws_of_items_and_loop(tmp_path, workers):
    """After a kill everything is drawn that an uninterrupted training draws."""

    def body(trial):
        net, optimizer = begin(trial)
        trial.evaluate_with(lambda: error(net) | {"drawn": draw()[1]})
        for batch in trial.batches(Augmented()):
            own = [draw(), random.gauss(), numpy.random.randn()]
            if not trial.warming_up:
                heard.append([batch.tolist(), own])
            trial.step(F.mse_loss(net(INPUTS[:4]), TARGETS[:4]), optimizer)

    config, how = toy(loader__workers=workers, norm=False), {"samples": 88, "body": body, "evaluates": True}
    heard = []
    train(config, folder=tmp_path / "whole", **how)
    whole, heard = heard, []
    with pytest.raises(KilledError):
        train(config, folder=tmp_path / "killed", observer=Dies(), **how)
    assert 0 < len(heard) < len(whole) == 11
    train(config, folder=tmp_path / "killed", **how)
    assert heard == whole


def test_seed_rules_what_streams_draw():
    settings = {"loader__workers": 2, "seed": 3}
    how = {"steps": 4, "settings": settings}  # one pass: more than one has other numbers
    first, again = (torch.cat(seen(AugmentedStream(), **how)) for _ in range(2))
    assert torch.equal(first, again)
    other = torch.cat(seen(AugmentedStream(), steps=4, settings=settings | {"seed": 4}))
    for generator in (1, 2, 3):
        assert len({*first[:, generator].tolist(), *other[:, generator].tolist()}) == 64


def test_ranks_and_later_passes_of_a_stream_draw_other_numbers():
    found = []
    for rank in (0, 1):
        found += _stream_batches(5, rank, 2)  # 2 to a pass
    drawn = torch.cat(found)
    for generator in (1, 2, 3):
        assert len(set(drawn[:, generator].tolist())) == 80


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_shuffles_itself_is_dealt_out_whole_and_alike(workers):
    """Each reader takes its part of one order, and an item draws the same whoever reads it."""
    expected = {int(row[0]): row.tolist() for row in torch.cat(_stream_batches(5))}
    parts = [_stream_batches(2, rank, 2, workers) for rank in (0, 1)]
    rows = torch.cat([row for part in parts for row in part])
    assert len(set(rows[:, 0].tolist())) == 32
    assert all(row.tolist() == expected[int(row[0])] for row in rows if int(row[0]) in expected)


def _stream_batches(count, rank=0, world=1, workers=0):
    order = loader.Order(1, 8 * world, 1, rank, world, 5)
    section = toy(loader__workers=workers).loader
    with loader.build(AugmentedStream(), section, order, CPU.device) as batches:
        return [batches.move(batches.fetch()) for _ in range(count)]


@pytest.mark.parametrize("source", [Augmented(), AugmentedStream()], ids=["data set", "stream"])
def test_loops_draw_the_same_whatever_loads(source):
    """Seeds of numpy and `random` are the trial's, and what items draw does not shift them."""

    def drawn(seed, workers):
        def body(trial):
            initial.append(draw())
            net, optimizer = begin(trial)
            for _ in trial.batches(source):
                own.append(draw())
                trial.step(F.mse_loss(net(INPUTS[:4]), TARGETS[:4]), optimizer)

        initial, own = [], []
        train(toy(loader__workers=workers, norm=False, seed=seed), samples=32, body=body)
        return initial + own

    first = drawn(0, 0)
    assert first == drawn(0, 0) == drawn(0, 1)
    other = drawn(1, 0)
    assert all(mine[part] != its[part] for mine, its in zip(first, other, strict=True) for part in range(3))


def test_ranks_draw_other_numbers_in_their_loops():
    """Initial weights are the same on all ranks; what is drawn beside a batch, as dropout is, belongs to one rank."""

    def drawn(rank):
        def body(trial):
            initial.append(draw())
            begin(trial)
            for _ in trial.batches((INPUTS, TARGETS)):
                own.append(draw())
                raise KilledError

        initial, own = [], []
        with pytest.raises(KilledError):
            train(toy(norm=False), samples=32, world=World(rank, 1, CPU.device), body=body)
        return initial[0], own[0]

    (initial, own), (same, other) = drawn(0), drawn(1)
    assert initial == same
    assert all(mine != its for mine, its in zip(own, other, strict=True))


def test_an_evaluation_draws_the_same_at_each_point_and_shifts_nothing():
    def drawn(evaluates):
        def body(trial):
            net, optimizer = begin(trial)
            trial.evaluate_with(lambda: judged.append(draw()) or error(net))
            for _ in trial.batches((INPUTS, TARGETS)):
                own.append(draw())
                trial.step(F.mse_loss(net(INPUTS[:4]), TARGETS[:4]), optimizer)

        judged, own = [], []
        train(toy(norm=False), samples=32, body=body, evaluates=evaluates)
        return judged, own

    judged, own = drawn(True)
    assert judged[0] == judged[1]
    assert own == drawn(False)[1]
