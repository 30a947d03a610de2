import copy
import itertools
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from light import without_pictures
from pieces import batch_of
from resuming import whole_and_resumed
from safetensors.torch import load_file
from sklearn.cluster import KMeans
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import mae
from mae.core.contracts import Batch
from mae.evaluation.common.baselines import measure_baselines
from mae.layers.codebook import Codebook, _patterns, _surroundings
from mae.pretraining.checks.model import Subject, check_model, check_target
from mae.randomness import sample_keys
from mae.teachers.codebook import CodebookTeacher
from mae.training.run_folder import find_weights

SIZES: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3,
    "decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2,
}  # fmt: skip
CODES: dict[str, Any] = {"target": "codes", "teacher": "codebook", "teacher_window": 1, "loss": "cross_entropy"}


def model_with(**options: Any) -> mae.MaskedAutoencoder:
    torch.manual_seed(0)
    return mae.create_model("mae_vit_tiny_patch16", **SIZES, **CODES, **options)


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def stripes(count: int, seed: int) -> torch.Tensor:
    """Stripes of one direction and distance an image, at any place: what is visible tells what is masked."""
    generator = torch.Generator().manual_seed(seed)
    angle, phase = (torch.rand(count, 1, 1, generator=generator) * bound for bound in (torch.pi, 2 * torch.pi))
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    wave = torch.sin(angle.cos() * columns + angle.sin() * rows + phase)
    return wave[:, None].expand(-1, 3, -1, -1) + 0.05 * torch.randn(count, 3, 16, 16, generator=generator)


def batch_for(images: torch.Tensor, epoch: int = 0) -> Batch:
    batch = batch_of(images, 4)
    return Batch(x=batch.x, tokenizer=batch.tokenizer, keys=sample_keys(0, epoch, torch.arange(len(images))))


def codebook(**options: Any) -> Codebook:
    teacher = CodebookTeacher(**{"codes": 6, "window": 1, **options})
    return teacher.build(SimpleNamespace(tokenizer=batch_of(noise(1, 0), 4).tokenizer))


def test_each_patch_has_the_nearest_code_whatever_its_brightness_and_contrast():
    network, images = codebook().eval(), noise(3, 0)
    found = network(batch_for(images))["codes"]
    assert found.shape == (3, 16, 1)
    for image, codes in zip(batch_for(images).cut(), found, strict=True):
        for patch, code in zip(image, codes, strict=True):
            pattern = (patch - patch.mean()) / patch.std(correction=0)
            assert int(code) == int((network.codes - pattern).square().sum(dim=1).argmin())
    assert torch.equal(network(batch_for(3 * images - 7))["codes"], found)
    assert network(batch_for(torch.ones(1, 3, 16, 16)))["codes"].isfinite().all()  # flat patches have a code too


@pytest.mark.parametrize("window", [2, 3, 5])
def test_a_code_may_describe_what_is_around_a_patch(window: int):
    """A slow loop: the surroundings by their places, those beyond the border as the border is."""
    images = noise(2, 0)[:, :, :8]  # 2 x 4 patches
    found = _surroundings(batch_for(images), window).unflatten(1, (2, 4)).unflatten(-1, (3, 4, 4))
    before = 4 * (window - 1) // 2
    for row, column in itertools.product(range(2), range(4)):
        down = (torch.arange(4 * window) + 4 * row - before).clamp(0, 7)
        across = (torch.arange(4 * window) + 4 * column - before).clamp(0, 15)
        around = images[:, :, down][..., across]
        blocks = around.unflatten(2, (4, window)).unflatten(4, (4, window)).mean(dim=(3, 5))
        assert_close(found[:, row, column], blocks)
    network = codebook(window=window).eval()
    assert torch.equal(network(batch_for(3 * images - 7))["codes"], network(batch_for(images))["codes"])


@pytest.mark.parametrize(("patch_size", "window"), [(2, 3), (4, 3), (7, 3), (8, 1), (16, 1)])
def test_codes_of_small_patches_describe_their_surroundings(patch_size: int, window: int):
    model = mae.create_model("mae_vit_tiny_patch16", img_size=112, patch_size=patch_size, teacher="codebook")
    assert model.teacher.window == window


