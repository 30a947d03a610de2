"""Go on with a run: what may change since it was begun, and the weights that it began with."""

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from mae.config import RunConfig, is_changeable
from mae.data.sources.open import absolute_source
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import weights_digest
from mae.pretraining.derived import terms_of_batch
from mae.pretraining.init_weights import InitWeights
from mae.pretraining.resolve import RunContext, find_init_weights, weights_of
from mae.pretraining.teacher import absolute_path
from mae.training.run_folder import RunFolder, check_resumable


def stored_config(config: RunConfig, folder: RunFolder | None, given: Collection[str]) -> tuple[RunConfig, RunFolder]:
    """The configuration of the run to go on with; only machine options and the place of the images may change.

    Raises:
        UsageError: no run is there, its configuration cannot be read, or it was begun with other options.
    """
    folder = check_resumable(folder)
    stored = RunConfig.read(folder.config)
    asked = {**config.flat(), "source": absolute_source(config.source)}
    asked |= {name: absolute_path(asked[name]) for name in ("init_from", "teacher_source") if asked.get(name)}
    # Images may be in another place by now: they are known again by their names and content.
    changes = {name: asked[name] for name in given if not is_changeable(name) and name != "source"}
    begun = stored.flat()
    if differing := [name for name, value in changes.items() if stored.override({name: value}) != stored]:
        if set(differing) <= {"epochs", "steps"}:
            raise UsageError(_why_not_longer(stored, folder, {name: asked[name] for name in differing}))
        told = "; ".join(f"{name} was {begun.get(name)!r}, is now {asked[name]!r}" for name in differing)
        raise UsageError(
            f"the run in {folder.root} was begun with other options: {told}. Leave those options out to resume it, "
            "or start a new run in another folder"
        )
    changed = {name: asked[name] for name in given if is_changeable(name) or name == "source"}
    before = stored.machine.accumulate
    for kind in terms_of_batch(stored) if changed.get("accumulate", before) != before else []:
        raise UsageError(
            f"--accumulate was {before}, is now {changed['accumulate']}: --{kind} compares the images of a "
            "micro-batch, so this would be another objective. Leave the option out, or start a new run"
        )
    return stored.override(changed), folder


def _why_not_longer(stored: RunConfig, folder: RunFolder, asked: Mapping[str, Any]) -> str:
    """Why a run keeps its length: its rate falls along a cosine of that length, which cannot be gone on with."""
    lengths = {
        name: value for name, value in stored.flat().items() if name in ("epochs", "steps") and value is not None
    }
    was, now = (
        ", ".join(f"{value:g} {name}" for name, value in length.items() if value is not None)
        for length in (lengths, asked)
    )
    begin = f"mae pretrain {shlex.quote(stored.source)} --init-from {shlex.quote(str(folder.root))} --out NEW"
    return (
        f"the run in {folder.root} is one of {was}, and {now} are asked for: its learning rate falls along a cosine of "
        f"that length, and raising it again would make another run of it. Leave --{next(iter(asked))} out to "
        f"resume it; to train its weights for longer, with a schedule of their own, begin a new run: {begin} with "
        "--epochs or --steps"
    )


def find_begun_weights(prepared: RunContext) -> InitWeights | None:
    """The weights that a run began with, for one that goes on from before its first checkpoint; None: fresh ones.

    Raises:
        UsageError: see `open_init_weights`; other weights than when the run was begun.
        MAEError: see `open_init_weights`.
    """
    start, begun = find_init_weights(prepared.config, prepared.world), prepared.found.get("start")
    if start is None or begun is None:
        return start
    digest = begun.get("digest")  # earlier versions wrote none
    if weights_of(prepared.folder) != start.config or digest not in (None, weights_digest(start.model)):
        raise UsageError(
            f"--init-from {prepared.config.init_from} holds other weights than when the run was begun; put the old "
            "ones back there, or start a new run in another folder"
        )
    return start
