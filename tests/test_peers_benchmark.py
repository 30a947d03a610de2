"""The comparison with joint-embedding methods: losses train, times are equal, finished runs stay, sums are right."""

from math import cos, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

pytest.importorskip("lightly", reason="lightly, whose losses the peers have, is not installed")

import joint_embedding
import peers
import peers_table
from drawn_masks import drawn_masks
from joint_embedding import DINO, PEERS, LeJEPA, Progress, SimCLR, VISReg, distort, pooled
from lightly.loss.visreg_loss import visreg_shape_loss

from mae.data.sources.open import open_labelled
from mae.models.build import build_encoder
from mae.models.presets import model_config
from mae.records import read_json, write_json
from mae.training.optimizer import make_optimizer

TINY = "--patch-size 2 --embed-dim 32 --depth 1 --decoder-depth 1 --mlp-ratio 1 --device cpu --workers 0"
CONFIG = dict(img_size=8, patch_size=2, embed_dim=32, depth=1, mlp_ratio=1.0)


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch):
    monkeypatch.setattr(joint_embedding, "HIDDEN", 64)
    monkeypatch.setattr(DINO, "outputs", 128)


def make(kind: type) -> joint_embedding.JointEmbedding:
    torch.manual_seed(0)
    return kind(build_encoder(model_config("mae_vit_lesson_patch4", **CONFIG))).train()


def images(count: int = 16) -> torch.Tensor:
    """Normalised ones `[count, 3, 8, 8]`; each has one near it, as two views have."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(count // 2, 3, 8, 8, generator=generator).repeat_interleave(2, dim=0)
    return whole + 0.3 * torch.randn(count, 3, 8, 8, generator=generator)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_lowers_its_loss_on_a_fixed_batch_and_trains_its_encoder(name):
    """With more images than projected values, fewer than which VISReg shrinks; DINO's target is held."""
    peer, batch = make(PEERS[name]), images(160)
    if name == "dino":
        peer.loss.center_momentum = 1.0
    optimizer = make_optimizer(peer, weight_decay=peer.weight_decay, betas=(0.9, 0.999))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 3e-3
    losses = []
    for _ in range(30):
        loss = peer(batch).loss
        loss.backward()
        if not losses:
            assert all(p.grad is not None and p.grad.any() for p in peer.encoder.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert max(losses[-5:]) < 0.95 * losses[0]
    assert peer.evaluated.encode(batch).cls.isfinite().all()


def test_the_two_views_of_an_image_are_compared_with_each_other():
    """NT-Xent by its formula (Chen et al. 2020, equation 1), over pairs 2k - 1 and 2k."""
    peer, batch = make(SimCLR), images(6)
    peer.head = torch.nn.Identity()
    unit = torch.nn.functional.normalize(pooled(peer.encoder, batch), dim=1)
    similar = (unit @ unit.T / 0.5).exp()
    others = similar.sum(dim=1) - similar.diagonal()
    expected = torch.stack([-(similar[i, i ^ 1] / others[i]).log() for i in range(6)]).mean()
    torch.testing.assert_close(peer(batch).loss, expected, rtol=1e-5, atol=1e-6)


def test_views_are_drawn_together_beside_what_keeps_them_apart():
    """The distance of two views to their mean is half of that between them; both losses are sums with it."""
    views = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(4))
    apart = ((views[0] - views[1]) / 2).square().mean()
    lejepa, visreg = make(LeJEPA), make(VISReg)
    torch.manual_seed(5)
    regular = lejepa.sigreg(views)
    torch.manual_seed(5)
    torch.testing.assert_close(lejepa.compare(images(2), views), 0.05 * regular + 0.95 * apart)
    torch.manual_seed(5)
    shape = visreg_shape_loss(views, num_slices=4096)
    scale, center = (1 - views.std(dim=1, correction=0)).square().mean(), views.mean(dim=1).square().mean()
    torch.manual_seed(5)
    torch.testing.assert_close(visreg.compare(images(2), views), 0.4 * apart + 0.6 * (scale + shape + center))


