"""Options of components and of a run: what they are called together, and how their values are checked."""

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from mae import records
from mae.config import GROUPS, RunConfig
from mae.core.component import _UNSURE, Alias, _adapter, _plain
from mae.core.describe import Option, describe
from mae.core.kinds import ROOMS, kinds
from mae.core.method import SLOTS

EVERY = [(slot, kind) for room, slot in ROOMS.items() for kind in kinds(room)]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 1 << 60, 1 << 2000, 0.0, 0.5, 1.0, 1.5, -0.5, 2e4, 1e300, "", "1", "mse", "learned",
    "uint8", "\u00fc", "\udcff", (), (1,), (1, 2), [0.9, 0.95], (0.5, 2.0), (0.1, 0.2, 0.3), ("red", "nir"),
    (1, "a"), {}, Path("runs/a"),
]  # fmt: skip


def test_a_name_is_one_option_of_all_that_can_be_chosen_together():
    """Two components may share one only as an alias both declare, of one meaning: it then sets both."""
    owners: dict[str, list[tuple[str, str, Option]]] = defaultdict(list)
    for slot, kind in EVERY:
        for option in describe(next(room for room in ROOMS if ROOMS[room] == slot), kind).options:
            owners[option.flat].append((slot, kind, option))
    of_the_run = {*SLOTS, "terms", "source", "recipe", "model", "init_from", "resume", "gpus", "json", "hours"}
    of_the_run |= {field.name for group in GROUPS.values() for field in fields(group)}
    assert not of_the_run & owners.keys()
    assert not [name for name in owners if name.startswith("no_")]  # --no-x is the other side of --x
    for flat, options in owners.items():
        for (slot, kind, one), (other_slot, other_kind, other) in combinations(options, 2):
            if slot != other_slot or slot == "term":
                assert Alias(flat) in getattr(one.type, "__metadata__", ()), (flat, kind, other_kind)
                assert (one.type, one.default, one.help) == (other.type, other.default, other.help), flat


HINTS = {
    **{f"{slot} {kind} {option.name}": option.type
       for room, slot in ROOMS.items() for kind in kinds(room) for option in describe(room, kind).options},
    **{f"{name} {field}": hint for name, group in GROUPS.items()
       for field, hint in get_type_hints(group, include_extras=True).items()},
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_what_is_plainly_right_is_what_pydantic_says(name: str):
    hint = HINTS[name]
    for value in VALUES:
        if (plain := _plain(value, hint)) is not _UNSURE:
            decided = _adapter(hint).validate_json(records.json_text(value))
            assert plain == decided and type(plain) is type(decided), value


def test_what_is_plainly_wrong_is_left_to_pydantic():
    taken = {name: [value for value in VALUES if _plain(value, hint) is not _UNSURE] for name, hint in HINTS.items()}
    assert taken["mask random ratio"] == [0.5] and taken["loss smooth_l1 beta"][:2] == [1, 3]
    assert taken["data crop_scale"] == taken["optim betas"] == [[0.9, 0.95]]
    assert taken["machine shard"] == [True, False]
    with pytest.raises(ValidationError):
        _adapter(HINTS["mask random ratio"]).validate_json("1")


def test_recipes_and_defaults_are_taken_without_pydantic():
    code = """
import sys
from mae.recipes import list_recipes, recipe_config
for name in list_recipes():
    recipe_config(name).flat()
print("pydantic" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_kinds_of_an_installed_package_are_there(tmp_path: Path):
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (tmp_path / "theirs-1.dist-info/entry_points.txt").write_text("[openmae.masks]\ntheirs = theirs:Theirs\n")
    (tmp_path / "theirs.py").write_text(
        """
from dataclasses import dataclass
from typing import ClassVar
from mae.core.component import Share
from mae.masks.random import RandomMasking

@dataclass(frozen=True, kw_only=True)
class Theirs(RandomMasking):
    \"\"\"A mask of theirs.\"\"\"

    kind: ClassVar[str] = "theirs"

    ratio: Share = 0.5
    \"\"\"Fraction of the patches masked.\"\"\"
    """
    )
    there = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for words, told in {"list masks": "A mask of theirs.", "show mask theirs": "0.5"}.items():
        command = [sys.executable, "-m", "mae", *words.split()]
        done = subprocess.run(command, env=there, capture_output=True, text=True, check=True)
        assert told in done.stdout
    assert "theirs" not in kinds("masks")


def test_names_of_a_run_are_those_of_its_groups():
    groups = {field.name for group in GROUPS.values() for field in fields(group)}
    assert len(groups) == sum(len(fields(group)) for group in GROUPS.values())
    assert groups <= RunConfig().flat().keys()
