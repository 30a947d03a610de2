"""The uniformity term on hand cases, against loops, and over several processes against one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mae.terms.uniformity import Uniformity

FORMS = ["gaussian", "squared_cosine"]


def uniformity_by_loops(features: Tensor, form: str) -> Tensor:
    """In float64, differentiable."""
    unit = [row / row.square().sum().sqrt() for row in features.double()]
    if form == "squared_cosine":
        return sum((one * other).sum() ** 2 for one in unit for other in unit) / len(unit) ** 2
    pairs = [(i, j) for i in range(len(unit)) for j in range(len(unit)) if i != j]
    return (sum((-2 * (unit[i] - unit[j]).square().sum()).exp() for i, j in pairs) / len(pairs)).log()


@pytest.mark.parametrize("form", FORMS)
def test_value_and_gradient_are_those_of_loops(form: str) -> None:
    start = torch.randn(7, 5) * 3
    ours, slow = start.clone().requires_grad_(), start.double().requires_grad_()
    value, expected = Uniformity(form=form).of(ours), uniformity_by_loops(slow, form)
    assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    value.backward()
    expected.backward()
    assert_close(ours.grad.double(), slow.grad, rtol=1e-4, atol=1e-6)


def test_two_opposite_features_are_the_least() -> None:
    pair = torch.tensor([[3.0, 4.0], [-6.0, -8.0]])
    assert float(Uniformity().of(pair)) == pytest.approx(-8, abs=1e-5)
    assert float(Uniformity(form="squared_cosine").of(pair)) == pytest.approx(1, abs=1e-6)  # blind to the sign


def test_orthonormal_features_lie_at_distance_two_squared() -> None:
    features = 7 * torch.eye(5)
    assert float(Uniformity().of(features)) == pytest.approx(-4, abs=1e-6)
    assert float(Uniformity(form="squared_cosine").of(features)) == pytest.approx(1 / 5, abs=1e-6)


@pytest.mark.parametrize(("form", "expected"), [("gaussian", 0.0), ("squared_cosine", 1.0)])
def test_equal_features_are_the_most_and_the_gradient_is_finite(form: str, expected: float) -> None:
    features = torch.tensor([[0.3, -2.0, 1.1]]).repeat(6, 1).requires_grad_()
    value = Uniformity(form=form).of(features)
    assert value.item() == pytest.approx(expected, abs=1e-5)
    value.backward()
    assert features.grad is not None and features.grad.abs().max() < 1e-5  # the most: it is flat there


@pytest.mark.parametrize(("form", "expected"), [("gaussian", 0.0), ("squared_cosine", 1.0)])
def test_a_single_image_has_no_pair(form: str, expected: float) -> None:
    features = torch.tensor([[3.0, 4.0]], requires_grad=True)
    value = Uniformity(form=form).of(features)
    assert value.item() == pytest.approx(expected, abs=1e-6)
    value.backward()
    assert features.grad is not None and features.grad.abs().max() < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_step_down_the_gradient_spreads_the_features(form: str) -> None:
    features = (torch.ones(8, 4) + 0.1 * torch.randn(8, 4)).requires_grad_()
    before = Uniformity(form=form).of(features)
    before.backward()
    assert Uniformity(form=form).of(features.detach() - 0.1 * features.grad) < before.detach()


@pytest.mark.parametrize("form", FORMS)
def test_length_does_not_matter(form: str) -> None:
    features, lengths = torch.randn(6, 4), torch.rand(6, 1) + 0.1
    assert_close(Uniformity(form=form).of(features), Uniformity(form=form).of(features * lengths), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_and_autocast_are_judged_in_float32(form: str) -> None:
    features = torch.randn(6, 40).bfloat16()
    expected = Uniformity(form=form).of(features.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = Uniformity(form=form).of(features)
    assert value.dtype == torch.float32 and torch.equal(value, expected)


def test_the_call_leaves_the_weight_alone() -> None:
    features = torch.randn(6, 4)
    assert torch.equal(Uniformity(weight=0.0).of(features), Uniformity(weight=3.0).of(features))


# One interpreter reads the libraries and forks: `folder`. Each process takes every size-th image and adds a term of
# its own images.
PROCESSES = """
import datetime, json, multiprocessing, sys, warnings
from pathlib import Path
import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from mae.terms.uniformity import Uniformity

def measure(rank, size, folder):
    warnings.simplefilter("error", FutureWarning)
    if size > 1:
        patience = datetime.timedelta(seconds=20)
        store = dist.FileStore(f"{folder}/store{size}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    results = {}
    for form in ("gaussian", "squared_cosine"):
        torch.manual_seed(0)
        model, images = torch.nn.Linear(5, 4), torch.randn(12, 5)
        wrapped = DistributedDataParallel(model) if size > 1 else model
        term = Uniformity(form=form)
        features = wrapped(images[rank::size])
        value = term.of(features)
        (value + 0.1 * features.square().mean()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results[form] = {"value": value.item(), "gradient": gradient.tolist()}
        if rank == 0:
            with torch.no_grad():
                results[form]["alone"] = term.of(model(images)).item()
    Path(folder, f"{size}-{rank}.json").write_text(json.dumps(results))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()

torch.set_num_threads(1)
fork = multiprocessing.get_context("fork")
for size in (1, 2, 3):
    processes = [fork.Process(target=measure, args=(rank, size, sys.argv[1])) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"failed with {size} processes")
"""


@pytest.mark.slow
def test_several_processes_have_the_value_and_gradient_of_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROCESSES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    one = json.loads((tmp_path / "1-0.json").read_text())
    assert all(max(map(abs, one[form]["gradient"])) > 1e-2 for form in FORMS)
    for size, rank in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
        answer = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
        for form in FORMS:
            assert answer[form]["value"] == pytest.approx(one[form]["value"], abs=1e-6)
            assert answer[form]["gradient"] == pytest.approx(one[form]["gradient"], abs=1e-6)
            if rank == 0:  # without gradients it need not wait for the others, which never ask
                assert answer[form]["alone"] == pytest.approx(one[form]["alone"], abs=1e-6)
