"""What a pickle would take to read, told from its opcodes before anything of it is made."""

import pickletools
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mae.errors import MAEError

_DEEPEST, _MOST_WORK = 100, 10_000_000
"""Tuples in each other, and their values in all, each counted as often as it is met."""


class _Cost(NamedTuple):
    """How deep a value's tuples lie in each other, and how many values a hash of it looks at."""

    deep: int = 0
    values: int = 1


_PLAIN, _MARK = _Cost(), None


def check_pickle(path: Path, file: BinaryIO) -> None:
    """Refuse a pickle whose tuples a reader could not hash; the file is left behind its end.

    A key of a dictionary is hashed, and of a tuple with all that lies in it: nested deep enough that ends the process,
    and where tuples share their parts a few bytes take hours.

    Args:
        path: of the file, as messages call it.
        file: at the beginning of a pickle.

    Raises:
        MAEError: tuples nested too deep, too much in them, or no pickle.
    """
    stack: list[_Cost | None] = []
    memo: dict[int, _Cost] = {}
    work = 0
    try:
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name == "MARK":
                stack.append(_MARK)
                continue
            if name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else _number(argument)] = stack[-1] or _PLAIN
                continue
            if name in ("BINGET", "LONG_BINGET", "GET"):
                made = [memo[_number(argument)]]
            else:
                taken = _taken(stack, opcode)
                made = [_tuple_of(taken)] if "TUPLE" in name else [_PLAIN] * len(opcode.stack_after)
            stack.extend(made)
            work += sum(cost.values for cost in made)
            if work > _MOST_WORK or any(cost.deep > _DEEPEST for cost in made):
                raise MAEError(
                    f"{path} cannot be read: its tuples are nested or repeated beyond what any checkpoint needs; get "
                    "the file anew"
                )
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise MAEError(f"{path} cannot be read: it is damaged, or no file of torch.save") from error


def _number(argument: object) -> int:
    """Of a place in the reader's memory."""
    if not isinstance(argument, int):
        raise ValueError(f"{argument!r} is no place")
    return argument


def _taken(stack: list[_Cost | None], opcode: pickletools.OpcodeInfo) -> list[_Cost]:
    """What an opcode takes from the stack, down to a mark where it takes one."""
    taken: list[_Cost] = []
    if pickletools.markobject in opcode.stack_before:
        while (cost := stack.pop()) is not _MARK:
            taken.append(cost)
        below = opcode.stack_before.index(pickletools.markobject)
    else:
        below = len(opcode.stack_before)
    for _ in range(below):
        taken.append(stack.pop() or _PLAIN)
    return taken


def _tuple_of(parts: list[_Cost]) -> _Cost:
    return _Cost(1 + max((part.deep for part in parts), default=0), 1 + sum(part.values for part in parts))
