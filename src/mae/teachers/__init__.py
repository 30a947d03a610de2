"""Networks that are not trained by gradients and whose outputs are targets: one a file."""

KINDS = {"ema": "ema.EmaTeacher", "frozen": "frozen.FrozenTeacher", "codebook": "codebook.CodebookTeacher"}

NO_SOURCE = (
    "this teacher is a network trained elsewhere, and --teacher-source names none; give a run, a file, timm:NAME or "
    "hf:NAME"
)