def test_a_teacher_is_the_moving_average_and_is_not_trained():
    peer = make(DINO)
    before = [p.clone() for p in peer.teacher.parameters()]
    peer(images()).loss.backward()
    assert all(p.grad is None for p in peer.teacher.parameters())
    assert not {id(p) for p in peer.parameters()} & {id(p) for p in peer.teacher.parameters()}
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 1
    peer.teacher.after_step(peer, 0.25)
    momentum = 1 - 0.004 * (cos(pi * 0.25) + 1) / 2
    students = [*peer.encoder.parameters(), *peer.head.parameters()]
    for own, old, student in zip(peer.teacher.parameters(), before, students, strict=True):
        torch.testing.assert_close(own, momentum * old + (1 - momentum) * student)
    assert peer.evaluated is peer.teacher.encoder
    assert next(peer.double().teacher.parameters()).dtype == torch.float64


def test_what_dino_schedules():
    peer = make(DINO)
    optimizer = make_optimizer(peer, weight_decay=peer.weight_decay, betas=(0.9, 0.999))
    weights = peer.head.last_layer.parametrizations.weight.original1
    for step, decay, trained in ((0, 0.04, False), (9, None, False), (10, None, True), (50, 0.22, True)):
        peer.begin_step(Progress(step=step, total_steps=100, steps_per_epoch=30), optimizer)
        assert weights.requires_grad is trained
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        assert decay is None or decays == [pytest.approx(decay), 0]
    peer.begin_step(Progress(step=3, total_steps=100, steps_per_epoch=2), optimizer)
    assert weights.requires_grad


def test_colours_change_as_torchvision_changes_them():
    pixels = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(2))
    pixels[0] = 0.5  # grey has no hue
    for amount in (-0.4, 0.1, 0.3):
        turns = torch.full((5, 1, 1, 1), amount)
        torch.testing.assert_close(
            joint_embedding.turn_hue(pixels, turns), F.adjust_hue(pixels, amount), rtol=0, atol=2e-6
        )
        grey = joint_embedding._grey(pixels)
        torch.testing.assert_close(
            joint_embedding.blend(pixels, grey, 1 + turns), F.adjust_saturation(pixels, 1 + amount), rtol=0, atol=2e-6
        )
        mean = grey.mean(dim=(1, 2, 3), keepdim=True)
        torch.testing.assert_close(
            joint_embedding.blend(pixels, mean, 1 + turns), F.adjust_contrast(pixels, 1 + amount), rtol=0, atol=2e-6
        )


def test_colours_are_drawn_for_each_image_by_itself():
    generator = torch.Generator().manual_seed(3)
    pixels = torch.rand(1, 3, 4, 4, generator=generator).expand(4000, -1, -1, -1)
    changed = distort(pixels, generator)
    assert changed.min() >= 0 and changed.max() <= 1
    same = (changed == pixels).flatten(1).all(dim=1).double().mean().item()
    grey = (changed.amax(dim=1) == changed.amin(dim=1)).flatten(1).all(dim=1).double().mean().item()
    assert same == pytest.approx(0.2 * 0.8, abs=0.03) and grey == pytest.approx(0.2, abs=0.03)
    assert len(changed.flatten(1).unique(dim=0)) > 0.7 * len(pixels)
    one = distort(torch.rand(8, 1, 4, 4, generator=generator), generator)
    assert one.shape == (8, 1, 4, 4)


def asked(out, *words: str) -> list[str]:
    return [
        "builtin:digits", "--img-size", "8", "--common", TINY, "--images", "16", "--seeds", "0", "--minutes", "0.5",
        "--rates", "1e-3", "--evaluate", "knn", "--out", str(out), *words,
    ]  # fmt: skip


