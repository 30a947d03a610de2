"""What is wrong with a dataset: findings, duplicates."""
