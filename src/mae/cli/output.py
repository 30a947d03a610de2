"""Standard output and standard error that may be closed, full or gone while a command works."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TextIO, cast

from mae.errors import MAEError

if TYPE_CHECKING:
    from typing_extensions import Buffer

OUTPUT_CLOSED = 141
"""Exit code of a command whose reader went away, as in `mae list models | head`: what a shell gives for SIGPIPE."""


class _Tolerant(io.FileIO):
    """A descriptor whose failure to write ends a command that needs it; of another one the rest is dropped.

    It stands below the buffer of a stream, so that nothing above it, such as what the interpreter flushes when it ends,
    has an error of its own to tell.
    """

    def __init__(self, fd: int, *, needed: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self.needed = needed
        self.failure: OSError | None = None

    def write(self, data: "Buffer", /) -> int:
        """The number of bytes that were written or dropped."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
                if not self.needed and self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                    sys.stderr.write(f"mae: warning: {_lost(error)}; going on without it\n")
        if self.needed:  # each time: the first may have been in a thread, which ends alone
            # No BrokenPipeError, of which rich makes exit code 1, and which may be of a file of the command.
            closed = isinstance(self.failure, BrokenPipeError)
            raise SystemExit(OUTPUT_CLOSED) if closed else MAEError(_lost(self.failure))
        return memoryview(data).nbytes


def _lost(error: OSError) -> str:
    return f"standard output cannot be written: {error.strerror}"


@contextmanager
def tolerant_output(*, needed: bool) -> Iterator[None]:
    """While entered, a standard stream that cannot be written does no harm.

    Args:
        needed: the text is what the command is for, which ends where it cannot be written: quietly with exit code 141
            where its reader went away, with an `MAEError` otherwise. Else a failed write to standard output is told
            once on standard error, and the work, whose results are files, goes on.
    """
    _open_descriptors()
    kept = sys.stdout, sys.stderr
    raws = [_Tolerant(1, needed=needed), _Tolerant(2, needed=False)]
    sys.stdout, sys.stderr = (_above(raw, stream) for raw, stream in zip(raws, kept, strict=True))
    try:
        yield
    finally:
        raws[0].needed = False  # what went wrong is being told
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = kept


def _open_descriptors() -> None:
    """Fill standard descriptors that were closed before the start: a file opened later would be given their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    # The interpreter has None for each of them.
    sys.stdin = sys.stdin or open(0, closefd=False)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def _above(raw: _Tolerant, stream: TextIO) -> TextIO:
    """The same stream above a tolerant descriptor; as it is where it is no plain one, as a test's or a notebook's."""
    buffer = getattr(stream, "buffer", None)
    own = getattr(buffer, "raw", buffer)
    if not isinstance(stream, io.TextIOWrapper) or type(own) is not io.FileIO or own.fileno() != raw.fileno():
        return stream
    return io.TextIOWrapper(
        cast(BinaryIO, raw if buffer is own else io.BufferedWriter(raw)),
        encoding=stream.encoding,
        errors="backslashreplace",  # a name or a sign that it cannot show must not end a run
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
