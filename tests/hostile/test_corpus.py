"""Each thing of the corpus gets its verdict, in a process of its own with 1 GiB to spare and 2 seconds a case."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.corpus import Case, write_corpus

WARM_UP = ("png", "tiff bands, deflate", "webp", "jpeg", "zip", "tar", "config", "model", "checkpoint", "features")
"""Read once before the limit holds, so that it counts no imports."""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits are set as Linux has them")]


class Judged:
    """The cases, and of each by name: `ok`, `refused`, `crashed` or `hung`, and what was said."""

    SETTINGS = {"OMP_NUM_THREADS": "1", "OPENMAE_CACHE": "/dev/null/none"}  # nothing is kept of what is read

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cases: list[Case] = write_corpus(root / "corpus")
        self.before = listing(root)
        by_name = {case.name: case for case in self.cases}
        asked = {
            "warm_up": [(by_name[name].reader, str(by_name[name].path)) for name in WARM_UP],
            "cases": [(case.name, case.reader, str(case.path)) for case in self.cases]
            + [("takes memory", "memory", "-"), ("never ends", "spin", "-")],
        }
        (root / "cases.json").write_text(json.dumps(asked))
        command = [sys.executable, str(Path(__file__).with_name("judge.py")), str(root / "cases.json")]
        done = subprocess.run(command, capture_output=True, timeout=200, env={**os.environ, **self.SETTINGS})
        self.exit = done.returncode
        self.words = done.stderr.decode(errors="replace")[-2000:]
        (root / "cases.json").unlink()
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.found: dict[str, tuple[str, str]] = {name: (verdict, said) for name, verdict, said in lines}


def listing(root: Path) -> list[str]:
    """All files and folders, of the one that holds the corpus too; the folder in folders is left out."""
    return sorted(str(path) for path in root.glob("*/*/*")) + sorted(str(path) for path in root.parent.glob("*"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    root = tmp_path_factory.mktemp("hostile")
    yield Judged(root)
    subprocess.run(["rm", "-rf", str(root)], check=True)  # Python calls itself for each folder in a folder


def test_the_process_lives_to_the_last_case(judged: Judged):
    stopped_at = [name for name, (verdict, _) in judged.found.items() if verdict == "started"]
    assert (judged.exit, stopped_at) == (0, []), judged.words
    assert len(judged.found) == len(judged.cases) + 2


def test_the_limits_bite(judged: Judged):
    assert judged.found["takes memory"][0] == "crashed" and "MemoryError" in judged.found["takes memory"][1]
    assert judged.found["never ends"][0] == "hung"


def faults(judged: Judged, case: Case) -> str:
    verdict, said = judged.found.get(case.name, ("not judged", ""))
    expected = ("ok", "refused") if case.verdict == "either" else (case.verdict,)
    if verdict not in expected:
        return f"{case.name}: {verdict} ({said[:200]}); expected {case.verdict}"
    if case.verdict != "either" and not re.search(case.why, said, re.DOTALL):
        return f"{case.name}: says {said[:200]!r}; expected {case.why!r}"
    return ""


@pytest.mark.parametrize("reader", ["image", "source", "config", "model config", "model", "checkpoint", "features"])
def test_each_case_gets_its_verdict(judged: Judged, reader: str):
    cases = [case for case in judged.cases if case.reader == reader]
    assert cases
    assert not list(filter(None, (faults(judged, case) for case in cases)))


def test_reading_writes_nothing(judged: Judged):
    assert listing(judged.root) == judged.before


def test_no_code_is_run_and_no_refusal_is_long(judged: Judged):
    for case in judged.cases:
        said = judged.found[case.name][1]
        assert "code was run" not in said
        # A refusal of a folder of many images lists one each.
        assert len(said) < 3000, f"{case.name}: {len(said)} letters"
