"""The checker of shapes and types in signatures while testing."""

from beartype import BeartypeConf, beartype

# As everywhere in Python, a whole number passes where a float is expected.
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
