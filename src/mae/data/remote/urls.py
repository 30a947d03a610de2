"""Which names of sources are URLs; apart from what fetches them, which takes long to import."""

import re

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")


def is_url(spec: str) -> bool:
    """Whether a source name is a URL, of whatever protocol."""
    return SCHEME.match(spec) is not None
