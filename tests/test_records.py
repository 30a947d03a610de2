import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from mae.errors import MAEError, UsageError
from mae.records import (
    check_folder,
    check_known,
    check_new,
    from_json,
    read_json,
    safe_name,
    short_name,
    to_json,
    whole_folder,
    write_whole,
)


@dataclass(frozen=True, kw_only=True)
class Thing:
    sides: tuple[int, int] = (1, 2)
    where: Path | None = None
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    on: bool = False

    def __post_init__(self) -> None:
        if self.share > 1:
            raise UsageError(f"share is {self.share}; at most 1")


def test_round_trip():
    thing = Thing(sides=(3, 4), where=Path("x/y"), share=1, kind="b", on=True)
    assert to_json(thing) == {"sides": [3, 4], "where": "x/y", "share": 1, "kind": "b", "on": True}
    assert from_json(Thing, to_json(thing), what="option") == thing
    assert from_json(Thing, {}, what="option") == Thing()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sides": [1, 2, 3]}, "option sides"),
        ({"sides": "12"}, "option sides is '12'"),
        ({"share": "0.5"}, "option share is '0.5'"),
        ({"kind": "c"}, "option kind is 'c'.*'a' or 'b'"),
        ({"on": 1}, "option on is 1.*boolean"),
        ({"share": 2}, "^share is 2.0; at most 1$"),
        ({"shared": 2}, "unknown option 'shared'; did you mean share"),
    ],
)
def test_wrong_values_are_named(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        from_json(Thing, values, what="option")


def test_unknown_names_without_a_near_one_list_some():
    with pytest.raises(UsageError, match="unknown part 'zzz'; did you mean a or b"):
        check_known({"zzz": 1}, ["b", "a"], what="part")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "\ud800"}, "^option: .*expected plain values$"),
        ({"kind": "c" * 10_000}, "^option kind is 'ccc.{0,300}$"),
        ({"c" * 10_000: 1}, "^unknown option 'ccc.{0,300}$"),
    ],
)
def test_values_that_no_json_holds_or_that_are_long_are_told_shortly(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        from_json(Thing, values, what="option")


def test_values_nested_deeply_are_refused():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UsageError, match="^option: nested too deeply"):
        from_json(Thing, {"kind": nested}, what="option")


def test_files_that_are_no_json_are_named(tmp_path: Path):
    deep, pipe, large = tmp_path / "deep.json", tmp_path / "pipe.json", tmp_path / "large.json"
    deep.write_text("[" * 100_000)
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(65 << 20)  # takes no room on the disk
    for path, message in ((deep, "cannot be read as JSON"), (pipe, "no file of at most"), (large, "at most 64 MiB"),
                          (tmp_path, "no file of at most"), (tmp_path / "none.json", "No such file")):  # fmt: skip
        with pytest.raises(UsageError, match=f"{path}.*{message}"):
            read_json(path)


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, write = tmp_path / "a.csv", Path.write_text

    def fills(self: Path, text: str, **options: str) -> int:
        write(self, text[:1], **options)
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "a,b")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_text_are_written_as_they_are(tmp_path: Path):
    write_whole(tmp_path / "a.csv", "b\udcff.png,1\n")
    assert (tmp_path / "a.csv").read_bytes() == b"b\xff.png,1\n"
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "b.csv", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_a_folder_is_whole_or_absent(tmp_path: Path):
    with whole_folder(tmp_path / "new" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "new" / "out").exists()
    assert (tmp_path / "new" / "out" / "a").read_text() == "1"
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "new" / "other") as folder:
        raise KeyboardInterrupt
    with pytest.raises(MAEError, match="other cannot be written: No space left on device; free some space, or choose"):
        with whole_folder(tmp_path / "new" / "other") as folder:
            (folder / "a").write_text("1")
            raise OSError(28, "No space left on device")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("text", ["a" * 300, "ä" * 300, "日" * 300, "日" * 9 + "/"])
def test_a_short_name_has_at_most_200_bytes(text: str):
    short = short_name(text)
    assert len(short.encode()) <= 200 and safe_name(text).startswith(short)
    assert len(short.encode()) > 197 or short == safe_name(text)


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="file is not a folder; choose another --out"):
            check_folder(path)
        with pytest.raises(UsageError, match="x.csv cannot be written: .*file is not a folder; give another name"):
            check_new(path / "x.csv")
    check_folder(tmp_path / "new" / "run")
    check_new(tmp_path / "new" / "run" / "x.csv")
