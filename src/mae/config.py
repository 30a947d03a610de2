"""`RunConfig`: everything a pre-training run is told, in groups; to and from JSON.

Options that are None are chosen to suit the source and the machine when the run starts; the run folder's `config.json`
holds what was chosen, so the run can be repeated from that file alone. No PyTorch here: the command line reads this to
print its help.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le, Lt

from mae import records
from mae.core.component import Count, Metavar, NotNegative, Positive, Share, ShareOfAll, check_options
from mae.core.method import SLOTS, MethodConfig, checked_options, flat_defaults, flat_json
from mae.credentials import concealed
from mae.errors import UsageError
from mae.options import shown

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Compile = Literal["auto", "on", "off"]
Optimizer = Literal["adamw", "muon"]
Statistics = Literal["data", "imagenet", "model"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]

_Beta = Annotated[float, Ge(0), Lt(1)]
_TOP = ("source", "recipe", "model", "init_from")


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Options that belong together, each checked by its type."""

    def __post_init__(self) -> None:
        for each in fields(self):
            records.check_text(getattr(self, each.name), name=as_flag(each.name))
        check_options(self, name=as_flag)


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Group):
    """Which images a run trains on, and how they are cropped."""

    crop_scale: Annotated[tuple[ShareOfAll, ShareOfAll], tyro.conf.arg(metavar="MIN MAX")] = (0.2, 1.0)
    """Area of the smallest and of the largest crop, as fractions of the image's."""
    repeated_aug: Count = 1
    """Crops made of an image whenever it is decoded; an epoch then has as many times the steps."""
    color_jitter: Annotated[float, Ge(0), Le(2.5), Metavar("STRENGTH")] = 0.0
    """Change brightness, contrast, saturation and hue of most crops; 1: as much as SimCLR, 0: not at all."""
    grayscale: Annotated[float, Ge(0), Le(1), Metavar("FRACTION")] = 0.0
    """Fraction of the crops made grey."""
    reduced_decoding: bool = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its crop is smaller by as much."""
    statistics: Statistics = "data"
    """Channel mean and std: measured on the data, ImageNet's, or those of --init-from."""
    held_out: Annotated[float, Ge(0), Le(0.5), Metavar("FRACTION")] = 0.02
    """Fraction of the images, 2,000 at most, never trained on: their loss shows overfitting."""
    max_unreadable: Annotated[float, Ge(0), Lt(1), Metavar("FRACTION")] = 0.001
    """Fraction of unreadable images above which the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_scale[0] > self.crop_scale[1]:
            raise UsageError(f"--crop-scale is {self.crop_scale}; expected the smaller one first")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(_Group):
    """How the model is trained."""

    epochs: Annotated[Positive | None, shown("100, unless --steps is given", "E")] = None
    """Epochs."""
    steps: Annotated[Count | None, shown("from --epochs", "S")] = None
    """Optimizer steps, instead of --epochs."""
    batch_size: Annotated[Count | None, shown("64 on a CPU, 256 on a GPU, fewer for fewer images", "B")] = None
    """Images per optimizer step, over all processes and micro-batches."""
    lr: Annotated[Positive | None, shown("2e-3 for muon, 1e-3 for adamw", "RATE")] = None
    """Peak learning rate, not scaled."""
    base_lr: Annotated[Positive | None, shown("none", "RATE")] = None
    """Peak learning rate for a batch of 256; scaled linearly with the batch."""
    min_lr: Annotated[NotNegative, Metavar("RATE")] = 0.0
    """Learning rate at the end of the cosine schedule."""
    warmup_epochs: Annotated[NotNegative | None, shown("a tenth of the run", "E")] = None
    """Epochs of linear warm-up."""
    optimizer: Optimizer = "adamw"
    """muon: orthogonalised steps for matrices inside blocks, AdamW for the rest."""
    weight_decay: Annotated[NotNegative, Metavar("DECAY")] = 0.05
    """Weight decay, not on biases and norms."""
    betas: Annotated[tuple[_Beta, _Beta], tyro.conf.arg(metavar="BETA1 BETA2")] = (0.9, 0.95)
    """AdamW's betas."""
    clip_grad: Annotated[Positive | None, shown("None", "NORM|None")] = 1.0
    """Largest norm of the gradient; None: no clipping."""
    mask_schedule: Literal["const", "linear", "cosine", "random"] = "const"
    """Mask-ratio schedule: constant, linear or cosine ramp from --mask-start to --mask-ratio, or random per batch."""
    mask_start: Share = 0.5
    """Mask ratio at the start of a schedule."""
    mask_warmup: Annotated[NotNegative, Metavar("E")] = 5.0
    """Epochs until a linear or cosine schedule ends."""
    precision: Precision = "auto"
    """auto: bf16 where the device has it, fp32 elsewhere."""
    seed: Annotated[int, Ge(0), Lt(1 << 63)] = 0
    """Decides weights, order, crops and masks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.steps is not None:
            raise UsageError("both --epochs and --steps are given; give one of them")
        if self.lr is not None and self.base_lr is not None:
            raise UsageError(
                "both --lr and --base-lr are given; --lr is the rate itself, --base-lr is scaled by batch / 256: "
                "give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(_Group):
    """What is evaluated as a run goes; a resumed run may change it."""

    monitor: Annotated[str | None, shown("label-free numbers alone", "LABELLED")] = None
    """Labelled images for k-NN and linear-probe accuracy during pre-training; never trained on."""
    monitor_every: Annotated[Positive | None, shown("an eighth of the run, more in a short one", "E")] = None
    """Epochs between two evaluations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.monitor is not None:
            object.__setattr__(self, "monitor", concealed(self.monitor))


