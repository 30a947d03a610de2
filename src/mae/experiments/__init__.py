"""Studies: the same model trained in several variants, over several seeds, evaluated by the same protocols."""