def test_surroundings_with_a_gap_have_no_code():
    network, images = codebook(window=3).eval(), noise(1, 0)
    images[:, :, 0, 0] = torch.nan
    gaps = network(batch_for(images))["codes"].isnan().view(4, 4)
    assert gaps[:2, :2].all() and gaps.sum() == 4


def test_codes_are_moving_means_of_their_patches():
    """A slow loop of van den Oord et al. 2017, equations of appendix A.1, over steps of two parts."""
    network = codebook(decay=0.8, restart=0.0)
    codes, used, sums = network.codes.clone(), torch.zeros(6), torch.zeros(6, 48)
    for step in range(4):
        seen, total = torch.zeros(6), torch.zeros(6, 48)
        for part in range(2):
            batch = batch_for(stripes(5, seed=10 * step + part), epoch=step)
            given = network(batch)["codes"]
            for pattern in _patterns(batch.cut()).flatten(0, 1):
                code = int((codes - pattern).square().sum(dim=1).argmin())
                seen[code], total[code] = seen[code] + 1, total[code] + pattern
            assert set(given.flatten().tolist()) <= set(seen.nonzero().flatten().tolist())
        network.after_step(torch.nn.Identity(), 1.0)
        used, sums = 0.8 * used + 0.2 * seen, 0.8 * sums + 0.2 * total
        for code in range(6):
            if used[code] > 0:
                codes[code] = sums[code] / used[code]
        assert_close(network.codes, codes, rtol=1e-4, atol=1e-5)
        assert_close(network.used, used)
    assert network.restarted == 0


def distance(network: Codebook, images: torch.Tensor) -> float:
    patterns = _patterns(batch_for(images).cut())
    return float((network.codes[network.nearest(patterns)] - patterns).square().mean())


@pytest.mark.parametrize(("make", "structured"), [(stripes, True), (noise, False)])
def test_it_comes_near_to_the_clusters_of_scikit_learn(make: Any, structured: bool):
    network, images = codebook(codes=16, decay=0.9), make(64, 0)
    for step in range(60):
        network(batch_for(images, epoch=step))
        network.after_step(torch.nn.Identity(), 1.0)
    patterns = _patterns(batch_for(images).cut()).flatten(0, 1).numpy()
    best = KMeans(16, n_init=4, random_state=0).fit(patterns).inertia_ / patterns.size
    assert distance(network, images) < 1.1 * best
    assert (distance(network, images) < 0.5) == structured  # of a std of 1


def test_codes_that_nothing_is_near_to_begin_anew_at_patches():
    network = codebook(codes=40)
    network.codes[1:] = 1000.0
    network(batch := batch_for(stripes(4, 0)))
    network.after_step(torch.nn.Identity(), 0.1)
    patches = {tuple(pattern.tolist()) for pattern in _patterns(batch.cut()).flatten(0, 1)}
    assert network.restarted == 39 and all(tuple(code.tolist()) in patches for code in network.codes[1:])
    assert len({tuple(code.tolist()) for code in network.codes}) == 40
    never = codebook(codes=40, restart=0.0)
    never.codes[1:] = 1000.0
    never(batch)
    never.after_step(torch.nn.Identity(), 0.1)
    assert never.restarted == 0 and never.numbers()["codes_used"] == pytest.approx(1)


@pytest.mark.parametrize("flat", [True, False])
def test_patches_that_are_all_alike_are_told_as_one_code(flat: bool):
    """All codes begin anew at the same patch, and rounding decides in each step which of them is the nearest."""
    patch = torch.zeros(1, 3, 4, 4) if flat else noise(1, 0)[:, :, :4, :4]
    network, images = codebook(codes=64), patch.repeat(8, 1, 4, 4)
    for step in range(200):
        network(batch_for(images, epoch=step))
        network.after_step(torch.nn.Identity(), 0.0)
    assert network.numbers()["codes_used"] == pytest.approx(1, abs=0.01)


