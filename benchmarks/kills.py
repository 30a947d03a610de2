"""Kill training runs, in named phases and at random moments, go on with them, and compare the weights bit for bit.

    python benchmarks/kills.py --kills 200 --out kills.json
    python benchmarks/kills.py --compiled --kills 30 --out kills-compiled.json

Each case is a run of a tiny model: alone, in 2 and 4 processes, with DistributedDataParallel and with FSDP2. A kill is
SIGKILL to one process (the others then meet a lost one, and are asked to end as a launcher does) or to all of them.
After one to three kills the run goes on to its end, and its weights must be those of the run that nobody killed.
Libraries are imported once; every process is a fork of that, so a kill takes seconds.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import sklearn.datasets
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from safetensors.torch import load_file
from sklearn.utils import Bunch

import mae
from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.data.loading.loader import TrainingLoader
from mae.pretraining import build as parts
from mae.pretraining import summary as narrate
from mae.pretraining.watch import online_eval as monitor
from mae.training import checkpoint
from mae.training.engine import Trainer
from mae.training.run_folder import find_weights
from mae.training.state import MODEL, OPTIMIZER

torch.set_num_threads(1)
# PyTorch makes its pool of threads anew when a fork first uses it; where two threads do so at once, one finds none.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

STEPS, SAVE_EVERY, BATCH = 12, 2, 16
OPTIONS: dict[str, Any] = {
    "recipe": "mae",
    "source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5,
    "batch_size": BATCH, "steps": STEPS, "checkpoint_every": SAVE_EVERY, "device": "cpu",
    "workers": 0, "doctor": False,
    "held_out": 0.0, "decoder_depth": 1, "precision": "fp32",
}  # fmt: skip
PHASES = (
    "random moment", "mid-step", "data fetch", "staging", "between files", "before commit", "after commit", "prune",
)  # fmt: skip
OF_MAIN = ("staging", "between files", "before commit", "after commit", "prune")
"""Phases in which the main process alone does something, so that it is the one to be killed."""
ASKED = "asked to end"
"""Not a kill: SIGTERM to one process, upon which all save the same step and end with code 75."""
_PATIENCE = 300.0
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Case:
    """How many processes train, and how they share the work."""

    processes: int
    sharded: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        if self.processes == 1:
            return f"1 process{compiled}"
        return f"{self.processes} processes, {'FSDP2' if self.sharded else 'DDP'}{compiled}"


CASES = (Case(1), Case(2), Case(2, sharded=True), Case(4), Case(4, sharded=True))
COMPILED = (Case(1, compiled=True), Case(2, compiled=True), Case(2, sharded=True, compiled=True))
CHANGING = (Case(2), Case(4))


@dataclass(frozen=True)
class Kill:
    """What is done to a run: in which phase, after so many steps or seconds, to which process, or to all of them."""

    phase: str
    after: int
    seconds: float
    rank: int
    everybody: bool


def draw_kill(source: random.Random, case: Case, phase: str) -> Kill:
    """A kill of a phase, the rest of it at random."""
    rank = 0 if phase in OF_MAIN else source.randrange(case.processes)
    return Kill(phase, source.randrange(STEPS // 2), source.uniform(0.0, 2.5), rank, source.random() < 0.5)


def light() -> None:
    """Few images, no pictures, few looks: what is left is the training and its checkpoints."""
    digits = sklearn.datasets.load_digits()
    few = Bunch(images=digits.images[:200], target=digits.target[:200])
    sklearn.datasets.load_digits = lambda: few
    parts.reconstruct = parts.draw_panels = lambda *args, **options: None
    narrate.draw_curve = lambda *args, **options: None
    for name, count in {"LABEL_FREE": 8, "VIEWED": 4, "TRAIN": 8, "TEST": 8}.items():
        setattr(monitor, f"_{name}_IMAGES", count)


def die() -> None:
    """As by `kill -9`: nothing is tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


