"""Sizes of samples and of their patches, checked without PyTorch."""

from mae.errors import UsageError


def check_multiple(size: tuple[int, ...], patch: tuple[int, ...]) -> None:
    """Make sure that patches cover a sample.

    Raises:
        UsageError: a size that is not a positive multiple of the patch; the nearest ones are named.
    """
    pairs = list(zip(size, patch, strict=True))
    if any(side <= 0 or side % length != 0 for side, length in pairs):
        below = "x".join(str(max(1, side // length) * length) for side, length in pairs)
        above = "x".join(str(max(1, -(-side // length)) * length) for side, length in pairs)
        raise UsageError(
            f"image size {_by(size)} is not a multiple of the patch size {_by(patch)}; "
            f"nearest sizes that are: {below if below == above else f'{below} or {above}'}"
        )


def _by(lengths: tuple[int, ...]) -> str:
    return "x".join(map(str, lengths))
