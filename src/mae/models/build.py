"""A configuration made into modules, with fresh weights."""

from typing import Any

from mae.core.method import MethodConfig
from mae.losses.reconstruction import KnownValues
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder


def build_encoder(config: MethodConfig, **options: Any) -> Any:
    """The encoder of a configuration, with fresh weights from PyTorch's global generator.

    Args:
        config: the model the encoder belongs to.
        options: of the encoder's `build`, such as `drop_path` and `activation_checkpointing`.

    Raises:
        UsageError: values that do not fit each other.
    """
    return config.encoder.build(config.tokenizer, **options)


def build_model(config: MethodConfig, *, activation_checkpointing: bool = False) -> MaskedAutoencoder:
    """The masked autoencoder of a configuration, with fresh weights from PyTorch's global generator.

    Args:
        config: the model.
        activation_checkpointing: whether blocks are computed again in the backward pass instead of kept.

    Raises:
        UsageError: values that do not fit each other.
    """
    outputs = sum(config.outputs.values())  # refuses what does not fit before anything is made
    encoder = build_encoder(config, activation_checkpointing=activation_checkpointing)
    if config.adapter is not None:
        config.adapter.apply(encoder)
    decoder = config.decoder.build(
        encoder=encoder,
        layout=config.layout,
        num_outputs=outputs,
        activation_checkpointing=activation_checkpointing,
    )
    passes_over_gaps = config.tokenizer.nodata is None or config.loss.reads_classes
    return MaskedAutoencoder(
        tokenizer=config.tokenizer,
        encoder=encoder,
        decoder=decoder,
        masking=config.mask,
        target=config.target,
        loss=config.loss if passes_over_gaps else KnownValues(loss=config.loss),
        terms=config.terms,
        reads_levels=config.decoder.reads == "levels",
        teacher=config.teacher,
        config=config,
    )


def build_pretrained_encoder(config: MethodConfig) -> PretrainedEncoder:
    """The encoder of a configuration alone, with fresh weights from PyTorch's global generator.

    Raises:
        UsageError: values that do not fit each other.
    """
    return PretrainedEncoder(encoder=build_encoder(config), config=config)
