"""Which device and precision is taken, and a device that is out of memory, told in words that help."""

import platform
import subprocess
import sys

import pytest
import torch

from mae.errors import MAEError, UsageError
from mae.training.device import choose_device, choose_precision, explained_memory_failure


def test_the_fastest_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
        assert choose_device("auto") == torch.device(expected) and choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="--device is cuda, which PyTorch does not find here; there is: cpu"):
        choose_device("cuda")


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((12, 0), "bf16")])
def test_bf16_is_taken_where_cuda_computes_in_it(monkeypatch: pytest.MonkeyPatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision("auto", torch.device("cuda")) == expected
    assert choose_precision("bf16", torch.device("cpu")) == "bf16"
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        choose_precision("fp16", torch.device("cpu"))


@pytest.mark.parametrize(("has_it", "expected"), [(True, "bf16"), (False, "fp32")])
def test_bf16_is_taken_where_the_processor_computes_in_it(monkeypatch: pytest.MonkeyPatch, has_it, expected):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_it)
    assert choose_precision("auto", torch.device("cpu")) == expected
    assert choose_precision("auto", torch.device("mps")) == "fp32"
    assert choose_precision("fp32", torch.device("cpu")) == "fp32"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA could not give 2 GiB.\nMany more lines."),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)\nMany more lines."),
        RuntimeError("could not create a primitive"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_no_memory_is_explained(error: RuntimeError):
    with pytest.raises(MAEError) as caught, explained_memory_failure("take smaller images"):
        raise error
    first_line = str(error).splitlines()[0]
    assert str(caught.value) == f"the device ran out of memory: {first_line}; take smaller images"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_errors_pass_as_they_are(error: BaseException):
    with pytest.raises(type(error)) as caught, explained_memory_failure("take smaller images"):
        raise error
    assert caught.value is error


def test_an_allocation_that_truly_fails_is_explained():
    with pytest.raises(MAEError, match="ran out of memory: .*; take smaller images"):
        with explained_memory_failure("take smaller images"):
            torch.empty(1 << 60, dtype=torch.uint8)


def test_nothing_is_said_where_nothing_fails():
    with explained_memory_failure("take smaller images"):
        found = torch.ones(2).sum()
    assert found == 2


FAULTS = """
import resource, sys, torch
from mae.training.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    # Together more than a C int counts: what is freed at the heap's end is kept however much it is.
    held = [torch.empty(int(sys.argv[2])) for _ in range(5)]
    for each in held:
        each[::1024] = 1
    while held:
        held.pop()
for _ in range(6):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is what is told")
def test_freed_memory_is_used_again_without_asking_the_system():
    def faults(how: str, length: int) -> int:
        words = [sys.executable, "-c", FAULTS, how, str(length)]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert faults("keep", 2**22) < faults("default", 2**22) / 10
    assert faults("keep", 2**27) < 1000  # 2.5 GiB
