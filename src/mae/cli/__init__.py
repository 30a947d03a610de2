"""The command line: one file a command; each parses, calls and prints.

Nothing here imports PyTorch before it has something to compute, so that `--help` answers at once.
"""

import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from shutil import get_terminal_size

from mae.cli.ending import cleaned_up
from mae.cli.output import tolerant_output
from mae.credentials import all_concealed
from mae.errors import MAEError, Stopped, UsageError
from mae.records import check_text
from mae.text import visible
from mae.version import __version__

COMMANDS = {
    "pretrain": ("mae.cli.pretrain", "train a masked autoencoder on images"),
    "evaluate": ("mae.cli.evaluate", "tell how good a model's features are"),
    "finetune": ("mae.cli.finetune", "train a model's encoder to segment or to name classes, beside other weights"),
    "predict": ("mae.cli.predict", "name the classes of images by a trained classifier"),
    "embed": ("mae.cli.embed", "write a model's features of images to a file"),
    "neighbours": ("mae.cli.neighbours", "draw the images that a model finds alike"),
    "explore": ("mae.cli.explore", "look into a run: a page with a map of its images, odd ones and duplicates"),
    "reconstruct": ("mae.cli.reconstruct", "draw what a model makes of masked patches, or fill a hole"),
    "web": ("mae.cli.web", "draw a mask in the browser and see what a model makes of it"),
    "import": (
        "mae.cli.import_weights",
        "take in weights of the official MAE, timm and others, by file or by name",
    ),
    "export": ("mae.cli.export", "write a model as timm, Hugging Face or the official code read it, with proof"),
    "pack": ("mae.cli.pack", "write images into a few large files that are fast to read"),
    "plan": ("mae.cli.plan", "tell what a run would take, and the command for it"),
    "doctor": ("mae.cli.doctor", "check a run before it begins, or as it stands"),
    "watch": ("mae.cli.watch", "show the state of a run, live or over"),
    "replay": ("mae.cli.replay", "compute a step again that ended a run, and tell what breaks"),
    "study": ("mae.cli.study", "train in several ways, all else being equal, and tell which is better"),
    "bench": ("mae.cli.bench", "measure speed on this machine, beside its limits and a peer"),
    "demo": ("mae.cli.demo", "pre-train on photographs in some minutes and show what was learned"),
    "list": ("mae.cli.listing", "list models, recipes, public weights, masks, targets and other components"),
    "show": ("mae.cli.show", "tell a model's sizes, parameters and arithmetic, or the options of a component"),
}

_ANSWERS = {"list", "show", "plan", "doctor", "watch", "bench"}
"""Commands whose result is what they print; of the others it is files, and printing only tells of the work."""

_COMPUTE_LITTLE = {"list", "show"}
"""Commands that need not look, for a twentieth of a second, how busy the machine is."""

_NARROWEST = 40
"""Columns for which help is laid out at the least: for some ten tyro would go on without end, and take all memory."""

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""With 700, Python's own, it looks for garbage all the while PyTorch is loaded, whose half a million objects stay: a
second of each command."""

INTERRUPTED, TOLD_TO_END = 130, 75
"""Exit codes of what Ctrl-C stopped, and of what another signal did: somebody wanted the machine, and the same command
goes on with it (75 is the system's code for a failure that passes)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 1 for a failure; 2 for a wrong request; 130 where Ctrl-C stopped it; 75 where another signal
        did. A run is then saved, and the same command with `--resume` goes on with it.

    Raises:
        SystemExit: a wrong option (2), help (0), or the reader of what is printed went away (141).
    """
    args = [_at_home(arg) for arg in all_concealed(sys.argv[1:] if argv is None else argv)]
    if get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
    answers = not args or args[0] in _ANSWERS or not {"-h", "--help", "--version"}.isdisjoint(args)
    with tolerant_output(needed=answers):
        return _told(args)


def _told(args: list[str]) -> int:
    """Run a command; an error becomes a line and an exit code."""
    try:
        with cleaned_up():
            try:
                for arg in args:
                    check_text(arg, name="an argument")
                return _dispatch(args)
            finally:
                sys.stdout.flush()
    except UsageError as error:
        return _complain(error, code=2)
    except MAEError as error:
        return _complain(error, code=1)
    except OSError as error:
        return _complain(_told_by_system(error), code=1)
    except Stopped as stop:
        return _complain(stop, code=code_of_signal(stop.by))
    except KeyboardInterrupt as stop:
        return _complain(str(stop) or "interrupted", code=INTERRUPTED)


def _at_home(arg: str) -> str:
    """An argument whose path begins with `~/`, which a shell leaves so in `--out=~/runs` and in quotes, at the home."""
    option, equals, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
    return f"{option}{equals}{os.path.expanduser(value)}" if value == "~" or value.startswith("~/") else arg


def code_of_signal(number: int) -> int:
    """The exit code of what a signal stopped: Ctrl-C, or somebody who wanted the machine."""
    return INTERRUPTED if number == signal.SIGINT else TOLD_TO_END


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if args[0] == "--version":
        sys.stdout.write(f"mae {__version__}\n")
        return 0
    if args[0] not in COMMANDS:
        raise UsageError(f"unknown command {args[0]!r}; there are: {', '.join(COMMANDS)}")
    if not {"-h", "--help"} & set(args):
        if args[0] not in _COMPUTE_LITTLE:
            from mae.contention import set_spin_count

            set_spin_count()
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    return import_module(COMMANDS[args[0]][0]).run(args[1:])


def _help() -> str:
    lines = "".join(f"  {name:<11} {what}\n" for name, (_, what) in COMMANDS.items())
    return (
        "usage: mae COMMAND ...\n\nMasked-autoencoder pre-training on any images.\n\n"
        f"commands:\n{lines}\n'mae COMMAND --help' tells more of each; 'mae --version' names the version.\n"
    )


def _complain(error: object, *, code: int) -> int:
    if _is_told_elsewhere(error, code):
        return code
    # In one line: a name that holds line breaks would write lines of its own, as if they were ours.
    sys.stderr.write(f"mae: error: {' '.join(visible(str(error)).splitlines())}\n")
    return code


def _told_by_system(error: OSError) -> str:
    """What the system says of a file: the one that was to be written, where two are named."""
    where = error.filename2 or error.filename
    text = str(error) if error.strerror is None else f"{where}: {error.strerror}" if where else error.strerror
    return f"{text}; free some space, or choose another place" if error.errno == errno.ENOSPC else text


def _is_told_elsewhere(error: object, code: int) -> bool:
    """Whether another process of the run has the same to tell."""
    rank = os.environ.get("RANK", "0")
    if code == 2 and os.environ.get("LOCAL_RANK", rank) != "0":  # the processes of one machine see the same files
        return True
    return rank != "0" and (code in (INTERRUPTED, TOLD_TO_END) or getattr(error, "told_by_main", False))
