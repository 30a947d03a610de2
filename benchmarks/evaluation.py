"""k-NN and the quick probe beside scikit-learn, and the memory they take on features larger than it should be.

    python benchmarks/evaluation.py                         # k-NN and probe beside scikit-learn
    python benchmarks/evaluation.py --million               # peak memory on a mapped file of 1 GB, written and deleted

Both sides get the same features: of each class a centre, and noise around it. They take turns in one process, so that
whatever else the machine does falls on both; the ratio is taken turn by turn, the median is shown with the quartiles.
Our k-NN evaluates five values of k in one pass, scikit-learn one. The probe chooses its penalty on a tenth of the
training samples on both sides and fits the best one to all; the accuracies of both are printed: whoever stops early is
not faster.
"""

import json
import sys
import tempfile
import threading
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import disk_usage
from statistics import median
from subprocess import run
from time import perf_counter, sleep

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import ratios, time_interleaved, timed
from mae.evaluation.common.feature_stats import measure_spread
from mae.evaluation.common.logistic import PENALTIES, choose_penalty, fit_logistic, hold_out
from mae.evaluation.common.neighbours import knn_rank

KS = (1, 10, 20, 100, 200)
TEMPERATURE = 0.07
CLASSES = 10
CPU = torch.device("cpu")
JOBS = ("knn", "probe", "label_free")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of one protocol; seconds and accuracies of ours and of the peer, turn by turn."""

    what: str
    ours: list[float]
    peer: list[float]
    our_accuracies: list[float]
    peer_accuracies: list[float]


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--knn-size", type=int, nargs=2, default=(50_000, 10_000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--probe-size", type=int, nargs=2, default=(50_000, 10_000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--width", type=int, default=256, help="of the features")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--million", action="store_true", help="measure memory on a mapped file instead")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the mapped file")
    parser.add_argument("--job", choices=JOBS, help=SUPPRESS)  # the child process of --million
    parser.add_argument("--file", type=Path, help=SUPPRESS)
    return parser.parse_args()


def features(count: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and classes: centres of std 0.1 along each axis, the same for every seed, and noise of 1."""
    centres = 0.1 * torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + torch.randn(count, width, generator=generator), labels


def compared(what: str, turns: int, ours: Callable[[], list[float]], peer: Callable[[], list[float]]) -> Result:
    """Both sides in turn, and the accuracies of the last turn."""
    accuracies: dict[str, list[float]] = {}

    def measured(name: str, run: Callable[[], list[float]]) -> float:
        return timed(lambda: accuracies.update({name: run()}), CPU)

    ways = {"ours": partial(measured, "ours", ours), "peer": partial(measured, "peer", peer)}
    seconds = time_interleaved(ways, turns=turns, warm_ups=0)
    return Result(what=what, **seconds, our_accuracies=accuracies["ours"], peer_accuracies=accuracies["peer"])


def share(classes: Tensor, labels: Tensor) -> float:
    return float((classes == labels).double().mean())


def measure_knn(train_size: int, test_size: int, width: int, turns: int) -> Result:
    (train, labels), (test, truth) = features(train_size, width, 1), features(test_size, width, 2)

    def ours() -> list[float]:
        ranked = knn_rank(train, labels, test, ks=KS, num_classes=CLASSES, temperature=TEMPERATURE, device=CPU)
        return [share(ranked[max(KS)][:, 0], truth)]

    def peer() -> list[float]:
        model = KNeighborsClassifier(
            min(max(KS), train_size),
            metric="cosine",
            algorithm="brute",
            weights=lambda distance: np.exp((1 - distance) / TEMPERATURE),
        )
        model.fit(train.numpy(), labels.numpy())
        return [share(torch.from_numpy(model.predict(test.numpy())), truth)]

    return compared(f"k-NN, {test_size:,} against {train_size:,} x {width}", turns, ours, peer)


