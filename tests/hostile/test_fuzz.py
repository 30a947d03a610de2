"""Damaged inputs to every reader: a value or one of our errors, nothing else. benchmarks/fuzz.py runs many more."""

import logging
import time

import pytest
from hostile.mutations import KINDS, Desk, mutated, seeds
from hostile.readers import READERS, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SHARE = st.integers(0, (1 << 16) - 1)
DAMAGES = st.lists(st.tuples(st.integers(0, KINDS - 1), SHARE, SHARE), min_size=1, max_size=4)
SEEDS = seeds()
CPU_SECONDS = 2.0


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return Desk(tmp_path_factory.mktemp("desk"))


def judged(desk: Desk, kind: str, data: bytes) -> str:
    reader, path = desk.lay(kind, data)
    started = time.process_time()
    verdict, said = outcome(READERS[reader], path)
    assert time.process_time() - started < CPU_SECONDS
    assert verdict in ("ok", "refused"), said
    return verdict


@pytest.mark.parametrize("kind", SEEDS)
@settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(which=SHARE, other=SHARE, done=DAMAGES)
def test_damaged_input_is_read_or_refused(desk: Desk, kind: str, which: int, other: int, done: list):
    valid = SEEDS[kind]
    judged(desk, kind, mutated(valid[which % len(valid)], valid[other % len(valid)], done))


@pytest.mark.parametrize("kind", SEEDS)
def test_undamaged_input_is_read(desk: Desk, kind: str):
    """Otherwise the test above would only see what is refused at the door."""
    assert "ok" in {judged(desk, kind, data) for data in SEEDS[kind]}


@pytest.mark.parametrize("kind", ["image", "config", "model"])
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.binary(max_size=200), head=st.sampled_from([b"", b"\xff\xd8\xff", b"BM", b"II*\0", b"RIFF0000WEBPVP8X"]))
def test_any_bytes_are_read_or_refused(desk: Desk, kind: str, data: bytes, head: bytes):
    judged(desk, kind, head + data)