def variant(kill: Kill) -> None:
    """Have this process die in a phase; called in the process itself."""

    def fatal(owner: Any, name: str, *, at: int, before: bool = True) -> None:
        original, calls = getattr(owner, name), iter(range(sys.maxsize))

        def wrapped(*args: Any, **options: Any) -> Any:
            now = next(calls) == at
            if now and before:
                die()
            result = original(*args, **options)
            if now:
                die()
            return result

        setattr(owner, name, wrapped)

    def ask() -> None:
        clip, calls = Trainer._clip, iter(range(sys.maxsize))

        def wrapped(trainer: Trainer) -> Any:
            if next(calls) == kill.after:
                os.kill(os.getpid(), signal.SIGTERM)
            return clip(trainer)

        Trainer._clip = wrapped  # type: ignore[method-assign]

    saves = kill.after // SAVE_EVERY
    variants: dict[str, Callable[[], None]] = {
        ASKED: ask,
        "mid-step": lambda: fatal(Trainer, "_clip", at=kill.after),
        "data fetch": lambda: fatal(TrainingLoader, "_joined", at=kill.after),
        "staging": lambda: fatal(checkpoint, "_copied", at=2 * saves, before=False),
        "between files": lambda: fatal(checkpoint, "save_file", at=2 * saves, before=False),
        "before commit": lambda: fatal(checkpoint, "commit", at=saves),
        "after commit": lambda: fatal(checkpoint, "commit", at=saves, before=False),
        "prune": lambda: fatal(checkpoint, "_is_kept", at=max(saves - 2, 0), before=False),
    }
    variants.get(kill.phase, lambda: None)()