@dataclass(frozen=True, kw_only=True)
class MachineConfig(_Group):
    """Where and how fast a run computes, not what it learns; a resumed run may change it."""

    out: Annotated[Path | None, shown("a new one under runs/", "DIR")] = None
    """Run folder."""
    data_root: Annotated[Path, Metavar("DIR")] = Path("data")
    """Where sets known by name are kept."""
    device: Device = "auto"
    """auto: CUDA, else Apple's MPS, else the CPU."""
    workers: Annotated[Annotated[int, Ge(0)] | None, shown("by device and data", "W")] = None
    """Processes that load images."""
    cache_on_device: bool = False
    """Hold all images on the device and crop them there: for small sets of images of one size."""
    compile: Compile = "auto"
    """Compile the blocks of the model with torch.compile; auto: where the run is long enough to win it back."""
    cuda_graphs: bool = True
    """On a GPU, replay the steps of a small model as CUDA graphs where that is faster; in one process."""
    accumulate: Count = 1
    """Micro-batches a batch is computed in, to save memory; the batch stays what it is."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass instead of keeping their activations: less memory, more time."""
    shard: bool = False
    """Shard weights and optimizer state over the processes (FSDP2): for ViT-Huge and beyond."""
    checkpoint_every: Annotated[Count | None, shown("one every ten minutes", "STEPS")] = None
    """Steps between checkpoints; the newest two are kept."""
    checkpoint_keep_every: Annotated[Count | None, shown("a tenth of the run if ten take little room", "STEPS")] = None
    """Steps between checkpoints that are kept for good."""
    log_to: tuple[Tracker, ...] = ("tensorboard",)
    """Where the numbers go beside metrics.jsonl, tensorboard, wandb, mlflow or several; no name: nowhere."""
    doctor: bool = True
    """Begin with the checks of 'mae doctor'."""
    rgb: Annotated[
        tuple[str, ...], shown("red green blue, R G B or B04 B03 B02 where they are so named", "CHANNEL ...")
    ] = ()
    """Names of the channels shown as red, green and blue, or of one shown as grey."""


GROUPS: Mapping[str, type[_Group]] = {
    "data": DataConfig,
    "optim": OptimConfig,
    "evaluation": EvalConfig,
    "machine": MachineConfig,
}
"""The groups of a run's options, by the field of `RunConfig` that holds them."""
CHANGEABLE = (EvalConfig, MachineConfig)
"""What a resumed run may change."""

_GROUP_OF = {each.name: name for name, group in GROUPS.items() for each in fields(group)}


