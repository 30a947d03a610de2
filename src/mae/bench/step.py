"""A training step of named models on synthetic images: against a peer and the machine's limits, part by part."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import torch
from rich.console import Console
from torch import Tensor, nn

from mae.bench.ceilings import Ceilings, measure_ceilings
from mae.bench.report import check_figures, machine, write_figures
from mae.bench.timing import Quartiles, quartiles, ratios, time_interleaved, timed
from mae.config import Device, Optimizer, Precision
from mae.core.contracts import Batch
from mae.core.types import MaskPlan
from mae.errors import MAEError, UsageError
from mae.layers.compiled import compile_blocks
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.models.summary import ModelSummary, summarise
from mae.options import shown
from mae.pretraining.estimate.profile import PeakMemory
from mae.report.terminal.tables import show_grid
from mae.training.device import autocast, choose_device, choose_precision, keep_freed_memory, synchronise
from mae.training.optimizer import make_optimizer

if TYPE_CHECKING:
    from mae.bench.peer import Peer

_PEER = "ViTMAE"
_CPU_BATCH, _GPU_BATCH = 16, 128
_PART_TURNS = 5
_STEPS_A_TURN = 5
"""On a device with a queue: emptying it before and after counts with each turn."""
_STATES = 7
"""Values that AdamW reads or writes for each weight: weight, gradient and two averages read, all but the gradient
written."""


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What is timed.

    Raises:
        UsageError: no model, a decoder of no known form, or a time or batch that is no positive number.
    """

    models: tuple[str, ...] = ("mae_vit_compact_patch16",)
    """Names of 'mae list models'."""
    decoders: tuple[str, ...] = ("self",)
    """self, cross, or cross:SHARE, which predicts that fraction of the masked patches."""
    optimizer: Optimizer = "adamw"
    """Of our models; the peer always has AdamW."""
    precision: Precision = "auto"
    """Of all models; auto: bf16 where the device has it, fp32 elsewhere."""
    device: Device = "auto"
    """auto: CUDA, else Apple's MPS, else the CPU."""
    batch_size: Annotated[int | None, shown("16 on a CPU, 128 on a GPU", "B")] = None
    """Images per step."""
    compile: bool = False
    """Time compiled models too; compilation takes minutes."""
    peer: bool = False
    """Time transformers' ViTMAE with the same weights too."""
    seconds: float = 40.0
    """About how long to measure each model."""
    out: Annotated[Path | None, shown("nowhere", "FILE.json")] = None
    """Write all figures here."""

    def __post_init__(self) -> None:
        if not self.models or not self.decoders:
            raise UsageError("nothing to time; name a model (--models) and a decoder (--decoders)")
        if not self.seconds > 0 or (self.batch_size is not None and self.batch_size < 1):
            raise UsageError(f"--seconds is {self.seconds:g}, --batch-size {self.batch_size}; expected more than 0")
        for decoder in self.decoders:
            _options_of(decoder)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The figures of one model.

    Attributes:
        model: its name.
        way: its decoder, `ViTMAE` for the peer; compiled or not.
        batch_size: images per step.
        rate: images/s.
        beside: ratio to the peer's rate, turn by turn; None without a peer.
        operations: floating-point operations per second, in matrix products.
        of_matmul: ratio to those of a large matrix product.
        of_copy: bytes per second that the optimizer's step reads and writes, as a ratio to copying; None where not
            measured.
        peak_bytes: memory that a step takes beside the weights, with the optimizer's averages; on a CPU by the
            process's growth, good to a tenth.
        parts: share of the step's time by part; empty for the peer and what is compiled.
    """

    model: str
    way: str
    batch_size: int
    rate: Quartiles
    beside: Quartiles | None
    operations: float
    of_matmul: float
    of_copy: float | None
    peak_bytes: int
    parts: dict[str, float]


def run_step_bench(bench: StepBench, console: Console) -> dict[str, Any]:
    """Time everything, show the tables, and give all of it as JSON values.

    Raises:
        UsageError: no such model or device, no transformers for a peer, or a file of figures that is there already.
        MAEError: the peer computes another loss; nothing was timed.
    """
    check_figures(bench.out)
    device = choose_device(bench.device)
    precision = choose_precision(bench.precision, device)
    if device.type == "cpu":
        keep_freed_memory()
    ceilings = measure_ceilings(device, precision)
    about = machine(device)
    console.print(
        f"{about['processor']}, {device}, {about['threads']} threads, torch {about['torch']}, {precision}: "
        f"{ceilings.matmul / 1e9:,.0f} GFLOP/s in a matrix product, {ceilings.copy / 1e9:,.1f} GB/s copied",
        highlight=False,
    )
    found: list[Timed] = []
    costs: dict[str, Any] = {}
    for name in bench.models:
        torch.compiler.reset()  # what was compiled for one model would count against the next, until none is compiled
        timed_here, summaries = _time_model(bench, name, device, precision, ceilings)
        found += timed_here
        costs[name] = {way: asdict(summary) for way, summary in summaries.items()}
        _show(console, name, timed_here, summaries)
    record = {
        "machine": about, "ceilings": asdict(ceilings), "costs": costs, "results": [asdict(each) for each in found]
    }  # fmt: skip
    write_figures(bench.out, record)
    return record


def _time_model(
    bench: StepBench, name: str, device: torch.device, precision: str, ceilings: Ceilings
) -> tuple[list[Timed], dict[str, ModelSummary]]:
    batch_size = bench.batch_size or (_CPU_BATCH if device.type == "cpu" else _GPU_BATCH)
    steps: dict[str, _Step] = {}
    summaries: dict[str, ModelSummary] = {}
    for decoder in bench.decoders:
        for compiled in (False, True) if bench.compile else (False,):
            way = decoder + (", compiled" if compiled else "")
            own = OwnStep(_build(name, decoder), bench.optimizer, batch_size, device, precision, compiled)
            steps[way], summaries[decoder] = own, own.summary
    if bench.peer:
        for compiled in (False, True) if bench.compile else (False,):
            way = _PEER + (", compiled" if compiled else "")
            steps[way] = _PeerStep(_build(name, "self"), batch_size, device, precision, compiled)
    peaks = {way: step.warm_up() for way, step in steps.items()}
    seconds = time_interleaved({way: step.once for way, step in steps.items()}, seconds=bench.seconds)
    found = []
    for way, step in steps.items():
        parts = step.parts() if isinstance(step, OwnStep) and not step.compiled else {}
        done = step.step_flops * batch_size / median(seconds[way])
        moved = _STATES * step.weight_bytes / parts["optimizer"] if parts and bench.optimizer == "adamw" else None
        found.append(
            Timed(
                model=name,
                way=way,
                batch_size=batch_size,
                rate=quartiles([batch_size / each for each in seconds[way]]),
                beside=ratios(seconds[_PEER], seconds[way]) if bench.peer and way != _PEER else None,
                operations=done,
                of_matmul=done / ceilings.matmul,
                of_copy=None if moved is None else moved / ceilings.copy,
                peak_bytes=peaks[way],
                parts={part: value / sum(parts.values()) for part, value in parts.items()},
            )
        )
    return found, summaries


def _build(name: str, decoder: str) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return create_model(name, **_options_of(decoder))


def _options_of(decoder: str) -> dict[str, Any]:
    kind, _, share = decoder.partition(":")
    try:
        if kind in ("self", "cross") and 0 < float(share or 1) <= 1:
            return {"decoder": kind, "mask_predicted": float(share or 1)}
    except ValueError:
        pass
    raise UsageError(f"--decoders has {decoder!r}; expected self, cross, or cross:SHARE with a share up to 1")


class _Step(ABC):
    """A training step of something, done again and again on the same images.

    Forward, backward, optimizer: gradients are not clipped and fp16's are not scaled, on neither side.
    """

    step_flops: int
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, batch_size: int, device: torch.device, precision: str, compiled: bool) -> None:
        self.batch_size, self.device, self.precision, self.compiled = batch_size, device, precision, compiled

    @property
    def weight_bytes(self) -> int:
        """Of what is trained."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    @abstractmethod
    def loss(self) -> Tensor:
        """Of the next masks."""

    @abstractmethod
    def build(self) -> None:
        """Put the model on its device and make its optimizer."""

    def compile(self) -> None:
        """Have the model compiled when it is first used."""
        self.model.compile(dynamic=False)

    def warm_up(self) -> int:
        """Build it and take two steps; the memory that the second one takes beside weights and code, in bytes."""
        self.build()
        if self.compiled:
            self.compile()
        self.run()
        with PeakMemory(self.device) as memory:
            self.run()
            synchronise(self.device)
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return memory.peak_bytes + sum(value.nbytes for value in states if isinstance(value, Tensor))

    def once(self) -> float:
        steps = 1 if self.device.type == "cpu" else _STEPS_A_TURN

        def turn() -> None:
            for _ in range(steps):
                self.run()

        return timed(turn, self.device) / steps

    def run(self) -> None:
        with autocast(self.precision, self.device):
            value = self.loss()
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class OwnStep(_Step):
    """A step of ours, under a new mask each time.

    Args:
        model: whose step.
        kind: of optimizer.
        batch_size: images a step.
        device: where to compute.
        precision: `fp32`, `bf16` or `fp16`.
        compiled: whether the model is compiled first.
    """

    model: MaskedAutoencoder

    def __init__(
        self, model: MaskedAutoencoder, kind: str, batch_size: int, device: torch.device, precision: str, compiled: bool
    ) -> None:
        super().__init__(batch_size, device, precision, compiled)
        self.model, self._kind = model, kind
        self.summary = summarise(model)
        self.step_flops = self.summary.step_flops

    def build(self) -> None:
        """Put it on its device and make its optimizer."""
        self.model = self.model.to(self.device).train()
        self._images = torch.randn(self.batch_size, *_shape(self.model), device=self.device)
        self.optimizer = make_optimizer(self.model, weight_decay=0.05, betas=(0.9, 0.95), kind=self._kind)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-5

    def compile(self) -> None:
        """Block by block, as in a run."""
        compile_blocks(self.model)

    def plan(self) -> MaskPlan:
        """A new mask for each image."""
        keys = torch.randint(-(2**63), 2**63 - 1, (self.batch_size,), device=self.device)
        return self.model.plan(self._images, keys=keys)

    def loss(self) -> Tensor:
        """Of the next masks."""
        return self.model(self._images, plan=self.plan()).loss

    def parts(self) -> dict[str, float]:
        """Seconds of each part, the median of some steps with a wait between parts."""
        turns = [self._part_by_part() for _ in range(_PART_TURNS)]
        return {part: median(turn[part] for turn in turns) for part in turns[0]}

    def _part_by_part(self) -> dict[str, float]:
        model, found = self.model, {}

        def part(name: str, run: Callable[[], Any]) -> Any:
            synchronise(self.device)
            began = perf_counter()
            result = run()
            synchronise(self.device)
            found[name] = perf_counter() - began
            return result

        batch = Batch(x=self._images, tokenizer=model.tokenizer)
        with autocast(self.precision, self.device):
            plan = part("mask", self.plan)
            taught = part("teacher", lambda: model.taught(batch)) if model.teacher is not None else {}
            encoded = part("encoder", lambda: model.encoded(self._images, plan))
            layout = model.tokenizer.layout_of(self._images)
            prediction = part("decoder", lambda: model.decoder(encoded, plan, layout))
        target = part("target", lambda: model.target(batch, plan.predicted, taught))
        loss = part("loss", lambda: model.loss(prediction, target, plan.weight))
        part("backward", loss.backward)
        part("optimizer", self.optimizer.step)
        part("zeroing", lambda: self.optimizer.zero_grad(set_to_none=True))
        return found


