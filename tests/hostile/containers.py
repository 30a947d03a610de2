"""Folders, lists, zip and tar archives: what stands in for a file, leads elsewhere or lies about its size."""

import gzip
import io
import os
import socket
import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from hostile.corpus import Case, Verdict
from PIL import Image

DEEPEST = 1200
"""Folders inside one another: more than Python calls may be."""


def picture(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def zipped(files: list[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return buffer.getvalue()


def patched(archive: bytes, offset: int, value: bytes) -> bytes:
    """With other bytes in the directory's last entry, so many behind its start."""
    entry = archive.rindex(b"PK\1\2") + offset
    return archive[:entry] + value + archive[entry + len(value) :]


def named_zip(names: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    return zipped([("a.png", picture()), ("channels.txt", names)], method)


def archives() -> list[tuple[str, bytes, Verdict, str]]:
    """Zips by name, with the verdict on each."""
    good = zipped([("a.png", picture())])
    packed = zipped([("a.png", picture())], zipfile.ZIP_DEFLATED)
    link = zipfile.ZipInfo("link.png")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    bomb = zipped([("bomb.png", bytes(40 << 20))], zipfile.ZIP_DEFLATED)
    like_png = zipped([("bomb.png", picture()[:16] + bytes(40 << 20))], zipfile.ZIP_DEFLATED)
    return [
        ("zip", good, "ok", "1 of 1"),
        ("zip of ../ names", zipped([("../../up.png", picture())]), "refused", "no images"),
        ("zip of absolute names", zipped([("/up.png", picture()), ("C:\\up.png", picture())]), "ok", "1 of 1"),
        ("zip with a link", zipped([(link, b"/etc/passwd")]), "refused", "no images"),
        ("zip of one name twice", zipped([("a.png", picture(1)), ("b.png", picture(2))]).replace(b"b.png", b"a.png"),
         "ok", "1 of 1"),
        ("zip that names channels", named_zip(b"red\ngreen\nblue\n"), "ok", "1 of 1"),
        ("zip that names channels by a bomb", named_zip(bytes(40 << 20)), "refused", "channels.txt does not name"),
        ("zip that names channels by lzma", named_zip(b"a\nb\nc\n", zipfile.ZIP_LZMA), "refused", "zip method 14"),
        ("zip that names channels in secret", patched(named_zip(b"a\nb\nc\n"), 8, b"\1"), "refused", "encrypted"),
        ("zip that names channels wrongly", patched(named_zip(b"a\nb\nc\n"), 16, b"\1\2\3\4"), "refused", "whole zip"),
        ("zip encrypted", patched(good, 8, b"\1"), "refused", "is encrypted"),
        ("zip of method deflate64", patched(packed, 10, b"\x09\0"), "refused", "zip method 9"),
        ("zip of no known method", patched(packed, 10, b"\xff\x7f"), "refused", "zip method 32767"),
        ("zip of lzma", zipped([("a.png", picture())], zipfile.ZIP_LZMA), "refused", "zip method 14"),
        ("zip that claims 4 GB", patched(packed, 20, b"\xfe\xff\xff\xff\xfe\xff\xff\xff"), "refused", "MiB at most"),
        ("zip that claims 500 MB", patched(good, 20, struct.pack("<II", 500 << 20, 500 << 20)), "refused", "beyond"),
        ("zip that claims less", patched(packed, 24, struct.pack("<I", 20)), "refused", "checksum|whole PNG"),
        ("zip of a member elsewhere", patched(good, 42, struct.pack("<I", 7)), "refused", "not where"),
        ("zip of a member far away", patched(good, 42, struct.pack("<I", 1 << 31)), "refused", "beyond|whole zip"),
        ("zip bomb", bomb, "refused", "starts with"),
        ("zip bomb that begins as a png", like_png, "refused", "whole PNG"),
        ("zip in a zip", zipped([("inner.zip", good)]), "refused", "holds no images"),
        ("zip in a zip, called png", zipped([("inner.png", good)]), "refused", "starts with"),
        ("zip of a NUL name", zipped([("a.png\0.txt", picture())]), "either", ""),
        ("zip of an empty name", _unnamed(), "refused", "holds no images"),
        ("zip of nothing", zipped([]), "refused", "holds no images"),
        ("zip that is text", b"PK are my initials", "refused", "not a whole zip"),
        ("zip cut", good[: len(good) // 2], "refused", "not a whole zip"),
        ("zip without its beginning", good[20:], "refused", "not where|whole zip|beyond|cannot be read"),
        ("zip of a wrong checksum", patched(good, 16, b"\0\0\0\0"), "refused", "checksum"),
        ("zip of 20,000 members in the same place", _overlapping(20_000), "refused", "holds no images|checksum"),
    ]  # fmt: skip


def _unnamed() -> bytes:
    """An archive whose directory gives its one member no name."""
    good = zipped([("a.png", picture())])
    start = good.index(b"PK\1\2")
    entry = good[start : start + 28] + bytes(2) + good[start + 30 : start + 46]
    return good[:start] + entry + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(entry), start, 0)


def _overlapping(number: int) -> bytes:
    """A directory whose entries all are the one file of an archive, none of them an image's name."""
    good = zipped([("a.txt", bytes(9))])
    start, end = good.index(b"PK\1\2"), good.index(b"PK\5\6")
    entries = good[start:end] * number
    tail = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, len(entries), start, 0)
    return good[:start] + entries + tail


def tarred(files: list[tuple[str | tarfile.TarInfo, bytes]], form: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in files:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def tars() -> list[tuple[str, bytes, Verdict, str]]:
    """Tars by name, with the verdict on each; tests/data/sources/test_webdataset.py has more."""
    good = tarred([("a.png", picture())])

    def member(kind: bytes, size: int = 0, **fields: object) -> tarfile.TarInfo:
        found = tarfile.TarInfo("a.png")
        found.type, found.size = kind, size
        for name, value in fields.items():
            setattr(found, name, value)
        return found

    def claiming(kind: bytes, size: int) -> bytes:
        return member(kind, size).tobuf(tarfile.GNU_FORMAT) + bytes(3 << 20)

    nested = [(member(tarfile.XHDTYPE), b"11 comment=") for _ in range(20_000)]
    return [
        ("tar", good, "ok", "1 of 1"),
        ("tar of ../ names", tarred([("../../up.png", picture())]), "refused", "no images"),
        ("tar of absolute names", tarred([("/up.png", picture())]), "refused", "no images"),
        ("tar with a link", tarred([(member(tarfile.SYMTYPE, linkname="/etc/passwd"), b"")]), "refused", "no images"),
        ("tar with a device", tarred([(member(tarfile.CHRTYPE), b"")]), "refused", "no images"),
        ("tar with a sparse file", claiming(tarfile.GNUTYPE_SPARSE, 1 << 40), "refused", "sparse file"),
        ("tar of one name twice", tarred([("a.png", picture(1)), ("a.png", picture(2))]), "ok", "1 of 1"),
        ("tar that claims 1 TB", claiming(tarfile.REGTYPE, 1 << 40), "refused", "claims"),
        ("tar of a name of 1 TB", claiming(tarfile.GNUTYPE_LONGNAME, 1 << 40), "refused", "claims"),
        ("tar of a header of 2 MB", claiming(tarfile.XHDTYPE, 2 << 20), "refused", "claims"),
        ("tar of 20,000 headers of headers", tarred(nested), "refused", "not a line of a pax header"),
        ("tar of a wrong checksum", good[:10] + b"x" + good[11:], "refused", "checksum"),
        ("tar cut", good[:600], "refused", "claims"),
        ("tar of nothing", b"", "refused", "no images"),
        ("tar that is a zip", zipped([("a.png", picture())]), "refused", "cut short|whole tar"),
        ("tar that is compressed", gzip.compress(good), "refused", "compressed with gzip"),
        ("tar in a tar", tarred([("inner.tar", good)]), "refused", "no images"),
        ("tar in a tar, called png", tarred([("inner.png", good)]), "refused", "starts with"),
    ]


def lists(folder: Path) -> list[tuple[str, bytes, Verdict, str]]:
    """Lists beside the picture `a.png`."""
    here = str(folder / "a.png").encode()
    return [
        ("list", b"a.png\n", "ok", "1 of 1"),
        ("list upwards", f"../{folder.name}/a.png\n".encode(), "ok", "1 of 1"),
        ("list of an absolute path", here, "ok", "1 of 1"),
        ("list of a NUL", b"a.png\0\n", "refused", "line 1: a.png. is not a file"),
        ("list of a long name", b"a" * 300 + b"\n", "refused", "line 1: aaaa"),
        ("list of a very long line", b"a" * (32 << 20), "refused", "line 1: a{200} is not a file"),
        ("list of a device", b"/dev/zero\n", "refused", "line 1: /dev/zero is not a file"),
        ("list of a folder", b".\n", "refused", "line 1: . is not a file"),
        ("list of a password file", b"/etc/passwd\n", "refused", "expected a JPEG, PNG"),
        ("list of no text", bytes(range(1, 256)) * 9, "refused", "is not a file"),
        ("list of nothing", b"# nothing\n\n", "refused", "lists no images"),
        ("list with an end of file", b"a.png\r\n\x1a", "refused", "line 2"),
    ]


def cases(folder: Path) -> list[Case]:
    """All of the above, and folders and files of odd kinds."""
    (folder / "a.png").write_bytes(picture())
    found: list[Case] = []

    def add(name: str, path: Path, verdict: Verdict, why: str) -> None:
        found.append(Case(name=name, path=path, reader="source", verdict=verdict, why=why))

    for kind, suffix in ((archives(), "zip"), (tars(), "tar"), (lists(folder), "txt")):
        for number, (name, data, verdict, why) in enumerate(kind):
            path = folder / f"{number}.{suffix}"
            path.write_bytes(data)
            add(name, path, verdict, why)
    for suffix in ("zip", "tar", "txt"):
        os.mkfifo(folder / f"pipe.{suffix}")
        add(f"pipe called .{suffix}", folder / f"pipe.{suffix}", "refused", "not a source of images")
        (folder / f"zero.{suffix}").symlink_to("/dev/zero")
        add(f"device called .{suffix}", folder / f"zero.{suffix}", "refused", "not a source of images")
    add("path of a NUL", folder / "a\0b.zip", "refused", "does not exist")
    add("path of a long name", folder / ("a" * 300), "refused", "cannot be opened|does not exist")
    add("folder of odd files", _odd_files(folder / "odd"), "ok", "2 of 3")
    add("folder of loops", _loops(folder / "loops"), "ok", "1 of 1")
    add("folder in folders", _deep(folder / "deep"), "ok", "1 of 1")
    if os.geteuid() != 0:  # who is root may read everything
        for name in ("list", "zip"):
            secret = folder / f"secret.{'txt' if name == 'list' else 'zip'}"
            secret.touch(mode=0)
            add(f"{name} that may not be read", secret, "refused", "Permission|not a whole")
    return found


def _odd_files(root: Path) -> Path:
    root.mkdir()
    (root / "a.png").write_bytes(picture())
    (root / b"\xff\xfe \x1b[2J\n<b>.png".decode("utf-8", "surrogateescape")).write_bytes(picture())
    (root / "b.png").write_bytes(b"no picture")
    os.mkfifo(root / "pipe.png")
    (root / "zero.png").symlink_to("/dev/zero")
    (root / "folder.png").mkdir()
    here = os.getcwd()
    os.chdir(root)  # a socket's name may have 100 letters only
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket.png")
    finally:
        os.chdir(here)
    return root


def _loops(root: Path) -> Path:
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "a.png").write_bytes(picture())
    (root / "inner" / "up").symlink_to(root)
    (root / "self.png").symlink_to(root / "self.png")
    (root / "nowhere.png").symlink_to(root / "nothing")
    return root


def _deep(root: Path) -> Path:
    root.mkdir()
    here = os.getcwd()
    try:
        os.chdir(root)
        for _ in range(DEEPEST):
            os.mkdir("d")
            os.chdir("d")
        Path("a.png").write_bytes(picture())
    finally:
        os.chdir(here)
    return root
