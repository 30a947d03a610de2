"""Load public weights: downloaded once, verified, with the metadata that their files lack."""

from dataclasses import asdict, replace

from mae.data.remote.cache import user_cache
from mae.data.remote.download import Announced, download
from mae.interop.imports.catalogue import MODELS, PublicWeights
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.interop.imports.sidecar import IMAGENET_MEAN, IMAGENET_STD, merged
from mae.models.load_report import LoadReport
from mae.models.presets import model_config
from mae.models.pretrained import PretrainedEncoder


def open_public(
    weights: PublicWeights, *, metadata: WeightMetadata, allow_partial: float | None, photo_check: bool
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model in a file of public weights, from the cache or the network, and what was loaded.

    Args:
        weights: the entry of the catalogue.
        metadata: takes precedence over the catalogue; see `load_external`.
        allow_partial: sufficient share of the encoder's values.
        photo_check: see `load_external`.

    Raises:
        UsageError: the cache cannot be used, or network packages are missing.
        MAEError: the download failed, is another file, or cannot be written; see also `load_external`.
    """
    announced = Announced(
        name=weights.name,
        url=weights.url,
        num_bytes=weights.num_bytes,
        most_bytes=weights.most_bytes,
        sha256=weights.sha256,
        md5=weights.md5,
        otherwise=f"download it by other means and import the file as 'mae list weights {weights.name}' says",
    )
    path, sha256 = download(announced, user_cache())
    model, report = load_external(
        path,
        metadata=merged(published_metadata(weights), metadata),
        allow_partial=allow_partial,
        photo_check=photo_check,
    )
    # The cache names a file by its checksum.
    source = f"{weights.name}, {weights.url}, SHA-256 {report.origin['imported_from']}"
    compared = f"matches {weights.checksum}" if weights.checksum_source else "not verified: no checksum is published"
    return model, replace(
        report,
        origin={**report.origin, "imported_from": source, "licence": weights.licence},
        notes=(*report.notes, f"SHA-256 {sha256}, {compared}", f"licence according to {weights.licence_source}"),
    )


def import_options(weights: PublicWeights) -> list[str]:
    """The options of `mae import FILE` that import a downloaded file as its name would."""
    words = ["--licence", weights.licence]
    for name, value in asdict(published_metadata(weights)).items():
        if value is not None and not (name == "decoder_num_heads" and weights.contents != "encoder and decoder"):
            values = value if isinstance(value, tuple) else (value,)
            shown = "x".join(map(str, values)) if name == "trained_size" else " ".join(map(str, values))
            words += [f"--{name.replace('_', '-')}", *shown.split()]
    return words


def published_metadata(weights: PublicWeights) -> WeightMetadata:
    """What is known about public weights and missing from their files."""
    config = model_config(MODELS[weights.size])
    return WeightMetadata(
        num_heads=config.encoder.num_heads,
        decoder_num_heads=config.decoder.num_heads,
        trained_size=config.tokenizer.img_size,
        norm_pix_loss=weights.norm_pix_loss,
        norm_eps=weights.norm_eps,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
