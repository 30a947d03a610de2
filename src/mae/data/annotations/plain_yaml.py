"""The little of YAML that names of classes and paths of images are written in; no library for it comes along."""

import re
from typing import TypeAlias

Value: TypeAlias = str | list[str] | dict[str, str]

_ITEM = re.compile(r"""'((?:[^']|'')*)'|"([^"]*)"|([^\s,'"][^,]*)""")
_KEY = re.compile(r"""^(?:'([^']*)'\s*|"([^"]*)"\s*|([^\s'"#\[{-][^:]*)):(?:\s+(.*))?$""")
_COMMENT = re.compile(r"""((?<![^\s\[{,:])(?:'(?:[^']|'')*'|"[^"]*"))|\s#.*""")
"""Behind what is in quotes, which may hold the sign."""

_CLOSING = {"[": "]", "{": "}"}


def read_plain_yaml(text: str) -> dict[str, Value]:
    """The keys at the top of a YAML text that hold a plain value, a list of such values, or a mapping to them.

    Lists and mappings may be in brackets or an entry a line. What is written otherwise is left out.
    """
    found: dict[str, Value] = {}
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", "---", "%"))]
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line[0].isspace() or (key := _entry(line)) is None:
            continue
        name, rest = key
        if rest[:1] in ("[", "{"):  # to the line that closes it
            pieces = [_uncommented(rest)]
            while not pieces[-1].endswith(_CLOSING[rest[0]]) and at < len(lines):
                pieces.append(_uncommented(lines[at].strip()))
                at += 1
            text = " ".join(pieces)
            found[name] = _bracketed(text) if text.endswith(_CLOSING[rest[0]]) else text
        elif rest:
            found[name] = _plain(rest)
        else:
            start = at
            while at < len(lines) and (lines[at][0].isspace() or lines[at].startswith("- ")):
                at += 1
            if (value := _block([line.strip() for line in lines[start:at]])) is not None:
                found[name] = value
    return found


def _block(lines: list[str]) -> Value | None:
    """An entry a line: of a list, or of a mapping."""
    if lines and all(line.startswith("- ") for line in lines):
        return [_plain(line[2:]) for line in lines]
    entries = [_entry(line) for line in lines]
    return {entry[0]: _plain(entry[1]) for entry in entries if entry is not None} if all(entries) and lines else None


def _bracketed(text: str) -> Value:
    items = [match.group(0) for match in _ITEM.finditer(text[1:-1])]
    if text[0] == "[":
        return [_plain(item) for item in items]
    entries = [_entry(item) for item in items]
    return {entry[0]: _plain(entry[1]) for entry in entries if entry is not None}


def _entry(text: str) -> tuple[str, str] | None:
    """A key and what follows it; None where it is no such line."""
    if (match := _KEY.match(text.strip())) is None:
        return None
    *names, rest = match.groups()
    rest = (rest or "").strip()
    return next(name for name in names if name is not None).rstrip(), "" if rest.startswith("#") else rest


def _uncommented(text: str) -> str:
    return _COMMENT.sub(lambda found: found[1] or "", text).rstrip()


def _plain(text: str) -> str:
    """A value without its quotes or the comment behind it."""
    text = text.strip()
    if text[:1] in ("'", '"') and (match := _ITEM.match(text)) is not None:
        single, double, _ = match.groups()
        return single.replace("''", "'") if single is not None else double
    return _uncommented(text)
