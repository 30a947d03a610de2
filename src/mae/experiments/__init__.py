"""Studies made of runs: the same model trained in several arms, over several seeds, judged by the same protocols."""