def measure_probe(train_size: int, test_size: int, width: int, turns: int) -> Result:
    (train, labels), (test, truth) = features(train_size, width, 1), features(test_size, width, 2)
    mean, std = train.mean(dim=0), train.std(dim=0, correction=0)
    train, test = (train - mean) / std, (test - mean) / std

    def ours() -> list[float]:
        choice = choose_penalty(train, labels, num_classes=CLASSES, seed=0, device=CPU)
        return [share(choice.best.logits(test).argmax(dim=1), truth)]

    def peer() -> list[float]:
        fitted, held = hold_out(labels, seed=0)
        model = LogisticRegression(solver="lbfgs", max_iter=1000, warm_start=True)
        accuracies = []
        for penalty in PENALTIES:
            model.set_params(C=1 / (penalty * len(fitted))).fit(train[fitted].numpy(), labels[fitted].numpy())
            accuracies.append(model.score(train[held].numpy(), labels[held].numpy()))
        model.set_params(C=1 / (PENALTIES[accuracies.index(max(accuracies))] * train_size))
        model.fit(train.numpy(), labels.numpy())
        return [share(torch.from_numpy(model.predict(test.numpy())), truth)]

    return compared(f"probe, {len(PENALTIES)} penalties, {train_size:,} x {width}", turns, ours, peer)


def show(results: list[Result]) -> None:
    for r in results:
        print(f"{r.what}, {CLASSES} classes, {len(r.ours)} turns")
        print(f"  ours {median(r.ours):.1f} s, scikit-learn {median(r.peer):.1f} s")
        print(f"  scikit-learn / ours {ratios(r.peer, r.ours).text(2)}")
        for name, accuracies in (("ours", r.our_accuracies), ("scikit-learn", r.peer_accuracies)):
            print(f"  accuracy, {name}: {', '.join(f'{accuracy:.2%}' for accuracy in accuracies)}")


def write_file(path: Path, rows: int, width: int) -> None:
    """Features in a raw file of float32, part by part, and their classes beside it."""
    labels = []
    with path.open("wb") as file:
        for number, start in enumerate(range(0, rows, 50_000)):
            part, classes = features(min(50_000, rows - start), width, number)
            file.write(part.numpy().tobytes())
            labels.append(classes.numpy())
    np.save(path.with_suffix(".npy"), np.concatenate(labels))


def anonymous_bytes() -> int:
    """Memory of this process that is no file's: what a mapped file takes is given back whenever it is needed."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Watch:
    """Looks at the memory of this process ten times a second, from before to after something is done."""

    def __enter__(self) -> "Watch":
        self.before = self.peak = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            sleep(0.1)

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        self._thread.join()


def do_job(job: str, path: Path, width: int) -> None:
    """In a process of its own: one protocol on the mapped file; prints what it took as JSON."""
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size // 4).reshape(-1, width)
    labels = torch.from_numpy(np.load(path.with_suffix(".npy")))
    start = perf_counter()
    with Watch() as watch:
        if job == "knn":
            queries, _ = features(1000, width, 1 << 20)
            knn_rank(mapped, labels, queries, ks=KS, num_classes=CLASSES, device=CPU)
        elif job == "probe":
            fit_logistic(mapped, labels, num_classes=CLASSES, penalty=1e-3, device=CPU)
        else:
            measure_spread(mapped)
    took = {"seconds": perf_counter() - start, "before": watch.before, "peak": watch.peak}
    print(json.dumps({"what": job, **took}))


def measure_memory(rows: int, width: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        needed = 4 * rows * width
        if (free := disk_usage(folder).free) < 2 * needed:
            raise SystemExit(f"{folder} has {free / 1e9:.1f} GB free; the file takes {needed / 1e9:.1f} GB")
        path = Path(folder) / "features.bin"
        write_file(path, rows, width)
        found = []
        for job in JOBS:
            command = [sys.executable, __file__, "--job", job, "--file", str(path), "--width", str(width)]
            found.append(json.loads(run(command, check=True, capture_output=True, text=True).stdout))
    print(f"{rows:,} x {width}, a file of {needed / 1e6:,.0f} MB; memory beside it, in MB")
    for took in found:
        before, peak = took["before"] / 1e6, took["peak"] / 1e6
        print(f"  {took['what']:<11}{took['seconds']:8.1f} s   {before:6.0f} before, {peak:6.0f} at most")
    return found


def main() -> None:
    args = parse_args()
    if args.job is not None:
        do_job(args.job, args.file, args.width)
        return
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if args.million:
        record = measure_memory(args.rows, args.width)
    else:
        results = [
            measure(*size, width=args.width, turns=args.turns)
            for measure, size in ((measure_knn, args.knn_size), (measure_probe, args.probe_size))
        ]
        show(results)
        record = [asdict(result) for result in results]
    write_figures(args.out, {"machine": machine(CPU), "results": record})


if __name__ == "__main__":
    main()
