"""A device that is out of memory, told in words that help."""

import pytest
import torch

from mae.errors import MAEError
from mae.training.device import explained_memory_failure


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA could not give 2 GiB.\nMany more lines."),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)\nMany more lines."),
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