_NO_MODEL = f"the run's config.json describes no whole model under 'method'; expected {', '.join(SLOTS)}"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pre-training run.

    Attributes:
        source: images: a folder, a list file, a .zip, a pack or its URL, tars, or a name, see `mae pretrain --help`.
        recipe: where the defaults come from.
        model: a name of `mae list models`; None: chosen by image size and device.
        init_from: weights to begin with; None: fresh ones.
        method: the model in full, or, before that is decided, what was said of it, by flat name.
        data: see `DataConfig`.
        optim: see `OptimConfig`.
        evaluation: see `EvalConfig`.
        machine: see `MachineConfig`.

    Raises:
        UsageError: values that contradict each other.
    """

    source: str = ""
    recipe: str = "default"
    model: str | None = None
    init_from: str | None = None
    method: MethodConfig | Mapping[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        for name in _TOP:
            value = getattr(self, name)
            records.check_text(value, name=name if name == "source" else as_flag(name))
            if not isinstance(value, str | None):
                raise UsageError(f"{name} is {records.shown(value)}; expected text")
        for name in ("source", "init_from"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, concealed(given))
        if not isinstance(self.method, MethodConfig):
            object.__setattr__(self, "method", checked_options(self.method, others=(*_TOP, *_GROUP_OF)))

    @property
    def resolved(self) -> MethodConfig:
        """The model.

        Raises:
            UsageError: it is not decided yet.
        """
        if not isinstance(self.method, MethodConfig):
            raise UsageError(_NO_MODEL)
        return self.method

    @classmethod
    def of(cls, **options: Any) -> "RunConfig":
        """A run from options by their flat names, as on the command line.

        Raises:
            UsageError: an unknown option (the nearest known is named), a value of another type or out of range.
        """
        return cls().override(options)

    def flat(self) -> dict[str, Any]:
        """Every option under its flat name; of a model that is not decided what was said of it."""
        groups = {name: getattr(getattr(self, group), name) for name, group in _GROUP_OF.items()}
        method = self.method.flat() if isinstance(self.method, MethodConfig) else flat_defaults(self.method)
        return {**{name: getattr(self, name) for name in _TOP}, **method, **groups}

    def override(self, changes: Mapping[str, Any]) -> "RunConfig":
        """The same run with some options changed, by flat name.

        Raises:
            UsageError: see `of`.
        """
        room = self.make_room(changes)
        changed: dict[str, Any] = {name: changes[name] for name in _TOP if name in changes}
        for group in GROUPS:
            if given := {name: value for name, value in changes.items() if _GROUP_OF.get(name) == group}:
                changed[group] = replace(getattr(room, group), **given)
        if method := {name: value for name, value in changes.items() if name not in (*_TOP, *_GROUP_OF)}:
            own = room.method
            changed["method"] = own.override(method) if isinstance(own, MethodConfig) else {**own, **method}
        return replace(room, **changed)

    def make_room(self, given: Collection[str]) -> "RunConfig":
        """The same run without its own word on what `given` options replace: steps for epochs, a rate for another."""
        room: dict[str, Any] = {}
        for one, other in (("epochs", "steps"), ("steps", "epochs"), ("lr", "base_lr"), ("base_lr", "lr")):
            if one in given and other not in given:
                room[other] = None
        return replace(self, optim=replace(self.optim, **room))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one object a group."""
        return {
            **{name: getattr(self, name) for name in _TOP},
            "method": self.method.to_json() if isinstance(self.method, MethodConfig) else _plain(self.method),
            **{group: records.to_json(getattr(self, group)) for group in GROUPS},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, as_options: bool = False) -> "RunConfig":
        """The inverse of `to_json`; options that are not there keep their default.

        Args:
            values: JSON values.
            as_options: leave the model, which must be there, as options by flat name; no PyTorch is then imported.

        Raises:
            UsageError: an unknown key (the nearest known is named), a value of another type or out of range.
        """
        records.check_known(values, [each.name for each in fields(cls)], what="group of options")
        found = {name: values[name] for name in _TOP if name in values}
        for group, kind in GROUPS.items():
            if group in values:
                found[group] = records.from_json(kind, _object(values, group), what="option")
        method: Any = _object(values, "method") if "method" in values else {}
        if set(SLOTS) <= set(method):
            method = flat_json(method) if as_options else MethodConfig.from_json(method)
        elif as_options:
            raise UsageError(_NO_MODEL)
        return cls(**found, method=method)

    @classmethod
    def read(cls, path: Path, *, as_options: bool = False) -> "RunConfig":
        """The configuration in a `config.json`; see `from_json`.

        Raises:
            UsageError: no such file, not JSON, or values that `from_json` refuses.
        """
        values = records.read_json(path)
        try:
            return cls.from_json(values, as_options=as_options)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(values[name], Mapping):
        raise UsageError(f"{name} is {records.shown(values[name])}; expected an object")
    return values[name]


def _plain(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as JSON, components among them."""
    from mae.core.component import to_json

    return {
        name: to_json(value) if name in SLOTS and hasattr(value, "kind") else value for name, value in overrides.items()
    }


def is_changeable(name: str) -> bool:
    """Whether a resumed run may change an option."""
    return name in _GROUP_OF and GROUPS[_GROUP_OF[name]] in CHANGEABLE


def as_flag(name: str) -> str:
    """An option's flag."""
    return "--" + name.replace("_", "-")


def as_flags(name: str, value: Any) -> list[str]:
    """An option as it is typed.

    Args:
        name: flat name of an option of a run, or of another one.
        value: as the field has it, or as JSON has it.
    """
    if isinstance(value, bool):
        return [as_flag(name) if value else as_flag(f"no_{name}")]
    if isinstance(value, tuple | list):
        joint = {"img_size": "x", "patch_size": "x", "channels": ","}.get(name)
        return [as_flag(name), *(map(str, value) if joint is None else [joint.join(map(str, value))])]
    whole = isinstance(value, float) and value.is_integer()
    return [as_flag(name), str(int(value) if whole else value)]


def parse_size(text: str) -> tuple[int, int]:
    """`96` as (96, 96) and `96x128` as (96, 128): height, then width.

    Raises:
        ValueError: anything else.
    """
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) > 2 or min(sides) < 1:
        raise ValueError(f"{text!r} is no size")
    return sides[0], sides[-1]


_SIZE = tyro.constructors.PrimitiveConstructorSpec[tuple[int, int]](
    nargs=1,
    metavar="SIDE|HxW",
    instance_from_str=lambda texts: parse_size(texts[0]),
    is_instance=lambda value: isinstance(value, tuple) and len(value) == 2,
    str_from_instance=lambda size: ["x".join(map(str, size))],
)
Size = Annotated[tuple[int, int], _SIZE]

_NAMES = tyro.constructors.PrimitiveConstructorSpec[tuple[str, ...]](
    nargs=1,
    metavar="NAME,NAME",
    instance_from_str=lambda texts: tuple(name.strip() for name in texts[0].split(",")),
    is_instance=lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
    str_from_instance=lambda names: [",".join(names)],
)
Names = Annotated[tuple[str, ...], _NAMES]
