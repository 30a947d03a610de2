"""Open any supported model: one of this package, public weights, or a file that another library wrote."""

from dataclasses import dataclass, replace
from pathlib import Path

from mae.errors import MAEError, UsageError
from mae.interop.adapt import Stem, resized, with_channels
from mae.interop.imports.catalogue import find_public
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.libraries import library_folder, named_in_library
from mae.interop.imports.load import load_external
from mae.interop.imports.public import open_public
from mae.models.file import is_own, load_with_report, model_metadata, save_model
from mae.models.fingerprint import output_fingerprint
from mae.models.load_report import LoadReport
from mae.models.pretrained import PretrainedEncoder
from mae.records import check_new
from mae.training.run_folder import RunFolder, find_weights


@dataclass(frozen=True, kw_only=True)
class ImportOverrides:
    """What to change in an imported model; None keeps what it has.

    Attributes:
        img_size: height and width of its images, see `resized`.
        in_chans: channels of its images, see `with_channels`.
        stem: how the weights of new channels are made.
        mean: per-channel mean of its images, values in [0, 1].
        std: per-channel std, likewise.
        licence: of its weights.
    """

    img_size: tuple[int, int] | None = None
    in_chans: int | None = None
    stem: Stem | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    licence: str | None = None


def open_model(
    path: Path, *, metadata: WeightMetadata | None = None, allow_partial: float | None = None, photo_check: bool = True
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model of a run, a file of this package, or weights from another library; on the CPU, in evaluation mode.

    Args:
        path: a run folder, a checkpoint, a file, or a folder that `save_pretrained` or timm wrote; if nothing exists
            there, a name of public weights such as `official/base`, `timm:NAME` or `hf:NAME`, which are then
            downloaded.
        metadata: see `load_external`; must be None or empty for a model of this package, whose file has it all.
        allow_partial: sufficient share of the encoder's values.
        photo_check: see `load_external`.

    Raises:
        UsageError: no known model there, or metadata that must be given.
        MAEError: a damaged or altered file.
    """
    if not path.exists() and (weights := find_public(path.as_posix())) is not None:
        return open_public(
            weights, metadata=metadata or WeightMetadata(), allow_partial=allow_partial, photo_check=photo_check
        )
    if (named := named_in_library(path)) is not None:
        with library_folder(*named) as folder:
            model, report = load_external(
                folder, metadata=metadata, allow_partial=allow_partial, photo_check=photo_check
            )
        return model, replace(report, origin={**report.origin, "imported_from": str(path)})
    own = _own_weights(path)
    if own is None:
        try:
            return load_external(path, metadata=metadata, allow_partial=allow_partial, photo_check=photo_check)
        except (MAEError, UsageError) as error:
            if metadata is None and " --" in str(error):  # only 'mae import' has these options
                raise type(error)(f"{error} ('mae import' takes these options)") from error
            raise
    if metadata is not None and metadata != WeightMetadata():
        raise UsageError(
            f"{path} is a model of this package and carries its own metadata; leave out the options that describe it"
        )
    return load_with_report(own, allow_partial=allow_partial)


def _own_weights(path: Path) -> Path | None:
    """The file of a model of this package; None if `path` holds another kind."""
    try:
        weights = find_weights(path)
    except UsageError:
        if RunFolder(path).checkpoints.is_dir() or not path.exists():
            raise
        return None
    return weights if is_own(weights) else None


def import_model(
    path: Path,
    out: Path,
    *,
    overrides: ImportOverrides,
    metadata: WeightMetadata,
    allow_partial: float | None,
    photo_check: bool,
) -> tuple[PretrainedEncoder, LoadReport]:
    """Write any supported model as a file of this package, and load it again.

    Args:
        path: see `open_model`.
        out: a new file that ends in `.safetensors`, or a new folder, which gets `model.safetensors`.
        overrides: what to change in the model.
        metadata: see `load_external`.
        allow_partial: see `open_model`.
        photo_check: see `load_external`.

    Returns:
        The model as loaded from `out`, and what was loaded from `path`.

    Raises:
        UsageError: see `open_model`; `out` exists, or overrides that cannot be applied.
        MAEError: see `open_model`; `out` cannot be written.
    """
    target = out if out.suffix == ".safetensors" else out / "model.safetensors"
    is_new = not out.exists()
    is_free = is_new or (out != target and out.is_dir() and not any(out.iterdir()))
    if not is_free:  # in the folder of a run it would hide the run's weights
        check_new(out)
    if (overrides.mean is None) != (overrides.std is None):
        raise UsageError("--mean and --std go together; give both, or neither")
    if overrides.in_chans is None:  # otherwise the given statistics are those of the new channels
        metadata = replace(metadata, mean=overrides.mean, std=overrides.std)
    model, report = open_model(path, metadata=metadata, allow_partial=allow_partial, photo_check=photo_check)
    model, notes = _overridden(model, overrides)
    report = replace(report, notes=(*report.notes, *notes))
    header = model_metadata(
        model,
        licence=overrides.licence or report.origin.get("licence"),
        origin={name: value for name, value in report.origin.items() if name not in ("licence", "versions")},
        probe=output_fingerprint(model),
    )
    save_model(model, target, header)
    try:
        return load_with_report(target)[0], report
    except MAEError:
        target.unlink()
        if is_new and out != target:
            out.rmdir()
        raise


def _overridden(model: PretrainedEncoder, overrides: ImportOverrides) -> tuple[PretrainedEncoder, list[str]]:
    notes = []
    assert model.config is not None
    if (overrides.in_chans is None) != (overrides.stem is None):
        raise UsageError(
            f"--in-chans and --stem go together: --stem (mean or repeat) says how the weights of "
            f"{model.config.layout.channels} channels become those of --in-chans"
        )
    if overrides.in_chans is not None and overrides.stem is not None:
        model, note = with_channels(model, overrides.in_chans, overrides.stem, mean=overrides.mean, std=overrides.std)
        notes.append(note)
    if overrides.img_size is not None:
        model, note = resized(model, overrides.img_size)
        notes.append(note)
    return model, notes
