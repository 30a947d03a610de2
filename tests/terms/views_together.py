"""A model with every term of views, trained by one, two and three processes: `python views_together.py FOLDER`."""

import datetime
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mae.core.kinds import find, kinds
from mae.core.method import MethodConfig
from mae.models.build import build_model
from mae.randomness import sample_keys, view_keys

IMAGES, VIEWS = 6, 2
OPTIONS: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3, "decoder_embed_dim": 16,
    "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip
FOCAL = {"focal_frequency_average_spectrum": True, "focal_frequency_batch_matrix": True}
KINDS = ["focal_frequency", *(kind for kind in kinds("terms") if find("terms", kind).reads_views)]
"""Those that compare views, and one whose options compare the images of a batch."""


def train(rank: int, size: int, folder: str) -> None:
    if size > 1:
        store = dist.FileStore(f"{folder}/store{size}", size)
        patience = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    torch.manual_seed(0)
    model = build_model(MethodConfig().override({**OPTIONS, **FOCAL, **{kind: 0.3 for kind in KINDS}}))
    images = torch.randn(IMAGES * VIEWS, 3, 16, 16)
    keys = view_keys(sample_keys(0, 0, torch.arange(IMAGES)), VIEWS)
    own = slice(rank * len(images) // size, (rank + 1) * len(images) // size)
    plan = model.plan(images, keys=keys).take(own)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    output = wrapped(images[own], plan=plan, keys=keys[own], views=VIEWS)
    output.loss.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    found = {"terms": {kind: output.terms[kind].item() for kind in KINDS}, "gradient": gradient.tolist()}
    if rank == 0:  # without gradients it need not wait for the others, which never ask
        with torch.no_grad():
            alone = model(images, plan=model.plan(images, keys=keys), keys=keys, views=VIEWS)
        found["alone"] = {kind: alone.terms[kind].item() for kind in KINDS}
    Path(folder, f"{size}-{rank}.json").write_text(json.dumps(found))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for size in (1, 2, 3):
        processes = [fork.Process(target=train, args=(rank, size, sys.argv[1])) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"failed with {size} processes")
