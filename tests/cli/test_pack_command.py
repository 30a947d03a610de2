"""`mae pack` as it is typed, and the other commands on what it makes."""

import json
import signal
from pathlib import Path

import pytest
from data.packs import jpeg
from full import fill
from light import light_runs

from mae.cli import main


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a labelled set, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 12), ("test", 6)):
        for number in range(count):
            path = tmp_path / "photos" / part / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(40, 36, seed=number + 100 * count))
    return tmp_path


def code_of(words: str) -> int:
    """Exit code, also where the parser stops the program itself."""
    try:
        return main(words.split())
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_it_packs_and_verifies_and_says_so(typed, capsys):
    assert code_of("pack photos pack --workers 1 --short-side 32") == 0
    assert "pack is packed: 18 images, 0.0 MB" in capsys.readouterr().out
    assert json.loads((typed / "pack" / "pack.json").read_text())["form"]["short_side"] == 32
    assert code_of("pack photos pack --workers 1 --short-side 32") == 0
    assert "pack was packed already: 18 images" in capsys.readouterr().out
    assert code_of("pack verify pack") == 0
    assert capsys.readouterr().out == "pack is intact\n"


def test_each_fault_is_told_in_a_line(typed, capsys):
    assert code_of("pack photos pack --workers 1 --per-shard 6") == 0
    for number in (0, 2):
        path = typed / "pack" / f"shard-00000{number}.tar"
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)
    capsys.readouterr()
    assert code_of("pack verify pack") == 1
    *faults, last = capsys.readouterr().out.splitlines()
    assert len(faults) == 2 and all("does not match its checksum" in fault for fault in faults)
    assert last == "pack: 2 faults"
    assert code_of("pack verify nowhere") == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_full_disk_is_told_and_the_same_command_goes_on(typed, disk, capsys):
    wall = fill(disk, leave=1_500_000)
    for number in range(20):  # 120 kB each
        (typed / "photos" / "train" / "a" / f"large-{number}.jpg").write_bytes(jpeg(210, 210, seed=number))
    command = f"pack photos {disk}/pack --workers 1 --raw 200 --per-shard 10"
    assert code_of(command) == 1
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and "No space left on device" in error and "Traceback" not in error
    written = sorted((disk / "pack").glob("shard-*.tar"))
    assert written and all(len(path.read_bytes()) % 512 == 0 for path in written)
    wall.unlink()
    assert code_of(command) == 0 and code_of(f"pack verify {disk}/pack") == 0
    assert code_of(f"pack photos {typed}/whole --workers 1 --raw 200 --per-shard 10") == 0
    for path in sorted((typed / "whole").iterdir()):
        assert (disk / "pack" / path.name).read_bytes() == path.read_bytes()


def test_what_is_left_out_is_listed(typed, capsys):
    (typed / "photos" / "train" / "a" / "\x1b[2J.jpg").write_bytes(b"none")
    assert code_of("pack photos pack --workers 1") == 1
    assert "1 of 19 images cannot be used" in capsys.readouterr().err
    assert code_of("pack photos pack --workers 1 --max-unreadable 0.1") == 0
    shown = capsys.readouterr().out
    assert "left out: photos/train/a/\ufffd[2J.jpg starts with b'none'" in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("words", "form"),
    [("", {"kind": "jpeg", "short_side": 384, "quality": 90}), ("--quality 80", {"quality": 80, "short_side": 384}),
     ("--keep", {"kind": "keep"}), ("--raw 16 --per-shard 5", {"kind": "raw", "short_side": 16, "per_shard": 5})],
)  # fmt: skip
def test_forms(typed, words, form):
    assert code_of(f"pack photos pack --workers 1 {words}") == 0
    told = json.loads((typed / "pack" / "pack.json").read_text())["form"]
    assert told == {**told, **form} and ("quality" in told) == ("short_side" in told and told["kind"] == "jpeg")


@pytest.mark.parametrize("words", ["--keep --raw 256", "--keep --quality 90", "--raw 256 --short-side 384",
                                   "--short-side 0", "--quality 101", "--raw 0", "--workers 0", "--per-shard 0",
                                   "--max-unreadable 2"])  # fmt: skip
def test_wrong_words_are_refused(typed, words, capsys):
    assert code_of(f"pack photos pack {words}") == 2
    assert "mae: error: " in capsys.readouterr().err and not (typed / "pack").exists()


def test_a_pack_pretrains_and_evaluates_and_embeds(typed, capsys):
    assert code_of("pack photos pack --workers 1 --per-shard 4") == 0
    with light_runs():
        run = "pretrain pack --model mae_vit_lesson_patch4 --img-size 16 --steps 2 --batch-size 4 --device cpu"
        assert code_of(f"{run} --workers 0 --out run") == 0
    assert "train/ only, 12 files" in " ".join(capsys.readouterr().out.split())
    assert code_of("evaluate knn run --data pack --ks 1 --device cpu --out found") == 0
    assert "chance 50.0%" in " ".join(capsys.readouterr().out.split())  # two classes
    assert code_of("embed run pack --out features.npz --device cpu") == 0


def test_ctrl_c_tells_how_to_go_on(typed, capsys, monkeypatch):
    monkeypatch.setattr(
        "mae.data.packs.writer.pack_shards", lambda *args, **options: signal.raise_signal(signal.SIGINT)
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs behind it ignore Ctrl-C
    try:
        assert code_of("pack photos pack") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "rerun the same command to resume" in capsys.readouterr().err


def test_help_tells_the_forms(capsys):
    assert code_of("pack --help") == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--short-side", "--quality", "--keep", "--raw", "--max-unreadable"))
    assert code_of("pack verify --help") == 0
