"""The encoder, the decoder, the autoencoder made of them, and its named sizes."""
