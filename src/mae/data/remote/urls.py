"""What tells kinds of sources apart by their names; nothing here takes long to import."""

import re

MANIFEST = "pack.json"
"""The file that lists the others of a store, with their checksums."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")


def is_url(spec: str) -> bool:
    """Whether a source name is a URL, of whatever protocol."""
    return SCHEME.match(spec) is not None