def test_batches_hold_two_crops_of_each_image(tmp_path, monkeypatch):
    """Of the digits, each in one grey, crops are the same whatever their box."""
    folder = tmp_path / "grey"
    for number in range(40):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 2 * number, 100)).save(folder / f"class{number % 2}" / f"{number}.png")
    monkeypatch.setattr(joint_embedding, "distort", lambda pixels, generator: pixels)
    words = asked(tmp_path / "out", "--images", "4")
    words[0] = str(folder)
    contestant = peers.prepare("simclr", peers.parse_args(words))
    trainer = contestant.trainer(tmp_path / "run", steps=2, seed=0, lr=1e-3)
    batch = next(trainer.batches(0))["images"]
    assert batch.shape == (8, 3, 8, 8)
    assert (batch[0::2] == batch[1::2]).all() and len(batch[:, 0, 0, 0].unique()) == 4


@pytest.mark.parametrize("rate", [0.013, 0.7, 31.0])
@pytest.mark.parametrize("minutes", [0.2, 10.0, 30.0])
def test_steps_fill_the_minutes_to_half_a_step(rate, minutes):
    steps = peers.fitting(minutes, rate)
    assert abs(steps / rate - 60 * minutes) <= 0.5 / rate or steps == 1


def test_a_rate_is_measured_over_half_of_the_seconds_or_more(monkeypatch):
    runs = []
    monkeypatch.setattr(peers, "run", lambda steps: runs.append(steps) or {"seconds": 0.25 * steps})
    assert peers.steps_per_second(lambda steps: steps, seconds=60.0) == 4.0
    assert runs[0] == peers.FIRST_STEPS and 30 <= 0.25 * runs[-1] <= 60 and len(runs) == 2


def test_a_comparison_gives_equal_times_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    rates = {"simclr": 0.2, "dino": 0.1, "fast": 0.4}
    out.mkdir()
    write_json(out / "measured.json", {name: {"steps_per_second": rate} for name, rate in rates.items()})
    words = asked(out, "--peers", "simclr", "dino", "--ours", "fast")
    peers.main(words)
    results = read_json(out / "results.json")["results"]
    by_method = {result["method"]: result for result in results}
    assert list(by_method) == ["random weights", "simclr", "dino", "fast"]
    for name, rate in rates.items():
        assert abs(by_method[name]["steps"] / rate - 30) <= 0.5 / rate
    # 32 crops of 17 tokens a step; ours see a quarter of 16 patches and the class token.
    assert by_method["simclr"]["crops"] == 6 * 32 and by_method["simclr"]["tokens"] == 6 * 32 * 17
    assert by_method["dino"]["tokens"] == 3 * 32 * 17
    assert by_method["fast"]["tokens"] == by_method["fast"]["crops"] * 5
    table = (out / "table.md").read_text()
    assert "| raw pixels |" in table and "| fast | 0.5 | k-NN |" in table
    assert capsys.readouterr().out.rstrip() == table.rstrip() or table.strip() in table

    killed = out / "runs" / "dino" / "0.5min-seed0"
    (killed / "training.json").unlink()
    (killed / "left").touch()
    trained = []
    real = peers.train
    monkeypatch.setattr(
        peers, "train", lambda contestant, **how: trained.append(contestant.name) or real(contestant, **how)
    )
    monkeypatch.setattr(peers.mae, "evaluate", _only_of(killed, peers.mae.evaluate))
    peers.main(words)
    assert trained == ["dino"] and not (killed / "left").exists()
    again = {result["method"]: result for result in read_json(out / "results.json")["results"]}
    assert again["simclr"] == by_method["simclr"] and again["dino"]["scores"] == by_method["dino"]["scores"]


def _only_of(folder, evaluate):
    def checked(protocol, model, **options):
        assert options["out"] == folder, f"{options['out']} is evaluated twice"
        return evaluate(protocol, model, **options)

    return checked


