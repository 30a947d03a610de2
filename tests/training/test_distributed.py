"""How processes that train together meet, part and tell of their failures."""

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mae.cli import main
from mae.errors import MAEError, Stopped, UsageError
from mae.training import distributed
from mae.training.distributed import World, joined_world, told_by_main
from mae.training.sharding import shard


@pytest.fixture
def four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the third of four that `torchrun` started on a machine with GPUs."""
    named = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "choose_device", torch.device)


def test_more_processes_than_gpus_are_refused(four_processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = r"4 processes were started on this machine, which shows 2 GPU\(s\); .*--nproc-per-node 2"
    with pytest.raises(UsageError, match=words), joined_world("cuda"):
        pass


def test_processes_on_different_devices_are_refused(four_processes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "_meet", lambda world, kind: None)
    monkeypatch.setattr(World, "_bytes_of_each", lambda self, kind: [b"cuda", b"cuda", kind, kind])
    with pytest.raises(UsageError, match="process 0 computes on cuda and process 2 on cpu; .*--device cpu") as raised:
        with joined_world("cpu"):
            pass
    assert raised.value.told_by_main


@pytest.mark.parametrize(
    ("device", "ends_by", "parts"),
    [
        ("cuda", None, True),
        ("cuda", Stopped("told to end", by=15), True),
        ("cuda", MAEError("a disk is full"), False),
        ("cuda", KeyboardInterrupt(), False),
        ("cpu", MAEError("a disk is full"), True),
    ],
)
def test_a_process_that_fails_waits_for_no_other(
    four_processes, monkeypatch: pytest.MonkeyPatch, device: str, ends_by: BaseException | None, parts: bool
):
    """NCCL's group would, and the user would hear of the failure half an hour later."""
    parted: list[bool] = []
    monkeypatch.setattr(
        distributed, "_meet", lambda world, kind: monkeypatch.setattr(dist, "is_initialized", lambda: True)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: parted.append(True))
    monkeypatch.setattr(World, "_bytes_of_each", lambda self, kind: [kind] * 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    try:
        with joined_world(device) as (world, here):
            assert world.rank == 2 and here == torch.device(device, 2 if device == "cuda" else None)
            if ends_by is not None:
                raise ends_by
    except BaseException as error:
        assert error is ends_by
    assert parted == [True] * parts


@pytest.mark.parametrize(
    ("rank", "local_rank", "raised", "told"),
    [
        (0, 0, UsageError("no such folder"), True),
        (4, 0, UsageError("no such folder"), True),  # another machine may lack what this one has
        (5, 1, UsageError("no such folder"), False),
        (4, 0, told_by_main(UsageError("no such folder"), World(rank=4, size=8)), False),
        (5, 1, MAEError("a disk is full"), True),
        (5, 1, told_by_main(MAEError("a disk is full"), World(rank=5, size=8)), False),
        (0, 0, told_by_main(MAEError("a disk is full"), World(rank=0, size=8)), True),
    ],
)
def test_each_error_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    local_rank: int,
    raised: MAEError,
    told: bool,
):
    def fail(args: list[str]) -> int:
        raise raised

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr("mae.cli.listing.run", fail)
    assert main(["list", "models"]) == (2 if isinstance(raised, UsageError) else 1)
    assert capsys.readouterr().err == (f"mae: error: {raised}\n" if told else "")


class Seeing(nn.Module):
    """Notes the types of what it and its block are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4))
        self.seen: list[torch.dtype] = []
        self.blocks[0].register_forward_pre_hook(lambda module, given: self.seen.append(module.weight.dtype))

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images.dtype)
        return self.blocks(images).float().sum()


def _sharded(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    module = Seeing()
    shard(module, "bf16")
    module(torch.ones(2, 4)).backward()
    (folder / "seen").write_text(" ".join(map(str, module.seen)))
    dist.destroy_process_group()


def test_a_sharded_module_sees_images_as_they_are(tmp_path: Path):
    """Targets are made of them: in bf16 those of patches of little contrast would be noise."""
    process = get_context("fork").Process(target=_sharded, args=(tmp_path,))
    process.start()
    process.join(60)
    assert (tmp_path / "seen").read_text() == "torch.float32 torch.bfloat16"
