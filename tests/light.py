"""What makes runs light enough for tests; each change is made through a patch, which undoes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
import sklearn.datasets
from sklearn.utils import Bunch

WATCHED = {"LABEL_FREE": 24, "VIEWED": 8, "TRAIN": 20, "TEST": 10}
_DIGITS = sklearn.datasets.load_digits()
_FEW_DIGITS = 400


def without_doctor(patch: pytest.MonkeyPatch) -> None:
    """Runs begin without the doctor's checks, which take seconds."""
    doctor = import_module("mae.pretraining.checks.doctor")
    found = doctor.Diagnosis(findings=(), seconds=0.0)
    patch.setattr("mae.pretraining.run.examine", lambda prepared, model: found)


def few_digits(patch: pytest.MonkeyPatch) -> None:
    """`builtin:digits` is read once and has its first digits alone."""
    few = Bunch(images=_DIGITS.images[:_FEW_DIGITS], target=_DIGITS.target[:_FEW_DIGITS])
    patch.setattr(sklearn.datasets, "load_digits", lambda: few)


def in_float32(patch: pytest.MonkeyPatch) -> None:
    """CPUs compute in float32, those that could in bfloat16 too: tests are the same on every machine."""
    patch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing: drawing takes longer than a tiny run."""
    for name in ("reconstruct", "draw_panels"):
        patch.setattr(f"mae.pretraining.build.{name}", lambda *args, **options: None)
    patch.setattr("mae.pretraining.summary.draw_curve", lambda *args, **options: None)


def few_looks(patch: pytest.MonkeyPatch) -> None:
    """Runs look at the features of few images."""
    for name, count in WATCHED.items():
        patch.setattr(f"mae.pretraining.watch.online_eval._{name}_IMAGES", count)


@contextmanager
def light_runs() -> Iterator[None]:
    """All of these, for fixtures that are made before those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        for lighten in (without_doctor, few_digits, in_float32, without_pictures, few_looks):
            lighten(patch)
        yield


def little_measuring(patch: pytest.MonkeyPatch) -> None:
    """What doctor and plan time is timed less long, and fewer steps show whether one batch overfits."""
    for name in ("checks.doctor._STEP_SECONDS", "checks.doctor._LOADING_SECONDS", "checks.doctor._DATA_SECONDS",
                 "estimate.estimate._PROBE_SECONDS", "estimate.estimate._STEP_SECONDS",
                 "estimate.estimate._LOADING_SECONDS", "estimate.finetuning._STEP_SECONDS"):  # fmt: skip
        patch.setattr(f"mae.pretraining.{name}", 0.1)
    patch.setattr("mae.pretraining.checks.model._OVERFIT_STEPS", 12)


def forget_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """No set fits in memory from now on, so that what is broken is met only when it is read."""
    monkeypatch.setattr("mae.data.dataset.images.psutil.virtual_memory", lambda: SimpleNamespace(available=0))
