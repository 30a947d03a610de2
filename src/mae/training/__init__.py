"""The engine: it trains any module whose output has `.loss` and `.terms`, and knows nothing of images."""
