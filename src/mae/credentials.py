"""What a URL holds besides its place, kept out of all text: user, password, and what a question mark begins.

A run writes and shows what it is told in many places: its configuration, its folder's name, models' files, pages,
messages. So a URL is parted where it comes in: all that follows knows the place alone, by which a request finds the
whole URL again. Processes that this one starts are handed it in their environment, which other users cannot read,
unlike the words of a command.
"""

import os
import re
from collections.abc import Sequence

VARIABLE = "OPENMAE_URLS"
"""Environment variable: whole URLs, blanks between them, for whoever asks for their places."""

_WORD = re.compile(r"(--[\w-]+=)?((?:[A-Za-z][A-Za-z0-9+.:-]*://|(?i:https?|s3|gs|ftp):[\\/]*).*)", re.DOTALL)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*:[\\/]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^:@\[\]]*)(:\d*)?")

_held: dict[str, str] = {}


def concealed(word: str) -> str:
    """A word that was typed; of a URL, alone or behind `--option=`, the place, by which `revealed` finds the rest."""
    if not (found := _WORD.fullmatch(word)):
        return word
    place = shown(found[2])
    if place != found[2]:
        _held[_key(place)] = found[2]
    return (found[1] or "") + place


def revealed(url: str) -> str:
    """The whole URL of a place, as far as one came in; that which came in last."""
    if shown(url) != url:
        return url
    told = {_key(shown(each)): each for each in os.environ.get(VARIABLE, "").split()}
    return (told | _held).get(_key(url), url)


def is_partial(url: str) -> bool:
    """Whether there is more to a place than it shows."""
    return shown(revealed(url)) != revealed(url)


def handed_on() -> dict[str, str]:
    """Environment variables by which a process that this one starts knows the URLs too."""
    urls = [*os.environ.get(VARIABLE, "").split(), *(url for url in _held.values() if not re.search(r"\s", url))]
    return {VARIABLE: " ".join(dict.fromkeys(urls))} if urls else {}


def all_concealed(words: Sequence[str]) -> list[str]:
    """`concealed` of each word of a command."""
    return [concealed(word) for word in words]


def shown(url: str) -> str:
    """The place of a URL: without user, password, and what a question mark or a hash begins."""
    if not (found := _URL.fullmatch(url)):
        return url
    scheme, rest = found[1], found[2]
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = place.partition("/")
    user, at, host = authority.rpartition("@")
    if not at and "@" in rest and not _HOST.fullmatch(authority):
        # A password with a sign that ends a host, as "/": what stands before it is no host.
        return shown(scheme + rest.rpartition("@")[2])
    return scheme + host + slash + path


def _key(place: str) -> str:
    return place.rstrip("/")
