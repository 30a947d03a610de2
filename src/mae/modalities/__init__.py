"""What is special about each kind of data: one folder a modality."""

KINDS = {"image": "images.tokenizer.ImagePatches"}
