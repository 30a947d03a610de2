"""Our recipes beside the joint-embedding methods that people would use instead, trained for the same time.

    python benchmarks/peers.py cifar10.zip --ours default "default --uniformity 0.01" --minutes 10 30 --out peers
    python benchmarks/peers.py cifar10.zip --peers --ours default "default --mask block" --minutes 30 --out masks
    python benchmarks/peers.py cifar10.zip --common "--device cuda --cache-on-device" --minutes 10 --out peers-gpu

The peers are SimCLR, DINO, LeJEPA and VISReg (see joint_embedding.py). What is given to `--ours` are words of
`mae pretrain`, a recipe first; `--common` holds words for all methods. The rate of each method is measured first, so
leave the machine alone; each then gets as many steps as fill its minutes at that rate, and a warm-up of a tenth of them
and a cosine over them. The table has the minutes that training really took, between first and last step. The same
command resumes: what is finished is not run again, and what was killed begins anew.

Equal: the machine and the minutes; the encoder's class, sizes and initialisation; the images, those held out, the
loader, decoder and crops' code, the normalisation and the precision; the loop that trains and its schedule; the
protocols that evaluate, with their options.

Not equal, as each method is used as it is meant:
- Peers see two whole crops of each image with distorted colours; ours see a part of the patches of one crop, mostly a
  quarter, and crops and flips alone. So crops and encoder tokens a second differ, and both are in the table; of DINO
  its teacher's tokens are not counted.
- Peers read the class token, ours the mean of the patch tokens, and each is evaluated by k-NN and linear probe on what
  it reads. The JSON has both. Attentive probe, fine-tuning and the dense scores use the patch tokens of all.
- The peak rate of each peer is the best of `--rates` by k-NN on a tenth of the training part, in a short run; the time
  for that is not counted. Ours keep the rate of their words. Nobody's choice sees a test image.
- Peers take `--images` images a step, as contrast wants many; ours the batch of their words.
- Batch norm is in some of the peers' projectors, which are discarded after training; the encoders have none.

Random weights and raw pixels stand in the same table. Intervals are Student's over seeds, differences are paired by
seed. The best peer is chosen by the very scores that ours are compared with, which favours it. Without
any peer the first of ours is what the others are compared with.
"""

import shlex
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from joint_embedding import PEERS, JointEmbedding, two_views
from peers_table import write_tables
from rich.console import Console
from torch import Tensor

import mae
from mae.bench.report import machine, script_parser
from mae.cli.pretrain import parse
from mae.data.loading.loader import explained_worker_failure
from mae.data.sources.labels import LabelledData
from mae.data.sources.open import open_labelled
from mae.evaluation.common.hold_out import hold_out
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.extractor import model_extractor
from mae.evaluation.protocol import THIS_MODEL
from mae.evaluation.protocols.knn import Knn
from mae.models.build import build_encoder, build_pretrained_encoder
from mae.models.pretrained import PretrainedEncoder
from mae.pretraining.build import fresh_model, make_loader, make_trainer
from mae.pretraining.derived import peak_rate
from mae.pretraining.resolve import RunContext, prepare_run
from mae.records import read_json, write_json
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.optimizer import make_optimizer
from mae.training.run_folder import RunFolder
from mae.training.schedule import WarmupCosine
from mae.training.settings import CheckpointSpec, TrainingSettings

K = 20
DENSE = "segmentation_knn"
PROTOCOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "knn": ("knn", {"ks": (K,)}),
    "linear_probe": ("linear_probe", {}),
    "attentive_probe": ("attentive_probe", {}),
    "finetune": ("labels", {"shares": ("1%", "100%")}),
    DENSE: (DENSE, {"pictures": 0}),
}
"""What `--evaluate` names: a protocol of the package and its options."""
DECIDED = ("--model", "--img-size", "--epochs", "--steps", "--seed", "--out", "--warmup-epochs", "--resume")
"""What is equal for all or follows from the minutes."""
FIRST_STEPS = 4
UNTRAINED = "random weights"
ASKED = "asked.json"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method that is trained: its images and settings, and what makes its module ready for the loop."""

    name: str
    feature: str
    prepared: RunContext
    peer: type[JointEmbedding] | None = None

    def trainer(self, folder: Path, *, steps: int, seed: int, lr: float | None) -> Trainer:
        """A run of so many steps with fresh weights; `lr` is a peer's peak rate."""
        changes = {"steps": steps, "warmup_epochs": None, "seed": seed, "checkpoint_every": steps}
        if lr is not None:
            changes["lr"] = lr
        prepared = replace(self.prepared, config=self.prepared.config.override(changes), folder=RunFolder(folder))
        if self.peer is not None:
            return peer_trainer(prepared, self.peer)
        return make_trainer(prepared, fresh_model(prepared))

    def kept(self, module: Any) -> PretrainedEncoder:
        """What is saved of a trained module: a model of ours, or a peer's encoder."""
        if self.peer is None:
            return module.eval()
        return PretrainedEncoder(encoder=module.evaluated, config=self.prepared.method).eval()


