"""Any model there is a file of: one of this package, or of others."""

from dataclasses import dataclass, replace
from pathlib import Path

from mae.errors import MAEError, UsageError
from mae.interop.adapt import Stem, rechannelled, resized
from mae.interop.catalogue import find_public
from mae.interop.load import load_foreign
from mae.interop.official import Told
from mae.interop.public import open_public
from mae.models.pretrained import PretrainedEncoder
from mae.models.probe import probe_of
from mae.models.storage import LoadReport, is_own, load_with_report, model_metadata, save_model
from mae.training.run_folder import RunFolder, find_weights


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an imported model is to be, where that is another thing than it was.

    Attributes:
        img_size: height and width of its images, see `resized`; None: as it was.
        in_chans: channels of its images, see `rechannelled`; None: as it was.
        stem: the rule for new channels.
        mean: per-channel mean of its images, values in [0, 1]; None: what is told beside the weights.
        std: per-channel deviation, likewise.
        licence: the terms its weights come under; None: what is told beside them.
    """

    img_size: tuple[int, int] | None = None
    in_chans: int | None = None
    stem: Stem | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    licence: str | None = None


def open_model(
    path: Path, *, told: Told | None = None, allow_partial: float | None = None, see_photographs: bool = True
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model of a run, of a file of this package, or of weights that others wrote; on the CPU, in evaluation mode.

    Args:
        path: a run folder, a checkpoint, a file, or a folder that `save_pretrained` or timm wrote; where nothing is,
            a name of public weights such as `official/base`, which are fetched then.
        told: see `load_foreign`; nothing may be told of a model of this package, which says all by itself.
        allow_partial: share of the encoder's values that is enough.
        see_photographs: see `load_foreign`.

    Raises:
        UsageError: nothing there that is known, or something that nobody says.
        MAEError: damaged, or changed on its way.
    """
    if not path.exists() and (weights := find_public(path.as_posix())) is not None:
        return open_public(weights, told=told or Told(), allow_partial=allow_partial, see_photographs=see_photographs)
    own = _own_weights(path)
    if own is None:
        try:
            return load_foreign(path, told=told, allow_partial=allow_partial, see_photographs=see_photographs)
        except (MAEError, UsageError) as error:
            if told is None and " --" in str(error):  # nobody but 'mae import' has these options
                raise type(error)(f"{error} ('mae import' takes these options)") from error
            raise
    if told is not None and told != Told():
        raise UsageError(
            f"{path} is a model of this package, which says of itself what it is; nothing can be told of it"
        )
    return load_with_report(own, allow_partial=allow_partial)


def _own_weights(path: Path) -> Path | None:
    """The file of a model of this package; None where there is another one."""
    try:
        weights = find_weights(path)
    except UsageError:
        if RunFolder(path).checkpoints.is_dir() or not path.exists():
            raise
        return None
    return weights if is_own(weights) else None


def bring_in(
    path: Path, out: Path, *, wanted: Wanted, told: Told, allow_partial: float | None, see_photographs: bool
) -> tuple[PretrainedEncoder, LoadReport]:
    """Write any model as a file of this package, and read it again.

    Args:
        path: see `open_model`.
        out: a new file that ends in `.safetensors`, or a new folder, which gets `model.safetensors`.
        wanted: what is to be another than it was.
        told: see `load_foreign`.
        allow_partial: see `open_model`.
        see_photographs: see `load_foreign`.

    Returns:
        The model as read again, and what was loaded at first.

    Raises:
        UsageError: see `open_model`; `out` is there already, or what is wanted cannot be made.
        MAEError: see `open_model`; it could not be written.
    """
    target = out if out.suffix == ".safetensors" else out / "model.safetensors"
    is_new = not out.exists()
    is_free = is_new or (out != target and out.is_dir() and not any(out.iterdir()))
    if not is_free:  # in the folder of a run it would hide the run's weights
        raise UsageError(f"{out} is there already; give --out another name, or delete it first")
    if (wanted.mean is None) != (wanted.std is None):
        raise UsageError("--mean and --std go together; give both, or neither")
    if wanted.in_chans is None:  # else the statistics that are told are those of the new channels
        told = replace(told, mean=wanted.mean, std=wanted.std)
    model, report = open_model(path, told=told, allow_partial=allow_partial, see_photographs=see_photographs)
    model, notes = _as_wanted(model, wanted)
    report = replace(report, notes=(*report.notes, *notes))
    metadata = model_metadata(
        model,
        licence=wanted.licence or report.origin.get("licence"),
        origin={name: value for name, value in report.origin.items() if name not in ("licence", "versions")},
        probe=probe_of(model),
    )
    save_model(model, target, metadata)
    try:
        return load_with_report(target)[0], report
    except MAEError:
        target.unlink()
        if is_new and out != target:
            out.rmdir()
        raise


def _as_wanted(model: PretrainedEncoder, wanted: Wanted) -> tuple[PretrainedEncoder, list[str]]:
    notes = []
    assert model.config is not None
    if (wanted.in_chans is None) != (wanted.stem is None):
        raise UsageError(
            "--in-chans and --stem go together: the stem (mean or repeat) says what becomes of the weights of "
            f"{model.config.in_chans} channels"
        )
    if wanted.in_chans is not None and wanted.stem is not None:
        model, note = rechannelled(model, wanted.in_chans, wanted.stem, mean=wanted.mean, std=wanted.std)
        notes.append(note)
    if wanted.img_size is not None:
        model, note = resized(model, wanted.img_size)
        notes.append(note)
    return model, notes
