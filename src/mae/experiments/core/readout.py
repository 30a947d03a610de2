"""The numbers that studies take from an evaluation's record."""

from mae.evaluation.common.record import Evaluation
from mae.evaluation.common.task import THIS_MODEL
from mae.experiments.core.metrics import NUM_NEIGHBOURS

_OURS, _TIMM, _HF = ("mean",), ("pooled", "cls", "mean"), ("cls", "pooled", "mean")


def read_numbers(record: Evaluation) -> dict[str, float]:
    """The numbers of one evaluation that studies compare, by metric; numbers that could not be measured are absent."""
    result = record.result
    numbers: dict[str, float | None]
    match record.protocol:
        case "knn" | "linear_probe":
            numbers = {record.protocol: _accuracy(record, THIS_MODEL)}
        case "finetune":
            numbers = {"finetune": result["top1"]}
        case "reconstruction":
            numbers = {name: result["model"][name] for name in ("mse", "psnr", "ssim", "laplacian")}
            if "with_true_statistics" in result:
                numbers["psnr_true_statistics"] = result["with_true_statistics"]["psnr"]
        case _:
            raise ValueError(f"studies read no number of {record.protocol}")
    return {name: value for name, value in numbers.items() if value is not None}


def read_baselines(record: Evaluation) -> dict[str, float]:
    """The baselines of one evaluation, by protocol and baseline: `knn, raw pixels`."""
    numbers: dict[str, float | None] = {}
    if record.protocol in ("knn", "linear_probe"):
        numbers = {
            f"{record.protocol}, {name}": _accuracy(record, name) for name in record.result if name != THIS_MODEL
        }
    if record.protocol == "reconstruction":
        numbers = {f"psnr, {name}": record.result[name]["psnr"] for name in ("mean_colour", "nearest_patch")}
    if record.majority is not None:
        numbers["accuracy, commonest class"] = record.majority
    return {name: value for name, value in numbers.items() if value is not None}


def preferred_features(model: str) -> tuple[str, ...]:
    """The features that k-NN and linear probe report, most preferred first; the first that the model has counts.

    Ours is the mean of the patch tokens; of another library's model that library's choice, such as a class token.
    """
    return _TIMM if model.startswith("timm:") else _HF if model.startswith("hf:") else _OURS


def _accuracy(record: Evaluation, name: str) -> float | None:
    """Top-1 of the preferred feature; None where there are fewer training images than neighbours."""
    features = record.result[name]
    feature = next((each for each in preferred_features(record.model) if each in features), next(iter(features)))
    score = features[feature][str(NUM_NEIGHBOURS)] if record.protocol == "knn" else features[feature]
    return None if score is None else score["top1"]
