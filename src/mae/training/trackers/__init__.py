"""Where the numbers of a run go beside its `metrics.jsonl`: one small file a tracker, chosen by name."""
