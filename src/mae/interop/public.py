"""Public weights as models: fetched once, checked, and told what their files do not say."""

from dataclasses import asdict, replace

from mae.data.cache import user_cache
from mae.data.downloads import Announced, download
from mae.interop.catalogue import MODELS, PublicWeights
from mae.interop.hints import IMAGENET_MEAN, IMAGENET_STD, overridden
from mae.interop.load import load_foreign
from mae.interop.official import Told
from mae.models.pretrained import PretrainedEncoder
from mae.models.storage import LoadReport
from mae.models.zoo import model_config


def open_public(
    weights: PublicWeights, *, told: Told, allow_partial: float | None, see_photographs: bool
) -> tuple[PretrainedEncoder, LoadReport]:
    """The model in a file of public weights, from the cache or the network, and what was loaded.

    Args:
        weights: which.
        told: what counts before the catalogue's word; see `load_foreign`.
        allow_partial: share of the encoder's values that is enough.
        see_photographs: see `load_foreign`.

    Raises:
        UsageError: the cache cannot be used, or packages for the network are missing.
        MAEError: it did not come, is another file, or cannot be written; see `load_foreign` too.
    """
    announced = Announced(
        name=weights.name,
        url=weights.url,
        num_bytes=weights.num_bytes,
        most_bytes=weights.most_bytes,
        sha256=weights.sha256,
        md5=weights.md5,
        otherwise=f"fetch it elsewhere, and import the file as 'mae list weights {weights.name}' says",
    )
    path, sha256 = download(announced, user_cache())
    model, report = load_foreign(
        path,
        told=overridden(told_of(weights), told),
        allow_partial=allow_partial,
        see_photographs=see_photographs,
    )
    # In the cache a file is called by its checksum.
    source = f"{weights.name}, {weights.url}, SHA-256 {report.origin['imported_from']}"
    compared = (
        f"compared with {weights.checksum}" if weights.checksum_told else "compared with nothing: none is published"
    )
    return model, replace(
        report,
        origin={**report.origin, "imported_from": source, "licence": weights.licence},
        notes=(*report.notes, f"SHA-256 {sha256}, {compared}", f"licence by {weights.licence_told}"),
    )


def words_for_file(weights: PublicWeights) -> list[str]:
    """What must be typed after `mae import FILE` to import such a file as its name would."""
    words = ["--licence", weights.licence]
    for name, value in asdict(told_of(weights)).items():
        if value is not None and not (name == "decoder_num_heads" and weights.contents != "encoder and decoder"):
            values = value if isinstance(value, tuple) else (value,)
            shown = "x".join(map(str, values)) if name == "trained_size" else " ".join(map(str, values))
            words += [f"--{name.replace('_', '-')}", *shown.split()]
    return words


def told_of(weights: PublicWeights) -> Told:
    """What is known of public weights and their files do not say."""
    config = model_config(MODELS[weights.size])
    return Told(
        num_heads=config.num_heads,
        decoder_num_heads=config.decoder_num_heads,
        trained_size=config.img_size,
        norm_pix_loss=weights.norm_pix_loss,
        norm_eps=weights.norm_eps,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
