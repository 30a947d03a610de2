"""The distance of prediction and target."""

KINDS = {
    "mse": "reconstruction.MeanSquaredError",
    "l1": "reconstruction.MeanAbsoluteError",
    "smooth_l1": "reconstruction.SmoothL1",
    "cosine": "cosine.CosineDistance",
    "cross_entropy": "cross_entropy.CrossEntropy",
}
