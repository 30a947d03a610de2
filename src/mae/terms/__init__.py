"""What can be added to the loss: one term a file."""

KINDS = {
    "laplacian": "laplacian.LaplacianError",
    "focal_frequency": "focal_frequency.FocalFrequencyError",
    "uniformity": "uniformity.Uniformity",
    "sigreg": "sigreg.SIGReg",
    "visreg": "visreg.VISReg",
    "infonce": "infonce.InfoNCE",
    "vicreg": "vicreg.VICReg",
    "difficulty": "difficulty.Difficulty",
    "code_prediction": "code_prediction.CodePrediction",
}