def test_every_protocol_gives_the_table_a_number(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PROTOCOLS, "finetune", ("labels", {"shares": ("50%", "100%"), "steps": 2}))
    monkeypatch.setitem(peers.PROTOCOLS, "attentive_probe", ("attentive_probe", {"epochs": 1}))
    masks = str(drawn_masks(tmp_path / "masks"))
    args = peers.parse_args(asked(tmp_path / "out", "--masks", masks, "--evaluate", *peers.PROTOCOLS))
    run = peers.untrained(peers.prepare("simclr", args).prepared, 0, args)
    found, raw = (peers_table.scores_of(run, who) for who in (peers.THIS_MODEL, peers_table.RAW_PIXELS))
    assert list(found) == [
        "k-NN", "linear probe", "attentive probe", "fine-tuning, 50 %", "fine-tuning, 100 %", "dense k-NN",
        "dense logistic",
    ]  # fmt: skip
    assert all(0 <= value <= 1 for value in found.values())
    dense = run["scores"]["segmentation_knn"]
    assert found["dense k-NN"] == dense["this model"]["knn"]["mean_iou"]
    assert raw["dense logistic"] == dense["raw pixels"]["logistic"]["mean_iou"]


def test_the_best_rate_by_the_training_part_is_kept(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_json(out / "measured.json", {"simclr": {"steps_per_second": 0.5}})
    args = peers.parse_args(asked(out, "--rates", "1e-3", "1e-9", "--screening", "0.5"))
    own = peers.measure(peers.prepare("simclr", args), args)
    assert set(own["screened"]) == {"0.001", "1e-09"}
    assert own["screened"][str(own["lr"])] == max(own["screened"].values())
    assert peers.measure(peers.prepare("simclr", args), args) == own


def test_rates_are_chosen_without_test_images():
    data = open_labelled("builtin:digits", data_root=Path("data"))
    part = peers.held_out_part(data)
    splits = {"fitted": part.train, "held": part.test, "train": data.train, "test": data.test}
    found = {name: [split.source.item_name(row) for row in range(len(split.labels))] for name, split in splits.items()}
    assert sorted(found["fitted"] + found["held"]) == sorted(found["train"])
    assert not set(found["held"]) & set(found["test"])


@pytest.mark.parametrize(
    "words",
    [
        ("--ours", "fast --epochs 3"),
        ("--common", "--img-size=16"),
        ("--ours", "fast", "fast"),
        ("--minutes", "0"),
        ("--images", "1"),
        ("--masks", "camvid"),
        ("--evaluate", "segmentation_knn"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, words, capsys):
    with pytest.raises(SystemExit):
        peers.parse_args(asked(tmp_path / "out", *words))
    assert "error" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_another_comparison_needs_another_folder(tmp_path, capsys):
    peers.parse_args(asked(tmp_path / "out"))
    peers.parse_args(asked(tmp_path / "out", "--minutes", "1", "--seeds", "1", "--ours", "default"))
    with pytest.raises(SystemExit):
        peers.parse_args(asked(tmp_path / "out", "--images", "8"))
    assert "--out" in capsys.readouterr().err


def result(method: str, seed: int, top1: float, *, peer: bool, minutes: float = 10.0) -> dict:
    """A run as the program keeps it; `mean` has what `cls` lacks."""
    features = {"cls": {"20": {"top1": top1}}, "mean": {"20": {"top1": 1 - top1}}}
    scores = {"knn": {"this model": features}}
    if not minutes:
        scores["knn"]["raw pixels"] = {"pixels": {"20": {"top1": 0.3}}}
    speed = {"seconds": 300.0, "steps": 60, "crops": 6000, "tokens": 390000} if minutes else {}
    feature = "cls" if peer else "mean"
    about = {"method": method, "minutes": minutes, "seed": seed, "peer": peer, "feature": feature}
    return {**about, **speed, "scores": scores}


def test_tables_hold_means_intervals_and_paired_differences():
    """By hand: t(0.975, 2) is 4.3027; 0.1 * 4.3027 / sqrt(3) is 0.248."""
    results = [
        *(result("random weights", seed, 0.8, peer=False, minutes=0) for seed in range(3)),
        *(result("simclr", seed, value, peer=True) for seed, value in enumerate((0.4, 0.5, 0.6))),
        *(result("dino", seed, value, peer=True) for seed, value in enumerate((0.5, 0.6, 0.7))),
        *(result("fast", seed, 1 - value, peer=False) for seed, value in enumerate((0.52, 0.61, 0.75))),
    ]
    rows = list(peers_table.score_rows(results))
    assert rows[0].endswith("| k-NN, % |")
    assert rows[2:4] == [
        "| random weights |  |  |  |  |  | 20.0 ± 0.0 |",
        "| raw pixels |  |  |  |  |  | 30.0 ± 0.0 |",
    ]
    assert rows[4] == "| simclr | 10 | 5.00 | 60 | 20 | 1,300 | 50.0 ± 24.8 |"
    # Differences 0.02, 0.01, 0.05: mean 0.0267, std 0.0208, half of the interval 0.0517.
    assert list(peers_table.difference_rows(results))[2:] == ["| fast | 10 | k-NN | dino | +2.7 | -2.5 to +7.8 | 3 |"]
    results += [result("mae", seed, 1 - value, peer=False) for seed, value in enumerate((0.5, 0.6, 0.7))]
    alone = [each for each in results if not each["peer"]]  # beside the first of ours
    assert list(peers_table.difference_rows(alone))[2:] == ["| mae | 10 | k-NN | fast | -2.7 | -7.8 to +2.5 | 3 |"]


def test_one_seed_has_no_interval():
    assert peers_table.interval([0.25]) == "25.0"


def write_images(folder: Path, *, count: int, noise: bool, seed: int) -> None:
    """Of each of four classes so many: gratings at 0, 30, 60 and 90 degrees in random colours, or noise alone.

    Phase and frequency are random; mirrored, no angle is another class's.
    """
    draws = np.random.default_rng(seed)
    rows, columns = np.mgrid[:16, :16]
    for label in range(4):
        (folder / str(label)).mkdir(parents=True)
        for number in range(count):
            angle, frequency, phase = np.radians(30 * label), draws.uniform(0.12, 0.3), draws.uniform(0, 2 * pi)
            wave = np.sin(2 * pi * frequency * (columns * np.cos(angle) + rows * np.sin(angle)) + phase)
            one, other = draws.uniform(0, 1, (2, 3))
            share = 0.5 + 0.5 * wave[..., None]
            pixels = share * one + (1 - share) * other + 0.1 * draws.standard_normal((16, 16, 3))
            if noise:
                pixels = draws.uniform(0, 1, (16, 16, 3))
            Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8)).save(folder / str(label) / f"{number}.png")


@pytest.mark.slow
@pytest.mark.parametrize("noise", [False, True])
def test_contrast_learns_the_angle_of_gratings_and_nothing_of_noise(tmp_path, noise):
    """200 test images: 0.08 is 2.6 std of chance, and 0.12 that of a difference."""
    source = tmp_path / "images"
    write_images(source / "train", count=60, noise=noise, seed=0)
    write_images(source / "test", count=50, noise=noise, seed=1)
    common = "--patch-size 4 --embed-dim 48 --depth 2 --num-heads 4 --decoder-depth 1 --device cpu --workers 0"
    words = asked(
        tmp_path / "out", "--img-size", "16", "--images", "48", "--common", common, "--rates", "2e-3", "--minutes", "1"
    )
    args = peers.parse_args([str(source), *words[1:]])
    write_json(args.out / "measured.json", {"simclr": {"steps_per_second": 250 / 60}})
    contestant = peers.prepare("simclr", args)
    learned = peers_table.scores_of(peers.finished(contestant, 1, 0, args))["k-NN"]
    if noise:
        assert abs(learned - 0.25) < 0.08
    else:
        fresh = peers.untrained(contestant.prepared, 0, args)["scores"]["knn"]["this model"]
        assert learned > max(of["20"]["top1"] for of in fresh.values()) + 0.12
