"""A step of a segmenter by one, two and three processes: `python segmenter_together.py FOLDER`."""

import datetime
import multiprocessing
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mae.core.method import MethodConfig
from mae.models.segmenter import build_segmenter, upernet_head

IMAGES = 6
OPTIONS: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}


def step(rank: int, size: int, folder: str) -> None:
    if size > 1:
        store = dist.FileStore(f"{folder}/store{size}", size)
        patience = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    torch.manual_seed(0)
    model = build_segmenter(
        MethodConfig().override(OPTIONS),
        head=upernet_head(2, 8),
        num_classes=3,
        drop_path=0.0,
        pretrained=None,
    ).train()
    images, target = torch.randn(IMAGES, 3, 16, 16), torch.randint(3, (IMAGES, 16, 16))
    target[0] = 255  # so that the processes have different numbers of pixels that count
    own = slice(rank * IMAGES // size, (rank + 1) * IMAGES // size)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    torch.manual_seed(1)  # as `seeded_forward` does, for what the head drops
    output = wrapped(images[own], target[own])
    output.loss.backward()
    gradient = {name: weight.grad for name, weight in model.named_parameters()}
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    mean = output.loss.detach() / size
    if size > 1:
        dist.all_reduce(mean)
    torch.save({"gradient": gradient, "statistics": statistics, "loss": mean}, f"{folder}/{size}-{rank}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for size in (1, 2, 3):
        processes = [fork.Process(target=step, args=(rank, size, sys.argv[1])) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"failed with {size} processes")
