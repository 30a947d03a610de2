"""Two processes with a hook after each step: `python hook_together.py FOLDER` writes what each saw."""

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
from toy import SETTINGS, Follower, Line, adamw, batches

from mae.training.distributed import joined_world
from mae.training.engine import Trainer
from mae.training.settings import CheckpointSpec
from mae.training.sharding import shard, whole

SKIPPED = 5


def train(folder: Path, rank: int, port: int, sharded: bool) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "hook",
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_num_threads(1)
    seen: list[tuple[float, list[float], list[float]]] = []
    with joined_world("cpu") as (world, device):

        def after_step(student: torch.nn.Module, progress: float) -> None:
            mean, weight = (
                whole(values.detach()).flatten().tolist() for values in (teacher.mean, module.linear.weight)
            )
            seen.append((progress, mean, weight))

        module, teacher = Line(), Follower(after_step)
        if sharded:
            shard(module, "fp32")
            shard(teacher, "fp32", trained=False)
        module.__dict__["teacher"] = teacher
        trainer = Trainer(
            module=module,
            optimizer=adamw(module),
            batches=lambda step: batches(step, broken_at={SKIPPED} if rank == 1 else ()),
            settings=SETTINGS,
            checkpoints=CheckpointSpec(folder=folder / "checkpoints", identity={}, metadata=lambda module: {}),
            device=device,
            world=world,
            mirror=Line() if sharded and rank == 0 else None,
        )
        trainer.run()
        teacher.mean.data.zero_()
        trainer.resume(folder / "checkpoints" / "step-00000012")
        seen.append((0.0, whole(teacher.mean.detach()).flatten().tolist(), []))
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def main(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for name in ("ddp", "fsdp"):
        place = folder / name
        place.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pair = [fork.Process(target=train, args=(place, rank, port, name == "fsdp")) for rank in range(2)]
        for process in pair:
            process.start()
        for process in pair:
            process.join(60)
            process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
