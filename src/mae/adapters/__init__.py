"""What of an encoder is trained, where it begins with weights that are worth keeping: one way a file."""

KINDS = {"lora": "lora.LoraAdapter"}
