"""What the decoder must predict: one target a file."""

KINDS = {
    "pixels": "pixels.PixelTarget",
    "low_pass": "low_pass.LowPassTarget",
    "hog": "hog.HogTarget",
    "features": "features.FeatureTarget",
    "codes": "codes.CodeTarget",
    "random_projection": "random_projection.RandomProjectionTarget",
}
