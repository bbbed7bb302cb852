"""What processes that train together say to each other, and the same words where there is only one."""

import pytest
import torch
from torch import nn

from tests.helpers import CPU, ranks
from tunediff.config import ConfigError
from tunediff.distributed import World, alone, from_environment


def said(world):
    """One call of everything, each rank with numbers of its own."""
    mine = world.rank + 1.0
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([mine, 10 * mine])
    world.average_gradients(parameters)
    tensor = torch.tensor([mine, 0.1])
    world.barrier()
    world.synchronize()
    return {
        "main": world.main,
        "agree": world.agree(mine / 3),
        "largest": world.largest(-mine / 3),
        "any": (world.any(world.rank == world.size - 1), world.any(False)),
        "total": world.total(mine / 3),
        "sum": world.sum(tensor.clone()).tolist(),
        "mean": world.mean(torch.tensor([mine])).tolist(),
        "first": world.first(torch.tensor([mine])).tolist(),
        "stack": world.stack(torch.tensor([mine])).tolist(),
        "gather": world.gather({"rank": world.rank}),
        "tell": world.tell({"rank": world.rank, "tensor": [mine]}),
        "gradients": (parameters[0].grad.tolist(), parameters[1].grad),
    }


def test_one_process_has_nobody_to_ask():
    assert said(CPU) == {
        "main": True, "agree": 1 / 3, "largest": -1 / 3, "any": (True, False), "total": 1 / 3,
        "sum": torch.tensor([1.0, 0.1]).tolist(), "mean": [1.0], "first": [1.0], "stack": [[1.0]],
        "gather": [{"rank": 0}], "tell": {"rank": 0, "tensor": [1.0]}, "gradients": ([1.0, 10.0], None),
    }  # fmt: skip


def test_what_two_processes_agree_on(tmp_path):
    found = ranks(said, tmp_path)
    assert [rank.pop("main") for rank in found] == [True, False]
    assert found[0] == found[1]
    assert found[0] == {
        "agree": 1 / 3, "largest": -1 / 3, "any": (True, False), "total": pytest.approx(1.0, abs=1e-12),
        "sum": pytest.approx([3.0, 0.2]), "mean": [1.5], "first": [1.0], "stack": [[1.0], [2.0]],
        "gather": [{"rank": 0}, {"rank": 1}], "tell": {"rank": 0, "tensor": [1.0]}, "gradients": ([1.5, 15.0], None),
    }  # fmt: skip


def test_alone_uses_a_gpu_if_there_is_one():
    assert alone().device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert alone("cpu") == World(0, 1, torch.device("cpu"))


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with from_environment() as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.fixture
def torchrun(monkeypatch):
    """Makes this process one that torchrun has started, which sees so many GPUs; returns the devices that it takes."""

    def start(gpus, **environment):
        devices = []
        monkeypatch.setattr("os.environ", environment)
        cuda = {"is_available": lambda: gpus > 0, "device_count": lambda: gpus, "set_device": devices.append}
        alone = {name: lambda *_, **__: None for name in ("init_process_group", "barrier", "destroy_process_group")}
        for module, functions in ((torch.cuda, cuda), (torch.distributed, alone)):
            for name, function in functions.items():
                monkeypatch.setattr(module, name, function)
        return devices

    return start


def test_a_process_without_a_gpu_of_its_own_is_refused(torchrun):
    devices = torchrun(1, WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    with pytest.raises(ConfigError, match="LOCAL_RANK: 1 is not allowed: .* this one sees 1; allowed: 0 to 0"):  # noqa: SIM117
        with from_environment():
            pass
    assert devices == [], "CUDA error: invalid device ordinal"


def test_each_process_may_see_its_own_gpu_alone(torchrun):
    """As with `torchrun --virtual-local-rank`, which numbers the one GPU of every process 0."""
    devices = torchrun(1, WORLD_SIZE="2", RANK="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    with from_environment() as world:
        assert (world.rank, world.device) == (1, torch.device("cuda", 0))
    assert devices == [torch.device("cuda", 0)]


def test_a_rank_of_the_second_machine_is_not_taken_for_one_of_the_first(torchrun):
    """`LOCAL_RANK` counts within a machine, and chooses the GPU; two machines would have two ranks 0."""
    torchrun(0, WORLD_SIZE="4", RANK="3", LOCAL_RANK="1")
    with from_environment() as world:
        assert (world.rank, world.size) == (3, 4)
