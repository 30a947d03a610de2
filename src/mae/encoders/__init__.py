"""From visible tokens to features: one encoder a file."""

KINDS = {"vit": "vit.ViT"}
