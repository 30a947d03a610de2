"""Which tokens are masked: one strategy a file."""

KINDS = {
    "random": "random.RandomMasking",
    "block": "block.BlockMasking",
    "inverse_block": "inverse_block.InverseBlockMasking",
    "grid": "grid.GridMasking",
    "regular": "regular.RegularMasking",
    "noise": "noise.NoiseMasking",
    "multi_block": "multi_block.MultiBlockMasking",
    "attention": "attention.AttentionMasking",
    "hard": "hard.HardMasking",
}
