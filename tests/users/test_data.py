"""What a user's training may learn from: tensors, data sets with and without a length, items of any shape, loaders."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from tests.helpers import CPU, toy, train
from tests.toy.train import INPUTS, TARGETS, begin
from tunediff import steps
from tunediff.config import ConfigError
from tunediff.config.code import WorkloadError
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


@pytest.mark.parametrize("source", [Mapped(), Stream()], ids=["mapped", "stream"])
def test_what_is_no_tensor_cannot_lie_on_the_device(source):
    with pytest.raises(
        ConfigError, match="loader.resident: True is not allowed: only tensors, tuples and dictionaries"
    ):
        seen(source, settings={"loader__resident": True})


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
    assert places == [*range(40), *range(8)], "what fills no batch is left out"


@pytest.mark.parametrize("stream", [Stream, DividedStream])
def test_a_stream_in_loader_processes_is_read_once(stream):
    places = torch.cat(
        [numbers for _, _, numbers in seen(stream(32), steps=4, settings={"loader__workers": 2})]
    ).tolist()
    assert sorted(places) == list(range(32))


def test_a_stream_that_is_too_short():
    with pytest.raises(ConfigError, match="fewer items than one batch"):
        seen(Stream(3))


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


def test_blocks_that_nobody_names_cannot_be_checkpointed():
    with pytest.raises(ConfigError, match="memory.checkpoint: 0.5 is not allowed: the model has no blocks that"):
        seen(INPUTS, settings={"memory__checkpoint": 0.5})
