"""Evaluations by several processes, for test_many_processes.py: libraries are imported once, and each is a fork.

`python evaluate_together.py FOLDER` leaves a folder for each number of processes, with their exit codes.
"""

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kills  # of benchmarks
import torch
import torch.distributed as dist
from drawn_masks import drawn_masks
from PIL import Image
from tiny_task import by_function, small_model, striped

import mae
from mae.evaluation.common import classified_images, two_views
from mae.evaluation.extractors import batches, feature_store, opened

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "knn": {"ks": [1, 5]},
    "linear_probe": {},
    "attentive_probe": {"epochs": 2, "rates": [0.01], "batch_size": 16},
    "pooled_probe": {"epochs": 2, "rates": [0.01], "batch_size": 16},
    "label_free": {"views": 20},
    "reconstruction": {"count": 30},
    "neighbours_patches": {"rows": 2, "k": 3},
}
MAPS: dict[str, Any] = {"iterations": 2, "batch_size": 4, "baselines": False}
TRAINED: dict[str, dict[str, Any]] = {
    "linear_probe": {"official": True, "epochs": 4.0, "batch_size": 16, "base_lr": 300.0},
    "finetune": {"epochs": 2.0, "batch_size": 16, "accumulate": 2, "drop_path": 0.5, "base_lr": 0.01},
}


def labelled(folder: Path) -> None:
    """Stripes in three classes, as files; one of the test part is cut short, which its header does not tell."""
    for part, count in (("train", 45), ("test", 30)):
        pixels, labels = striped(count, seed=count)
        for number, (image, label) in enumerate(zip(pixels[..., 0], labels.tolist(), strict=True)):
            path = folder / part / str(label) / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    cut_short(folder / "test", 1)


def cut_short(folder: Path, count: int) -> None:
    """Adds images of which the end is missing, here and there among the others."""
    whole = sorted(folder.rglob("*.png"))
    for path in whole[:: len(whole) // count][:count]:
        path.with_stem(f"{path.stem}-cut").write_bytes(path.read_bytes()[:150])


def evaluate_all(data: Path, out: Path, *, trained: bool) -> None:
    """All protocols; those that train on images only where the batch can be divided."""
    model = small_model(depth=3)
    for name, options in PROTOCOLS.items():
        mae.evaluate(name, model, data=data, out=out, **QUICK, **options)
    mae.evaluate("segmentation_knn", model, data=data.with_name("drawn"), out=out, **QUICK)
    if trained:
        odd = {"data": data.with_name("odd"), "out": out.with_name("odd")}
        mae.evaluate("segmentation_linear", model, **odd, **QUICK, **MAPS)
    mae.embed(model, data / "train", out=out / "train.npz", **QUICK)
    twice = by_function(lambda images: dict.fromkeys(("b", "a"), images.flatten(1)), img_size=(16, 16), identity=None)
    mae.embed(twice, data / "train", out=out / "twice.npz", **QUICK)
    for name, options in TRAINED.items() if trained else ():
        mae.evaluate(name, model, data=data, out=out, **QUICK, **options)


def overlapping(data: Path, out: Path) -> None:
    """Tested on the training images."""
    mae.evaluate("knn", small_model(), data=data / "train", test=data / "train", out=out, **QUICK)


def together(processes: int, folder: Path, what: Callable[[], None]) -> None:
    """Has forks do the same; leaves what each said and ended with."""
    # As torchrun's own, it outlives what the processes begin and end.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> None:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if processes > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "judged",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OPENMAE_TIMEOUT": "60",
            }  # fmt: skip
        code = 1
        try:
            what()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    folder.mkdir()
    forks = [kills._fork.Process(target=run, args=(rank,)) for rank in range(processes)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(200)
        fork.kill()
        fork.join()
    (folder / "codes.json").write_text(json.dumps([fork.exitcode for fork in forks]))


def everything(folder: Path) -> None:
    batches.BATCH_SIZE, feature_store._DIGESTED, two_views._BATCH_SIZE = 4, 8, 8  # several batches for each process
    classified_images.default_workers = lambda *_, **__: 0
    data = folder / "data"
    labelled(data)
    drawn_masks(data.with_name("drawn"))
    drawn_masks(data.with_name("odd"), test=3)  # test images that two processes cannot share equally
    open_all = opened.Opened.__init__
    opened.Opened.__init__ = lambda *args, **options: open_all(*args, **{**options, "max_unreadable": 0.1})
    for processes in (1, 2, 3):
        place = folder / str(processes)
        together(processes, place, partial(evaluate_all, data, place / "out", trained=processes < 3))
    broken = folder / "broken"
    shutil.copytree(data / "train", broken)
    cut_short(broken, 6)  # of 51, where 5 are allowed: no process meets so many itself
    together(2, folder / "many", partial(mae.embed, small_model(), broken, out=folder / "many" / "x.npz", **QUICK))
    together(2, folder / "missing", partial(mae.evaluate, "knn", "nowhere", data=data, **QUICK))
    together(2, folder / "overlap", partial(overlapping, data, folder / "overlap" / "out"))


if __name__ == "__main__":
    torch.cpu._is_avx512_bf16_supported = lambda: False  # in float32, as every test computes
    torch.set_num_threads(1)
    everything(Path(sys.argv[1]))
