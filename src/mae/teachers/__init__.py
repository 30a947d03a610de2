"""Networks that are not trained by gradients and whose outputs are targets: one a file."""

KINDS = {"ema": "ema.EmaTeacher"}
