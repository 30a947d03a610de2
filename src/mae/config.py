"""One frozen record of everything a pre-training run is told; to and from JSON.

Fields that are None are chosen to suit the source and the machine when the run starts; the run folder's
`config.json` holds what was chosen, so the run can be repeated from that file alone. No PyTorch here: the
command line reads this to print its help.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mae import records
from mae.credentials import concealed
from mae.errors import UsageError
from mae.models.config import Decoder, Loss, UniformityForm, pair
from mae.options import shown


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


Precision = Literal["auto", "bf16", "fp16", "fp32"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Optimizer = Literal["adamw", "muon"]
Statistics = Literal["data", "imagenet", "model"]

# What a resumed run may change: where and how fast it computes and what is looked at, not what is learned.
MACHINE_FIELDS = frozenset(
    {
        "out",
        "data_root",
        "device",
        "resident",
        "workers",
        "compile",
        "shard",
        "recompute",
        "accumulate",
        "save_every",
        "keep_every",
        "monitor",
        "monitor_every",
        "skip_doctor",
    }
)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A pre-training run.

    Raises:
        UsageError: values that contradict each other.
    """

    source: Annotated[str, tyro.conf.Positional] = ""
    """Images: a folder, a list file, a .zip, a pack ('mae pack') or its URL, tars, hf:NAME, hf-stream:NAME,
    builtin:photos, builtin:digits, cifar10, stl10 or imagenet."""
    recipe: str = "default"
    """Where the defaults come from: a name of 'mae list recipes', or a run's config.json."""
    out: Annotated[Path | None, shown("a new one under runs/", "DIR")] = None
    """Run folder."""
    data_root: Path = Path("data")
    """Where sets known by name are kept."""

    model: Annotated[str | None, shown("by image size and device", "NAME")] = None
    """A name of 'mae list models'."""
    init_from: Annotated[str | None, shown("fresh weights", "MODEL")] = None
    """Weights to begin with, which say sizes, target and statistics: a run, a checkpoint, a file, or others' folder."""
    img_size: Annotated[Size | None, shown("the model's", "SIDE|HxW")] = None
    """Height and width the images are cropped to."""
    patch_size: Annotated[Size | None, shown("the model's", "SIDE|HxW")] = None
    """Height and width of a patch."""
    in_chans: Annotated[int | None, shown("the data's", "C")] = None
    """Channels."""
    channels: Annotated[Names | None, shown("all", "NAME,NAME")] = None
    """Which channels by name, in order; where nothing names them, what they are called."""
    no_data: Annotated[str | None, shown("none", "VALUE|nan")] = None
    """Value that stands for no measurement: left out of statistics and loss."""
    mask_ratio: float = 0.75
    """Share of patches hidden; with a schedule, where it ends."""
    mask_schedule: Literal["const", "linear", "cosine", "random"] = "const"
    """How that share changes: not, from --mask-start in a line or half a wave, or drawn between the two each batch."""
    mask_start: float = 0.5
    """Share of patches hidden at the start of a schedule."""
    mask_warmup: float = 5.0
    """Passes over the images until linear and cosine end."""
    norm_pix_loss: bool = True
    """Predict patches standardised one by one: better features. Off: pictures need no help."""
    low_pass: Annotated[float | None, shown("all of them", "SHARE")] = None
    """Predict only frequencies up to this share of what a side can hold."""
    loss: Loss = "mse"
    """Distance of prediction and target."""
    laplacian: float = 0.0
    """Weight of the Laplacian's error over hidden pixels: fine detail. 0: without."""
    laplacian_raw: bool = False
    """Let that term read predictions for visible patches too, instead of their true pixels."""
    uniformity: float = 0.0
    """Weight of a term that spreads the images' features. 0: without."""
    uniformity_form: UniformityForm = "gaussian"
    """gaussian: after Wang and Isola. squared_cosine: U-MAE's."""
    focal_frequency: float = 0.0
    """Weight of the focal frequency loss. 0: without."""
    mlp_ratio: Annotated[float | None, shown("the model's", "RATIO")] = None
    """Hidden width of the MLPs over the token width."""
    decoder: Decoder = "self"
    """self: as in the paper. cross: hidden patches look at visible ones alone, which is faster."""
    predict_share: float = 1.0
    """Share of the hidden patches that are predicted; with --decoder cross the others cost nothing."""
    decoder_depth: Annotated[int | None, shown("the model's", "BLOCKS")] = None
    """Blocks of the decoder."""
    cls_token: Annotated[bool | None, shown("the model's", "{True,False}")] = None
    """Whether a class token leads the sequence."""
    pos_embed: Annotated[Literal["sincos2d", "learned"] | None, shown("the model's", "{sincos2d,learned}")] = None
    """Fixed or trained positions."""

    epochs: Annotated[float | None, shown("100, unless --steps is given", "E")] = None
    """Passes over the images."""
    steps: Annotated[int | None, shown("from --epochs", "S")] = None
    """Optimizer steps, instead of --epochs."""
    batch_size: Annotated[int | None, shown("64 on a CPU, 256 on a GPU, fewer for fewer images", "B")] = None
    """Images per optimizer step, over all processes and --accumulate parts."""
    accumulate: int = 1
    """Parts a batch is computed in, to save memory; the batch stays what it is."""
    views: int = 1
    """Crops made of an image whenever it is decoded; an epoch then has as many times the steps."""
    lr: Annotated[float | None, shown("from --base-lr", "RATE")] = None
    """Peak learning rate, as it is."""
    base_lr: float | None = None
    """Peak learning rate for a batch of 256; scaled with the batch."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    optimizer: Optimizer = "adamw"
    """muon: matrices inside blocks move in orthogonal steps, the rest by AdamW."""
    weight_decay: float = 0.05
    """Weight decay, not on biases and norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of its two averages."""
    warmup_epochs: Annotated[float | None, shown("a tenth of the run", "E")] = None
    """Passes over which the rate rises from 0."""
    clip_grad: float | None = 1.0
    """Largest norm of the gradient; None: no clipping."""

    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Area of the smallest and of the largest crop, as shares of the image's."""
    statistics: Statistics = "data"
    """Channel means and deviations: measured on the data, ImageNet's, or those of --init-from."""
    held_out: float = 0.02
    """Share of the images, 2,000 at most, that are never trained on: their loss tells when a model overfits."""
    max_unreadable: float = 0.001
    """Share of unreadable images above which the run stops."""

    monitor: Annotated[str | None, shown("label-free numbers alone", "LABELLED")] = None
    """Labelled images to watch k-NN and a probe on as the run goes; they are looked at, never trained on."""
    monitor_every: Annotated[float | None, shown("an eighth of the run, more in a short one", "E")] = None
    """Passes over the images between two looks at the features."""

    skip_doctor: bool = False
    """Begin without the checks of 'mae doctor'."""
    precision: Precision = "auto"
    """auto: bf16 where the device has it, fp32 elsewhere."""
    device: Device = "auto"
    """auto: CUDA, else Apple's MPS, else the CPU."""
    compile: bool = False
    """Compile the model with torch.compile."""
    shard: bool = False
    """Divide weights and averages among the processes (FSDP2): for ViT-Huge and beyond."""
    recompute: bool = False
    """Compute blocks again in the backward pass instead of keeping what they computed: less memory, more time."""
    resident: bool = False
    """Hold all images on the device and crop them there: for small sets of images of one size."""
    workers: Annotated[int | None, shown("by device and data", "W")] = None
    """Processes that load images."""
    seed: int = 0
    """Decides weights, order, crops and masks."""
    save_every: Annotated[int | None, shown("one every ten minutes", "STEPS")] = None
    """Steps between checkpoints; the newest two are kept."""
    keep_every: Annotated[int | None, shown("none", "STEPS")] = None
    """Steps between checkpoints that are kept for good."""

    def __post_init__(self) -> None:
        for name in ("source", "recipe", "out", "data_root", "monitor", "init_from"):
            records.check_text(getattr(self, name), name=name if name == "source" else _flag(name))
        for name in ("source", "monitor", "init_from"):
            if (told := getattr(self, name)) is not None:
                object.__setattr__(self, name, concealed(told))
        if self.epochs is not None and self.steps is not None:
            raise UsageError("both --epochs and --steps are given; give one of them")
        if self.lr is not None and self.base_lr is not None:
            raise UsageError(
                "both --lr and --base-lr are given; --lr is the rate itself, --base-lr is scaled by batch / 256: "
                "give one of them"
            )
        if self.channels is not None and not (all(self.channels) and len(set(self.channels)) == len(self.channels)):
            raise UsageError(f"--channels is {','.join(self.channels)}; expected different names, a comma between two")
        if self.channels is not None and self.in_chans not in (None, len(self.channels)):
            raise UsageError(
                f"--in-chans is {self.in_chans}, and --channels names {len(self.channels)}; leave the former out"
            )
        if self.no_data is not None:
            records.check_no_data(self.no_data, name="--no-data")
        self._check_ranges()

    def _check_ranges(self) -> None:
        above_0 = (
            "epochs",
            "steps",
            "batch_size",
            "accumulate",
            "views",
            "lr",
            "base_lr",
            "save_every",
            "keep_every",
            "in_chans",
            "decoder_depth",
            "clip_grad",
            "monitor_every",
        )
        rules: list[tuple[tuple[str, ...], str, Callable[[Any], bool]]] = [
            (above_0, "a finite number above 0", lambda value: 0 < value < inf),
            (
                ("min_lr", "weight_decay", "warmup_epochs", "mask_warmup", "workers"),
                "0 or more",
                lambda value: 0 <= value < inf,
            ),
            (("seed",), "a whole number from 0 to below 2 to the power of 63", lambda value: 0 <= value < 1 << 63),
            (("laplacian", "uniformity", "focal_frequency"), "a weight of 0 or more", lambda value: 0 <= value < inf),
            (("low_pass", "predict_share"), "a share above 0 and at most 1", lambda value: 0 < value <= 1),
            (("mask_ratio", "mask_start"), "a share between 0 and 1, both excluded", lambda value: 0 < value < 1),
            (("held_out",), "a share from 0 to 0.5", lambda value: 0 <= value <= 0.5),
            (("max_unreadable",), "a share from 0 to below 1", lambda value: 0 <= value < 1),
            (
                ("crop_scale",),
                "two shares above 0 and at most 1, the smaller one first",
                lambda value: 0 < value[0] <= value[1] <= 1,
            ),
            (("betas",), "two numbers from 0 to below 1", lambda value: all(0 <= beta < 1 for beta in value)),
        ]
        for names, expected, holds in rules:
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise UsageError(f"{_flag(name)} is {value}; expected {expected}")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one key a field."""
        return records.to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PretrainConfig":
        """The inverse of `to_json`; fields that are not there keep their default.

        Raises:
            UsageError: an unknown key (the nearest known is named), a value of the wrong kind or out of range.
        """
        return records.from_json(cls, values, what="option")

    def make_room(self, given: Collection[str]) -> "PretrainConfig":
        """The same run without its own word on what `given` options replace: steps for epochs, a rate for another."""
        room: dict[str, Any] = {}
        for one, other in (("epochs", "steps"), ("steps", "epochs"), ("lr", "base_lr"), ("base_lr", "lr")):
            if one in given and other not in given:
                room[other] = None
        return replace(self, **room)

    def override(self, changes: Mapping[str, Any]) -> "PretrainConfig":
        """The same run with some options changed; values may be those of `from_json`.

        Raises:
            UsageError: see `from_json`.
        """
        sizes = {
            name: pair(changes[name]) for name in ("img_size", "patch_size") if isinstance(changes.get(name), Integral)
        }
        return PretrainConfig.from_json({**self.make_room(changes).to_json(), **changes, **sizes})

    @classmethod
    def read(cls, path: Path) -> "PretrainConfig":
        """The configuration in a `config.json`.

        Raises:
            UsageError: no such file, not JSON, or values that `from_json` refuses.
        """
        return records.read_record(cls, path, what="option")


def as_flags(name: str, value: Any) -> list[str]:
    """An option as it is typed.

    Args:
        name: of a field of `PretrainConfig`, or of another option.
        value: as the field has it, or as JSON has it.
    """
    if isinstance(value, bool) and getattr(PretrainConfig, name, False) is not None:
        return [_flag(name) if value else _flag(f"no_{name}")]  # one that may be None is typed with its value
    if isinstance(value, tuple | list):
        joint = {"img_size": "x", "patch_size": "x", "channels": ","}.get(name)
        return [_flag(name), *(map(str, value) if joint is None else [joint.join(map(str, value))])]
    whole = isinstance(value, float) and value.is_integer()
    return [_flag(name), str(int(value) if whole else value)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
