"""Pre-trained models that timm and Hugging Face know by name, as folders that can be read like any other."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.external_models import first_line, load_timm, package

_READ = ("config.json", "preprocessor_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a repository that are fetched: no pickles, no code."""


def named_in_library(path: Path) -> tuple[str, str] | None:
    """`timm` or `hf`, and a name that it knows; None: a path like others."""
    library, _, name = str(path).partition(":")
    return (library, name) if library in ("timm", "hf") and name and not path.exists() else None


@contextmanager
def library_folder(library: str, name: str) -> Iterator[Path]:
    """A folder with the weights of a model, as `save_pretrained` or timm writes it; it goes when this ends.

    Args:
        library: `timm` or `hf`.
        name: of timm's model with pre-trained weights, or of a repository of the Hugging Face hub.

    Raises:
        UsageError: the library is not installed or knows no such model.
        MAEError: its weights cannot be had.
    """
    with TemporaryDirectory() as place:
        if library == "timm":
            model = load_timm(name)
            import_module("timm").models.save_for_hf(model, place, safe_serialization=True)
            yield Path(place)
            return
        if Path(name).exists():
            raise UsageError(f"hf:{name} is a folder here; leave hf: out")
        hub = package("huggingface_hub")
        try:
            found = hub.snapshot_download(name, local_dir=place, allow_patterns=list(_READ))
        except Exception as error:  # the hub raises errors of many kinds
            raise MAEError(f"hf:{name} cannot be fetched: {first_line(error)}") from error
        yield Path(found)
