"""What holds for the package as a whole."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

import mae
from mae.core.kinds import ROOMS

ROOT = Path(mae.__file__).parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(mae.__path__, "mae.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_and_documents_itself(name: str):
    assert importlib.import_module(name).__doc__


def test_every_public_name_is_there():
    assert set(dir(mae)) >= {"create_model", "list_models", "load", "pretrain", "MaskedAutoencoder"}
    for name in mae.__all__:
        assert getattr(mae, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mae.nonsense  # noqa: B018


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_ever_unpickled_or_run_from_a_file(path: Path):
    """No pickle, no shell, no eval, whatever a file says; what `torch.save` wrote is read by a reader of our own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"pickle", "dill", "marshal", "shelve", "yaml"}
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("pickle", "dill", "marshal", "shelve", "yaml")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "os.system", "pickle.load", "torch.load")
            assert not any(word.arg == "shell" for word in node.keywords)
            told = [ast.unparse(word.value) for word in node.keywords if word.arg == "allow_pickle"]
            assert set(told) <= {"False"}
            if called in ("np.load", "numpy.load", "np.lib.format.read_array"):
                assert told == ["False"], "numpy is told so itself, whatever its default"


def in_fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("command", ["", "pretrain", "plan", "doctor", "watch", "evaluate", "list", "show", "demo"])
def test_help_needs_no_torch(command: str):
    """Help must answer in under a fifth of a second; loading PyTorch alone takes longer, pydantic half of it."""
    assert answered([[command, "--help"] if command else ["--help"]]) == ["True"]


def test_lists_of_components_need_no_torch():
    assert answered([*(["list", room] for room in ROOMS), ["show", "mask", "block"]]) == ["True"]


def answered(commands: list[list[str]]) -> list[str]:
    """Whether something was printed, and what was imported that is slow."""
    code = (
        "import sys, contextlib, io\n"
        "from mae.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):\n"
        f"    [main(args) for args in {commands!r}]\n"
        "print(bool(shown.getvalue()), *{'torch', 'matplotlib', 'pydantic'} & sys.modules.keys())"
    )
    return in_fresh_python(code).split()


def test_importing_changes_nothing_global():
    code = (
        "import sys, torch, warnings\n"
        "before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype(), list(warnings.filters)\n"
        f"import {', '.join(MODULES)}\n"
        "after = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "print(bool((before[0] == after[0]).all()) and before[1:3] == after[1:])"
    )
    assert in_fresh_python(code).strip() == "True"


def test_pretraining_knows_no_labels():
    asked = {field.name for field in fields(mae.RunConfig)} | set(signature(mae.pretrain).parameters)
    # `monitor` lends labelled images to look at: see tests/pretraining/test_monitor.py for what never reaches training.
    assert not [name for name in asked if "label" in name or "class" in name or "supervis" in name]