def test_before_the_first_step_no_code_is_used():
    network = codebook()
    assert network.numbers()["codes_used"] == 0
    network(batch_for(noise(2, 0)))
    network.after_step(torch.nn.Identity(), 0.0)
    assert network.numbers()["codes_used"] > 1


class NoAtomicSums(TorchDispatchMode):
    """Refuses what adds in any order on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not func.overloadpacket.__name__.startswith(("index_add", "scatter_add", "scatter_reduce", "put"))
        return func(*args, **(kwargs or {}))


def test_a_step_adds_patches_in_one_order():
    network = codebook()
    with NoAtomicSums():
        network(batch_for(noise(2, 0)))
        network.after_step(torch.nn.Identity(), 0.0)
    assert network.used.sum() > 0


@pytest.mark.parametrize("codes", [8, 40, 100])
def test_micro_batches_make_the_codes_of_the_whole_batch(codes: int):
    """Those that begin anew too, of which the first step has many: at patches of all 64."""
    whole, parts = codebook(codes=codes, restart=0.5), codebook(codes=codes, restart=0.5)
    for step in range(3):
        batch = batch_for(stripes(4, step), epoch=step)
        whole(batch)
        for rows in (slice(0, 1), slice(1, 4)):
            parts(Batch(x=batch.x[rows], tokenizer=batch.tokenizer, keys=batch.keys[rows]))
        for network in (whole, parts):
            network.after_step(torch.nn.Identity(), 0.1)
    assert whole.restarted > 0
    assert_close(parts.state_dict(), whole.state_dict())


def subject_of(model: mae.MaskedAutoencoder, images: torch.Tensor) -> Subject:
    return Subject(
        model=model, images=images, numbers=torch.arange(64), seed=0, mask_ratio=0.75, betas=(0.9, 0.95),
        weight_decay=0.05,
    )  # fmt: skip


@pytest.mark.parametrize(("images", "level"), [(noise(4, 0), "ok"), (torch.ones(4, 3, 16, 16), "stop")])
def test_patches_of_one_code_leave_nothing_to_predict(images: torch.Tensor, level: str):
    finding = check_target(subject_of(model_with(), images))
    assert finding.level == level and (finding.value == "1 classes among the masked patches") == (level == "stop")


def test_it_learns_of_what_is_trained_on_alone():
    model, images, keys = model_with(), noise(4, 0), sample_keys(0, 0, torch.arange(4))
    assert isinstance(model.teacher, Codebook)
    before = copy.deepcopy(model.teacher.state_dict())
    model.eval()(images)
    model.train().taught(batch_for(images))
    check_model(subject_of(model, images))
    assert_close(model.teacher.state_dict(), before, rtol=0, atol=0)
    model(images, keys=keys)
    assert model.teacher.seen.sum() == 4 * 16
    model(images)  # without keys
    assert model.teacher.seen.sum() == (model.teacher.draws < 1).sum() == 8 * 16


def test_patches_without_data_have_no_code_and_count_nothing():
    model, images = model_with(nodata="nan"), noise(4, 0)
    images[:, :, :4, :4] = torch.nan
    output = model(images, keys=sample_keys(0, 0, torch.arange(4)))
    assert output.loss.isfinite() and isinstance(model.teacher, Codebook)
    assert model.teacher.seen.sum() == 4 * 15
    patches = {tuple(each.tolist()) for each in _patterns(batch_for(images).cut())[:, 1:].flatten(0, 1)}
    assert {tuple(each.tolist()) for each in model.teacher.drawn[: 4 * 15]} == patches
    drawn = model.teacher.drawn.clone()
    model.teacher(batch_for(torch.full_like(images, torch.nan)))
    assert model.teacher.seen.sum() == 4 * 15 and torch.equal(model.teacher.drawn, drawn)  # there was none to draw
    model.teacher.after_step(model, 0.1)
    assert {tuple(each.tolist()) for each in model.teacher.drawn} == patches  # again, since there are more codes
    gaps = model.taught(batch_for(images))["codes"].isnan()
    assert gaps[:, 0].all() and not gaps[:, 1:].any()


def test_it_is_made_where_the_model_is():
    assert {each.device.type for each in model_with().to("meta").teacher.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(("make", "learns"), [(stripes, True), (noise, False)])
def test_codes_of_structure_are_learned_and_those_of_noise_are_not(make: Any, learns: bool):
    model = model_with(teacher_codes=16, teacher_decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        x, keys = make(64, seed=step), sample_keys(0, step, torch.arange(64))
        optimizer.zero_grad()
        model(x, plan=model.plan(x, keys=keys), keys=keys).loss.backward()
        optimizer.step()
        if step < 75:  # then it stands still, so that its codes can be learned
            model.teacher.after_step(model, 0.5)
    model.eval()
    x = make(128, seed=10_000)
    plan = model.plan(x, keys=sample_keys(0, 9, torch.arange(128)))
    trivial = measure_baselines(
        model.target, model.tokenizer, [(x, plan)], loss=model.loss, taught=model.taught, width=16
    )
    assert trivial.zero == pytest.approx(torch.log(torch.tensor(16.0)).item(), rel=1e-5)
    with torch.no_grad():
        loss = float(model(x, plan=plan).loss)
    best = min(trivial.as_dict().values())
    assert loss < 0.75 * best if learns else loss > 0.97 * best


OWN = "term_teachers.code_prediction."
TINY = {"model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 3}


def pretrain(out: Path, **options: Any) -> mae.PretrainResult:
    own = {"code_prediction": 0.2, "code_prediction_codes": 32}
    run = {**CODES, "teacher_codes": 32, "steps": 6, "batch_size": 8, "lr": 0.01,
           "checkpoint_every": 1, "device": "cpu", "accumulate": 2}  # fmt: skip
    return mae.pretrain("builtin:digits", out=out, quiet=True, **TINY, **own, **run, **options)


def test_a_run_resumes_with_the_same_codes_and_tells_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_pictures(monkeypatch)
    whole, resumed = whole_and_resumed(tmp_path, pretrain)
    for name in (None, "teacher.safetensors"):
        files = [find_weights(run.folder) for run in (whole, resumed)]
        one, other = (load_file(file if name is None else file.with_name(name)) for file in files)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    for name in ("codes_used", "code_prediction_codes_used"):
        assert 1 < whole.summary["evaluation"][name]["last"] <= 32
    held = {name: tensor for name, tensor in mae.load(whole.folder).state_dict().items() if "teacher" in name}
    assert all(name.startswith("term_teachers.") for name in held) and held[f"{OWN}used"].count_nonzero() > 1


def test_a_run_resumes_exactly_after_a_step_that_was_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What such a step has shown is dropped: each process would hold its own. Codes begin anew in most steps here."""
    without_pictures(monkeypatch)
    step = count()

    def all_but_the_third(*numbers: torch.Tensor) -> torch.Tensor:
        number = next(step)
        if number == 7:  # the second step of the second run, which ends with the next one
            signal.raise_signal(signal.SIGTERM)
        return torch.tensor(number not in (2, 8))

    monkeypatch.setattr("mae.training.engine.all_finite", all_but_the_third)
    options = {"teacher_restart": 0.9, "teacher_decay": 0.5}
    whole = pretrain(tmp_path / "whole", **options)
    stopped = pretrain(tmp_path / "parts", **options)
    assert not stopped.finished and find_weights(stopped.folder).parent.name == "step-00000003"
    model = find_weights(stopped.folder)
    for file, prefix in ((model.with_name("teacher.safetensors"), ""), (model, OWN)):
        skipped = load_file(file)
        assert not any(skipped[f"{prefix}{name}"].any() for name in ("seen", "sums", "drawn"))
    resumed = mae.pretrain(out=tmp_path / "parts", resume=True, quiet=True)
    one, other = (load_file(find_weights(run.folder).with_name("teacher.safetensors")) for run in (whole, resumed))
    assert one["restarted"] > 32 and all(torch.equal(one[key], other[key]) for key in one)
    one, other = (load_file(find_weights(run.folder)) for run in (whole, resumed))
    assert one[f"{OWN}restarted"] > 0 and all(torch.equal(one[key], other[key]) for key in one)
