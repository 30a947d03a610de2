"""What is looked at while a run goes."""