def train(folder: Path, case: Case, rank: int, port: int, kill: Kill | None, ids: Path | None) -> None:
    """One process of a run, in a fork; it ends without the interpreter's good-bye, which is the parent's."""
    log = (folder.parent / f"{folder.name}-{rank}.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if case.processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.processes),
            "LOCAL_WORLD_SIZE": str(case.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "kills", "OPENMAE_TIMEOUT": "60",
        }  # fmt: skip
    light()
    if kill is not None and rank == kill.rank:
        variant(kill)
    if ids is not None:
        _record_ids(ids, rank)
    code = 1
    try:
        options = {"compile": "on" if case.compiled else "off", **OPTIONS, "shard": case.sharded}
        result = mae.pretrain(out=folder, resume=True, quiet=True, **options)
        code = 0 if result.finished else 75
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        log.flush()
        os._exit(code)


def _record_ids(folder: Path, rank: int) -> None:
    """Write down which images each step of this process has."""
    original = TrainingLoader.iterate

    def iterate(loader: TrainingLoader, start: int) -> Iterator[Any]:
        for step, batch in enumerate(original(loader, start), start=start):
            if loader.batch_size == BATCH:  # the baselines are measured on others
                (folder / f"{step:04d}-{rank}.json").write_text(json.dumps([batch.ids.tolist(), batch.keys.tolist()]))
            yield batch

    TrainingLoader.iterate = iterate  # type: ignore[method-assign,assignment]


def launch(folder: Path, case: Case, kill: Kill | None = None, ids: Path | None = None) -> list[int]:
    """Run all processes to their end or to the kill's; their exit codes, negative for signals."""
    port = free_port()
    processes = [
        _fork.Process(target=train, args=(folder, case, rank, port, kill, ids)) for rank in range(case.processes)
    ]
    for process in processes:
        process.start()
    if kill is not None and kill.phase == "random moment":
        processes[kill.rank].join(kill.seconds)
        processes[kill.rank].kill()
    _wait(processes, everybody=kill is not None and kill.everybody, told=kill is not None and kill.phase == ASKED)
    return [process.exitcode or 0 for process in processes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def _wait(processes: list[BaseProcess], *, everybody: bool, told: bool) -> None:
    """Until all have ended; when one dies the others are killed, or asked to end and in the end killed; `told`: not."""
    deadline = time.monotonic() + _PATIENCE
    while any(process.is_alive() for process in processes):
        if not told and any(process.exitcode not in (None, 0) for process in processes):
            for process in processes:
                process.kill() if everybody else process.terminate()
            for process in processes:
                process.join(10)
                process.kill()
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise TimeoutError(f"processes did not end within {_PATIENCE:g} s")
        time.sleep(0.02)


def digest(folder: Path) -> str:
    """Of the weights and averages of a finished run."""
    newest = find_weights(folder).parent
    if not (folder / "summary.json").exists() or newest.name != f"step-{STEPS:08d}":
        return f"unfinished: {newest.name}"
    parts_of_it = (load_file(newest / name) for name in (MODEL, OPTIMIZER))
    return hashlib.sha256(
        b"".join(
            name.encode() + tensor.numpy().tobytes() for part in parts_of_it for name, tensor in sorted(part.items())
        )
    ).hexdigest()


def references(folder: Path, cases: tuple[Case, ...]) -> dict[Case, str]:
    """The weights of the runs that nobody kills."""
    found = {}
    for case in cases:
        root = folder / f"through-{case.processes}-{case.sharded}-{case.compiled}"
        codes = launch(root, case)
        if any(codes):
            raise RuntimeError(f"{case.name}: {codes}; see {root}-0.log")
        found[case] = digest(root)
    return found


def trial(root: Path, case: Case, kills: list[Kill]) -> tuple[int, str]:
    """A run that is killed again and again, and then goes on; how often it was hit, and its weights."""
    hits = 0
    for kill in kills:
        if (root / "summary.json").exists():
            break
        codes = launch(root, case, kill)
        hits += codes[kill.rank] == -signal.SIGKILL
    launch(root, case)
    return hits, digest(root)


def run_matrix(
    folder: Path, *, kills: int, seed: int, cases: tuple[Case, ...] = CASES, in_a_row: int = 3
) -> dict[str, Any]:
    """Kills until so many have hit, all phases of all cases in turn; counts, and what did not come out the same."""
    source, expected = random.Random(seed), references(folder, cases)
    hit: Counter[tuple[str, str]] = Counter()
    wrong: list[dict[str, Any]] = []
    number, turns = 0, [(case, phase) for case in cases for phase in PHASES]
    source.shuffle(turns)
    while sum(hit.values()) < kills:
        case, phase = turns[number % len(turns)]
        planned = [draw_kill(source, case, phase) for _ in range(source.randint(1, in_a_row))]
        root = folder / f"cut-{number}"
        try:
            hits, found = trial(root, case, planned)
        except KeyboardInterrupt:  # tells what there is
            break
        hit[case.name, phase] += hits
        if found != expected[case]:
            told = {"case": case.name, "kills": [vars(kill) for kill in planned], "found": found, "at": str(root)}
            wrong.append(told)
            sys.stderr.write(f"not the same: {told}\n")
        else:
            shutil.rmtree(root)
        number += 1
        if number % 10 == 0:
            sys.stderr.write(f"{sum(hit.values())} kills, {len(wrong)} runs not the same\n")
    table = {case.name: {phase: hit[case.name, phase] for phase in PHASES} for case in cases}
    return {"kills": sum(hit.values()), "runs": number, "seed": seed, "table": table, "wrong": wrong}


def changing_world(folder: Path) -> dict[str, Any]:
    """One run on 2, then 4, then 1 processes, beside one that has 1 throughout: ids and keys, and losses."""
    alone, moved = folder / "alone", folder / "moved"
    ids = {name: folder / f"ids-{name}" for name in ("alone", "moved")}
    for place in ids.values():
        place.mkdir()
    launch(alone, Case(1), ids=ids["alone"])
    codes = [launch(moved, case, Kill(ASKED, 4, 0.0, case.processes - 1, False), ids["moved"]) for case in CHANGING]
    codes.append(launch(moved, Case(1), ids=ids["moved"]))
    losses = [[row["loss"] for row in _rows(run)] for run in (alone, moved)]
    largest = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    same = [_ordered(place) for place in ids.values()]
    return {"codes": codes, "ids_equal": same[0] == same[1], "largest_relative_loss_difference": largest}


def _rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def _ordered(place: Path) -> list[list[list[int]]]:
    """Ids and keys of each step's whole batch, the processes' parts in order."""
    steps: dict[str, list[list[int]]] = {}
    for path in sorted(place.iterdir()):
        mine = json.loads(path.read_text())
        whole = steps.setdefault(path.name[:4], [[], []])
        whole[0] += mine[0]
        whole[1] += mine[1]
    return [steps[step] for step in sorted(steps)]


@contextmanager
def temporary(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        kept.mkdir(parents=True)
        yield kept


def as_table(found: dict[str, Any]) -> str:
    """The matrix as Markdown."""
    rows = [(name, *(row[phase] for phase in PHASES)) for name, row in found["table"].items()]
    return "\n".join(map(markdown_row, [("", *PHASES), ["---"] * (1 + len(PHASES)), *rows]))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="runs whose blocks are compiled")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    args = parser.parse_args()
    began = time.monotonic()
    with temporary(args.folder) as folder:
        cases = COMPILED if args.compiled else CASES
        found = {"world": changing_world(folder), **run_matrix(folder, kills=args.kills, seed=args.seed, cases=cases)}
    found |= {"seconds": round(time.monotonic() - began), "machine": machine(torch.device("cpu"))}
    print(as_table(found))
    print(json.dumps({name: value for name, value in found.items() if name != "table"}, indent=2))
    write_figures(args.out, found)
    if found["wrong"] or not found["world"]["ids_equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
