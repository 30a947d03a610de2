"""`mae finetune KIND MODEL --data ...`: train an encoder for a task."""

import sys
from dataclasses import replace
from pathlib import Path

from mae.cli.evaluate import Request, one_protocol
from mae.evaluation import protocols
from mae.evaluation.protocol import EvaluationProtocol
from mae.records import check_known, safe_name

_PREFIX = "finetune"
_CLASSES = "classes"
_IMPORTED = Path("runs") / "imported"
_LIBRARIES = ("timm:", "hf:")


def kinds() -> dict[str, type[EvaluationProtocol]]:
    """The protocols that fine-tune, by what the encoder is trained for."""
    found = [protocol for protocol in protocols.PROTOCOLS if protocol.name.startswith(_PREFIX)]
    return {protocol.name.removeprefix(_PREFIX).lstrip("_") or _CLASSES: protocol for protocol in found}


def run(args: list[str]) -> int:
    """Train a model's encoder for a task, and say what it is worth there."""
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: mae finetune KIND MODEL --data LABELLED ...\n\n{kinds_help('mae finetune')}")
        return 0
    kind, rest = args[0], args[1:]
    return one_protocol(find_kind(kind), rest, command=["finetune", kind], prepare=brought_in)


def find_kind(name: str) -> type[EvaluationProtocol]:
    """The protocol of a kind of fine-tuning.

    Raises:
        UsageError: there is no such kind.
    """
    known = kinds()
    check_known([name], known, what="kind of fine-tuning")
    return known[name]


def kinds_help(command: str) -> str:
    """The kinds and what each does."""
    lines = "".join(f"  {kind:<16} {protocol.summary}\n" for kind, protocol in kinds().items())
    return (
        f"Train a model's encoder for a task.\n\nkinds:\n{lines}\n'{command} KIND --help' shows the options of each.\n"
    )


def brought_in(
    request: Request, protocol: EvaluationProtocol, folder: Path = _IMPORTED
) -> tuple[Request, EvaluationProtocol]:
    """The same request, with models of other libraries as files of this package, which alone can be trained.

    Args:
        request: it.
        protocol: it.
        folder: where the files are.
    """
    if beside := getattr(protocol, "beside", ()):
        protocol = replace(protocol, beside=tuple(_as_file(model, folder) for model in beside))  # type: ignore[type-var]
    return replace(request, model=_as_file(request.model, folder)), protocol


def _as_file(model: str, folder: Path) -> str:
    """A model of timm or Hugging Face as a file, which is made once; any other as it is named."""
    if not model.startswith(_LIBRARIES):
        return model
    from filelock import FileLock

    from mae.interop.imports.convert import WeightMetadata
    from mae.interop.imports.open import ImportOverrides, import_model

    target = folder / f"{safe_name(model).strip('-.')}.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):  # several processes may want it
        if not target.exists():
            import_model(
                Path(model),
                target,
                overrides=ImportOverrides(),
                metadata=WeightMetadata(),
                allow_partial=None,
                photo_check=False,
            )
    return str(target)
