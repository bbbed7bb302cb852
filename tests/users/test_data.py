"""What a user's training may learn from: tensors, data sets with and without a length, items of any shape, loaders."""

import itertools
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from tests.helpers import CPU, Dies, KilledError, toy, train
from tests.toy.train import INPUTS, TARGETS, begin, error
from tunediff import steps
from tunediff.config import ConfigError
from tunediff.config.code import WorkloadError
from tunediff.data import loader
from tunediff.distributed import World
from tunediff.training.trial import Trial


class Mapped(Dataset):
    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return {"x": INPUTS[index], "y": TARGETS[index], "name": str(index)}


class Stream(IterableDataset):
    def __init__(self, count=44):
        self.count = count

    def __iter__(self):
        return iter([(INPUTS[index], TARGETS[index], index) for index in range(self.count)])


class DividedStream(Stream):
    """Divides itself over loader processes, as the example of torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        own, loaders = (info.id, info.num_workers) if info is not None else (0, 1)
        return itertools.islice(super().__iter__(), own, None, loaders)


class Words(Dataset):
    """Items of different lengths."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((index % 5 + 1,), float(index)), index


def padded(items):
    texts, numbers = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(numbers)


def seen(source, steps=3, world=CPU, call=Trial.batches, settings=(), **how):
    """The batches of the first steps."""
    found = []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in call(trial, source, **how):
            if not trial.warming_up:
                found.append(batch)
            trial.step(F.mse_loss(net(INPUTS[:4]), TARGETS[:4]), optimizer)

    train(toy(norm=False, **dict(settings)), samples=8 * steps, body=body, world=world)
    return found


def test_every_kind_of_tensors_gives_the_same_batches():
    both = seen((INPUTS, TARGETS))
    named = seen({"x": INPUTS, "y": TARGETS})
    data_set = seen(TensorDataset(INPUTS, TARGETS))
    mapped = seen(Mapped())
    listed = seen(list(zip(INPUTS, TARGETS, strict=True)))
    for (x, y), of_dict, of_set, of_map, of_list in zip(both, named, data_set, mapped, listed, strict=True):
        for one, other in ((of_dict["x"], of_dict["y"]), of_set, (of_map["x"], of_map["y"]), of_list):
            assert torch.equal(one, x)
            assert torch.equal(other, y)
        assert [INPUTS[int(name)].tolist() for name in of_map["name"]] == x.tolist()


@pytest.mark.parametrize("source", [{"x": INPUTS, "y": TARGETS}, TensorDataset(INPUTS, TARGETS)], ids=["dict", "set"])
def test_whatever_is_tensors_can_lie_on_the_device(source):
    held, loaded = seen(source, settings={"loader__resident": True}), seen(source)
    for one, other in zip(held, loaded, strict=True):
        for a, b in zip(*(list(x.values()) if isinstance(x, dict) else x for x in (one, other)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_of_different_lengths_with_a_function_that_joins_them(workers):
    for texts, numbers in seen(Words(), collate=padded, settings={"loader__workers": workers}):
        assert len(texts) == len(numbers) == 8
        for text, number in zip(texts.tolist(), numbers.tolist(), strict=True):
            length = number % 5 + 1
            assert text == [float(number)] * length + [0.0] * (texts.shape[1] - length)


def test_rows_of_tensors_with_a_function_that_joins_them():
    joined = seen((INPUTS, TARGETS), collate=lambda rows: torch.stack([x.sum() + y[0] for x, y in rows]))
    for row, (x, y) in zip(joined, seen((INPUTS, TARGETS)), strict=True):
        torch.testing.assert_close(row, x.sum(1) + y[:, 0])


def test_a_stream_is_dealt_out_and_begins_again():
    places = torch.cat([numbers for _, _, numbers in seen(Stream(), steps=6)]).tolist()
    assert places == [*range(44), *range(4)], "the next pass fills up the last batch"


@pytest.mark.parametrize("stream", [Stream, DividedStream])
def test_a_stream_in_loader_processes_is_read_once(stream):
    places = torch.cat(
        [numbers for _, _, numbers in seen(stream(32), steps=4, settings={"loader__workers": 2})]
    ).tolist()
    assert sorted(places) == list(range(32))


def test_samples_are_counted_as_the_workload_says():
    """A sequence counts as its tokens, a batch of an own loader as its rows or as it says."""

    def counted(call, source, **how):
        def body(trial):
            net, optimizer = begin(trial)
            for _ in call(trial, source, **how):
                trial.step(F.mse_loss(net(INPUTS[:4]), TARGETS[:4]), optimizer)

        return train(toy(norm=False), samples=240, body=body).steps

    assert counted(Trial.batches, INPUTS) == 30
    assert counted(Trial.batches, INPUTS, samples_each=10) == 3
    assert counted(steps, DataLoader(TensorDataset(INPUTS), batch_size=4, drop_last=True)) == 60
    assert counted(steps, [torch.zeros(())] * 3, samples=24) == 10


def test_accumulation_is_refused_where_the_loop_steps_by_itself():
    def body(trial):
        begin(trial)
        for _ in trial.batches((INPUTS, TARGETS)):
            trial.record_step(torch.zeros(()))

    with pytest.raises(WorkloadError, match=r"loader.accumulation"):
        train(toy(loader__accumulation=2), samples=80, body=body)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers, self.runs = (
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(0.2)),
            0,
        )

    def forward(self, x):
        self.runs += 1
        return x + self.layers(x)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_blocks_that_keep_no_activations_learn_the_same(share):
    """Batch statistics are updated once, dropout repeats itself, evaluation runs nothing twice."""
    blocks, nets = [], []

    def body(trial):
        net = nn.Sequential(nn.Linear(4, 8), Block(8), Block(8), nn.Linear(8, 1))
        net = trial.prepare(net, blocks=Block)
        blocks.append([net[1], net[2]])
        nets.append(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        trial.keep(net=net, optimizer=optimizer)
        for x, y in trial.batches((INPUTS, TARGETS)):
            trial.step(F.mse_loss(net(x), y), optimizer)

    plain, saved = (train(toy(memory__checkpoint=one), samples=80, body=body) for one in (0.0, share))
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(saved.weights[name], tensor, msg=name)
    runs = [block.runs for block in blocks[1]]
    assert runs == {0.0: [11, 11], 0.5: [22, 11], 1.0: [22, 22]}[share]
    nets[1].eval()(INPUTS)
    assert [block.runs for block in blocks[1]] == [run + 1 for run in runs]


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (Mapped(), {"loader__resident": True}, "loader.resident: True is not allowed: only tensors, tuples and dict"),
        (Stream(), {"loader__resident": True}, "loader.resident: True is not allowed: only tensors, tuples and dict"),
        (Stream(3), {}, "fewer items than one batch"),
        (INPUTS, {"memory__checkpoint": 0.5}, "memory.checkpoint: 0.5 is not allowed: the model has no blocks that"),
    ],
    ids=["mapped", "stream", "a short stream", "no blocks"],
)
def test_what_data_and_model_do_not_allow_is_refused(source, settings, message):
    with pytest.raises(ConfigError, match=message):
        seen(source, settings=settings)


# ------------- what `seed` rules of the numbers that data sets, collate functions and loops draw from global generators
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