class _PeerStep(_Step):
    """A step of the peer. Ours, which it is made and checked from, is gone before any memory is measured."""

    model: "Peer"

    def __init__(
        self, ours: MaskedAutoencoder, batch_size: int, device: torch.device, precision: str, compiled: bool
    ) -> None:
        super().__init__(batch_size, device, precision, compiled)
        try:
            from mae.bench import peer
        except ImportError as error:
            raise UsageError(f"--peer needs transformers: pip install transformers ({error})") from error
        self.step_flops = summarise(ours).step_flops
        self.model = peer.make_peer(ours).train()
        self._shape = _shape(ours)
        images = torch.randn(2, *self._shape)
        plan = ours.plan(images)
        with torch.no_grad():  # two models that do not compute the same thing are not timed
            mine = float(ours(images, plan=plan).loss)
            theirs = float(self.model(images, noise=peer.peer_noise(plan)).loss)
        if abs(mine - theirs) > 1e-4 * abs(theirs):
            raise MAEError(f"the losses differ, nothing was timed: ours {mine}, {_PEER}'s {theirs}")

    def build(self) -> None:
        self.model = self.model.to(self.device)  # type: ignore[arg-type]
        self._images = torch.randn(self.batch_size, *self._shape, device=self.device)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self._images).loss
        return loss