def peer_trainer(prepared: RunContext, kind: type[JointEmbedding]) -> Trainer:
    """The package's loop around a peer."""
    config, steps = prepared.config, prepared.total_steps
    assert config.optim.batch_size is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.optim.seed)
        peer = kind(build_encoder(prepared.method)).to(prepared.device)
    optimizer = make_optimizer(peer, weight_decay=kind.weight_decay, betas=(0.9, 0.999))
    loader = make_loader(prepared)
    samples = steps * config.optim.batch_size
    return Trainer(
        module=peer,
        optimizer=optimizer,
        batches=lambda step: two_views(prepared, loader, peer, optimizer, step),
        settings=TrainingSettings(
            total_steps=steps,
            batch_size=config.optim.batch_size,
            accumulate=1,
            schedule=WarmupCosine(
                peak=peak_rate(config), floor=0.0, warmup_samples=0.1 * samples, total_samples=samples
            ),
            clip_grad=kind.clip_grad,
            precision=config.optim.precision,
            log_every=max(1, min(50, steps // 100)),
            checkpoint_every=steps,
        ),
        checkpoints=CheckpointSpec(folder=prepared.folder.checkpoints, identity={}, metadata=lambda module: {}),
        device=prepared.device,
        world=World(),
    )


def run(trainer: Trainer) -> dict[str, float]:
    """Train to the end: seconds between first and last step, and tokens that the trained encoder saw."""
    tokens = 0

    def count(block: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal tokens
        if torch.is_grad_enabled():  # not where a checkpoint's copy is tried
            tokens += inputs[0].shape[0] * inputs[0].shape[1]

    module: Any = trainer.module
    counting = module.encoder.blocks[0].register_forward_pre_hook(count)
    with explained_worker_failure():
        finished = trainer.run()
    counting.remove()
    if not finished:  # Ctrl-C or another signal
        raise SystemExit("stopped; the same command resumes")
    return {"steps": trainer.step, "seconds": trainer.seconds, "crops": trainer.samples, "tokens": tokens}


def steps_per_second(trainer_of: Callable[[int], Trainer], seconds: float) -> float:
    """The rate of a loop, by runs of more and more steps until one takes half of the seconds or more."""
    steps = FIRST_STEPS
    while True:
        took = run(trainer_of(steps))["seconds"]
        if took >= 0.5 * seconds:
            return steps / took
        steps = ceil(steps * max(seconds / took, 2))


def fitting(minutes: float, rate: float) -> int:
    """Steps that fill the minutes at so many a second."""
    return max(1, round(60 * minutes * rate))


def prepare(name: str, args: Namespace) -> Contestant:
    """Read the images as a method wants them: a peer by its name, ours by words of `mae pretrain`."""
    words = [] if name in PEERS else ["--recipe", *shlex.split(name)]
    sizes = ["--model", args.model, "--img-size", str(args.img_size)]
    config, given, _, _ = parse([args.source, *sizes, *shlex.split(args.common), *words])
    peer = PEERS.get(name)
    changes: dict[str, Any] = {"epochs": 100, "warmup_epochs": None, "checkpoint_keep_every": None}
    if peer is not None:
        changes |= {"batch_size": 2 * args.images, "repeated_aug": 2, "crop_scale": peer.crop_scale, "lr": 1.0}
        changes |= {"accumulate": 1}
    prepared = prepare_run(
        config.override(changes),
        RunFolder(args.out / "none"),
        choose_device(config.machine.device),
        World(),
        resume=False,
        given=given,
    )
    token = "cls" if prepared.method.encoder.cls_token else "mean"
    return Contestant(name=name, feature="mean" if peer is None else token, prepared=prepared, peer=peer)


def train(
    contestant: Contestant, *, steps: int, seed: int, lr: float | None
) -> tuple[PretrainedEncoder, dict[str, float]]:
    """A whole run; of what it writes nothing stays."""
    with TemporaryDirectory(prefix="mae-peers-") as aside:
        trainer = contestant.trainer(Path(aside), steps=steps, seed=seed, lr=lr)
        took = run(trainer)
        return contestant.kept(trainer.module), took


def measure(contestant: Contestant, args: Namespace) -> dict[str, Any]:
    """A method's rate and, of a peer, its learning rate; measured once and kept."""
    path = args.out / "measured.json"
    known: dict[str, Any] = read_json(path) if path.exists() else {}
    own = known.setdefault(contestant.name, {})
    rates = args.rates if contestant.peer is not None else [None]
    if "steps_per_second" not in own:
        with TemporaryDirectory(prefix="mae-peers-") as aside:
            folders = (Path(aside) / str(number) for number in range(1000))
            own["steps_per_second"] = steps_per_second(
                lambda steps: contestant.trainer(next(folders), steps=steps, seed=args.seeds[0], lr=rates[0]),
                args.measuring,
            )
        write_json(path, known)
        print(f"{contestant.name}: {own['steps_per_second']:.2f} steps/s", flush=True)
    if "lr" not in own:
        own["screened"] = screened(contestant, own["steps_per_second"], args) if len(rates) > 1 else {}
        own["lr"] = max(rates, key=lambda lr: own["screened"].get(str(lr), 0.0))
        write_json(path, known)
        if own["screened"]:
            print(f"{contestant.name}: learning rate {own['lr']}, of {own['screened']}", flush=True)
    return own


def screened(contestant: Contestant, rate: float, args: Namespace) -> dict[str, float]:
    """The accuracy by learning rate after a short run, on images of the training part whose labels are held out."""
    data = open_labelled(args.data or args.source, data_root=contestant.prepared.config.machine.data_root)
    part = held_out_part(data)
    minutes = args.screening or 0.1 * min(args.minutes)
    found = {}
    for lr in args.rates:
        model, _ = train(contestant, steps=fitting(minutes, rate), seed=args.seeds[0], lr=lr)
        with TemporaryDirectory(prefix="mae-peers-") as aside:
            task = LabelledTask(
                extractor=model_extractor(model, name=contestant.name),
                folder=Path(aside),
                device=contestant.prepared.device,
                seed=0,
                console=Console(quiet=True),
                data=part,
            )
            numbers = Knn(ks=(K,), baselines=False).run(task).numbers
        found[str(lr)] = numbers[THIS_MODEL][contestant.feature][str(K)]["top1"]
    return found


def held_out_part(data: LabelledData) -> LabelledData:
    """A tenth of the training part as the test part; no test image is in it."""
    split = data.train
    fitted, held = (
        replace(split, source=split.source.take(rows.numpy(), "a part of the training part"), labels=split.labels[rows])
        for rows in hold_out(split.labels, seed=0)
    )
    return replace(data, train=fitted, test=held)


def evaluate(folder: Path, seed: int, args: Namespace, *, baselines: bool, device: str) -> dict[str, Any]:
    """The scores of the encoder in a folder by protocol; those that are there are not measured again."""
    path = folder / "scores.json"
    scores: dict[str, Any] = read_json(path) if path.exists() else {}
    for name in (name for name in args.evaluate if name not in scores):
        protocol, options = PROTOCOLS[name]
        if name in ("knn", "linear_probe", DENSE):
            options = {**options, "baselines": baselines}
        record = mae.evaluate(
            protocol, folder / "encoder.safetensors", data=args.masks if name == DENSE else args.data or args.source,
            out=folder, device=device, seed=seed, overlap="drop", quiet=True, **options,
        )  # fmt: skip
        scores[name] = record.result
        write_json(path, scores)
    shutil.rmtree(folder / "features", ignore_errors=True)  # large, and of use to this encoder alone
    return scores


def finished(contestant: Contestant, minutes: float, seed: int, args: Namespace) -> dict[str, Any]:
    """A run and its scores; whatever is there already is read."""
    folder = args.out / "runs" / slug(contestant.name) / f"{minutes:g}min-seed{seed}"
    path = folder / "training.json"
    if not path.exists():  # written last: without it nothing there counts
        shutil.rmtree(folder, ignore_errors=True)
        measured = measure(contestant, args)
        steps = fitting(minutes, measured["steps_per_second"])
        model, took = train(contestant, steps=steps, seed=seed, lr=measured["lr"])
        mae.save(model, folder / "encoder.safetensors")
        write_json(path, {**took, "lr": measured["lr"], "words": contestant.name, "feature": contestant.feature})
        print(f"{folder.name} of {contestant.name}: {steps:,} steps, {took['seconds']:.0f} s", flush=True)
    device = contestant.prepared.config.machine.device
    about = {"method": contestant.name, "minutes": minutes, "seed": seed, "peer": contestant.peer is not None}
    return {**about, **read_json(path), "scores": evaluate(folder, seed, args, baselines=False, device=device)}


def untrained(prepared: RunContext, seed: int, args: Namespace) -> dict[str, Any]:
    """The same encoder with random weights, whose evaluations bring raw pixels too."""
    folder = args.out / "runs" / slug(UNTRAINED) / f"seed{seed}"
    if not (folder / "encoder.safetensors").exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            mae.save(build_pretrained_encoder(prepared.method), folder / "encoder.safetensors")
    scores = evaluate(folder, seed, args, baselines=True, device=prepared.config.machine.device)
    return {"method": UNTRAINED, "minutes": 0, "seed": seed, "peer": False, "feature": "mean", "scores": scores}


def slug(name: str) -> str:
    """A name as that of a folder."""
    return "-".join("".join(letter if letter.isalnum() or letter in "._" else " " for letter in name).split())


def parse_args(words: list[str] | None) -> Namespace:
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("source", help="labelled images, such as cifar10.zip")
    parser.add_argument("--data", help="labelled images for the evaluations, where they are others")
    parser.add_argument("--masks", help=f"images with masks for {DENSE}, such as camvid")
    parser.add_argument(
        "--ours", nargs="*", default=["default"], help="a recipe each, and words of mae pretrain after it"
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--common", default="", metavar="WORDS", help="of mae pretrain, for all methods")
    parser.add_argument("--minutes", nargs="+", type=float, default=[10, 30], help="that each may train")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="mae_vit_lesson_patch4")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument(
        "--images", type=int, default=256, help="of a step of peers; VISReg wants more than its 64 outputs"
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-4], help="peak learning rates of peers")
    parser.add_argument("--screening", type=float, help="minutes for each rate; a tenth of the fewest --minutes")
    parser.add_argument("--measuring", type=float, default=60.0, help="seconds for each method's steps a second")
    parser.add_argument("--evaluate", nargs="+", choices=list(PROTOCOLS), default=["knn", "linear_probe"])
    parser.add_argument("--out", type=Path, default=Path("peers"))
    args = parser.parse_args(words)
    _check(args, parser)
    return args


def _check(args: Namespace, parser: ArgumentParser) -> None:
    """Refuse what could not be compared, and an `--out` of another comparison."""
    for words in (args.common, *args.ours):
        if wrong := [word for word in shlex.split(words) if word.split("=")[0] in DECIDED]:
            parser.error(f"{words!r} has {wrong[0]}, which is equal for all or follows from --minutes; leave it out")
    if min([*args.minutes, args.measuring, *args.rates]) <= 0:
        parser.error("--minutes, --measuring and --rates take numbers above 0")
    if args.images < 2:
        parser.error(f"--images is {args.images}; expected 2 or more, which a loss can compare")
    if (DENSE in args.evaluate) != (args.masks is not None):
        parser.error(
            f"--masks is {args.masks}; {DENSE} among --evaluate needs images with masks, and nothing else does"
        )
    names = [slug(name) for name in (*args.peers, *args.ours, UNTRAINED)]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"{twice[0]} is named twice; leave one of them out")
    decide = ("source", "data", "masks", "common", "model", "img_size", "images", "rates")
    asked, mark = {name: vars(args)[name] for name in decide}, args.out / ASKED
    if mark.exists() and read_json(mark) != asked:
        parser.error(f"{args.out} holds a comparison of other options; give the same ones, or another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(mark, asked)


def main(words: list[str] | None = None) -> None:
    args = parse_args(words)
    names = (*args.peers, *args.ours)
    for name in names:  # all rates before the machine is busy with runs; one at a time, for each holds the images
        measure(prepare(name, args), args)
    first = prepare(names[0], args).prepared
    results = [untrained(first, seed, args) for seed in args.seeds]
    for name in names:
        contestant = prepare(name, args)
        results += [finished(contestant, minutes, seed, args) for minutes in args.minutes for seed in args.seeds]
        about = {"machine": machine(contestant.prepared.device), "asked": read_json(args.out / ASKED)}
        write_json(args.out / "results.json", {**about, "results": results})
    print(write_tables(results, args.out / "table.md"))


if __name__ == "__main__":
    main()
