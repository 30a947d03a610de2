"""Speed on this machine: a step, loading and a whole run, against the machine's limits and peers, interleaved.

`timing` and `report` are shared with the scripts in benchmarks/.
"""