def _shape(model: MaskedAutoencoder) -> tuple[int, ...]:
    assert model.config is not None
    return model.config.layout.channels, *model.config.layout.size


def _show(console: Console, name: str, found: list[Timed], summaries: dict[str, ModelSummary]) -> None:
    header = ["way", "images/s", f"beside {_PEER}", "GFLOP/s", "of matmul", "of copy", "memory, GB"]
    rows = [
        (
            each.way,
            each.rate.text(1),
            "" if each.beside is None else each.beside.text(2),
            f"{each.operations / 1e9:,.0f}",
            f"{each.of_matmul:.0%}",
            "" if each.of_copy is None else f"{each.of_copy:.0%}",
            f"{each.peak_bytes / 1e9:.2f}",
        )
        for each in found
    ]
    show_grid(console, f"{name}, batches of {found[0].batch_size}", header, rows)
    parts = [(each.way, *(f"{share:.1%}" for share in each.parts.values())) for each in found if each.parts]
    show_grid(console, "share of the step's time", ["way", *found[0].parts], parts)
    costs = [
        (way, *(f"{value / 1e9:.3f}" for value in (s.encoder_flops, s.decoder_flops - s.head_flops, s.head_flops,
                                                   s.step_flops)))
        for way, s in summaries.items()
    ]  # fmt: skip
    header = ["way", "encoder", "decoder", "head", "whole step"]
    show_grid(console, "GFLOP an image (forward; the whole step with backward)", header, costs)
