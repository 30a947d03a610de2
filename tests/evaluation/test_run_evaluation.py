"""An evaluation from request to record: what is written, what is refused, what is left as it was."""

import csv
import json
import string
from dataclasses import asdict, dataclass
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from data.pictures import Pictures, noise
from light import forget_images
from PIL import Image
from tiny_task import by_function, evaluator, make_task

import mae
from mae.data.dataset.images import load_images
from mae.data.sources.open import open_held_out
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.extractor import baseline_extractors, model_extractor
from mae.evaluation.protocol import EvaluationProtocol
from mae.evaluation.protocols import PROTOCOLS, find_protocol
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.evaluation.run import evaluate
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model

CHEAP = [protocol for protocol in PROTOCOLS if protocol.cheap]
QUICK = {"device": "cpu", "quiet": True}


def picture(path: Path, *, seed: int, bright: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(bright, bright + 100, (12, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Dark and bright noise: 6 and 4 to train on, 3 and 2 to test on."""
    for part, (dark, bright) in {"train": (6, 4), "test": (3, 2)}.items():
        for number in range(dark):
            picture(tmp_path / "labelled" / part / "dark" / f"{number}.png", seed=len(part) * 100 + number, bright=0)
        for number in range(bright):
            picture(tmp_path / "labelled" / part / "light" / f"{number}.png", seed=len(part) * 200 + number, bright=150)
    return tmp_path / "labelled"


@pytest.fixture
def model() -> MaskedAutoencoder:
    torch.manual_seed(5)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    return create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)


@pytest.fixture
def colours() -> mae.Extractor:
    preprocessing = mae.Preprocessing(img_size=(8, 8))
    return mae.Extractor(name="colours", encode=lambda images: images.mean(dim=(2, 3)), preprocessing=preprocessing)


def test_record_holds_everything(model, labelled, tmp_path):
    found = evaluate("knn", model, data=labelled, out=tmp_path / "out", seed=3, ks=[1, 3], shots=[2], **QUICK)
    written = json.loads((tmp_path / "out" / "evaluation" / "knn.json").read_text())
    assert written == json.loads(json.dumps(asdict(found)))
    assert written["protocol"] == "knn" and written["model"] == "model" and written["seed"] == 3
    options = {"ks": [1, 3], "shots": [2], "temperature": 0.07, "draws": 5, "baselines": True}
    assert written["options"] == options
    data = written["data"]
    assert data["source"] == str(labelled) and (data["train"], data["test"], data["classes"]) == (10, 5, 2)
    assert (
        len(data["train_version"]) == len(data["test_version"]) == 16 and data["train_version"] != data["test_version"]
    )
    assert (written["chance"], written["majority"]) == (0.5, 0.6)
    assert list(written["result"]) == ["this model", "random weights", "raw pixels"]
    assert written["seconds"] > 0 and written["finished_at"].startswith("20")
    assert {"processor", "cores", "threads", "device"} <= set(written["hardware"])
    assert len(written["weights"]) == 16 and set(written["weights"]) <= set(string.hexdigits)
    assert {"python", "mae", "torch", "torchvision", "numpy", "scipy", "scikit-learn"} <= set(written["versions"])
    assert written["pictures"] == {"confusion": "knn-confusion.png"}
    with Image.open(tmp_path / "out" / "evaluation" / "knn-confusion.png") as drawn:
        assert drawn.format == "PNG"
    names = {path.name for path in (tmp_path / "out" / "evaluation").iterdir()}
    assert names == {"knn.json", "knn.csv", "knn-confusion.png"}
    with (tmp_path / "out" / "evaluation" / "knn.csv").open() as file:
        table = {row["result"]: row for row in csv.DictReader(file)}
    row = table["this model / mean / 1 / top1"]
    assert row["protocol"] == "knn" and float(row["value"]) == written["result"]["this model"]["mean"]["1"]["top1"]
    assert written["verdict"]["answer"] in ("better", "unclear", "worse")


def counting(monkeypatch: pytest.MonkeyPatch, place: str, function) -> list[tuple]:
    """The arguments of each call of a function that stands in a module."""
    calls: list[tuple] = []

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(place, counted)
    return calls


def records_of(out: Path) -> tuple[dict, list[dict]]:
    """The record of k-NN, and the earlier ones."""
    place = out / "evaluation"
    return json.loads((place / "knn.json").read_text()), [
        json.loads(path.read_text()) for path in (place / "earlier").glob("knn-*.json")
    ]


def test_record_names_the_evaluated_weights(model, colours, labelled, tmp_path):
    asked = {"data": labelled, "out": tmp_path / "out", "baselines": False, **QUICK}
    first = evaluate("knn", model, **asked).weights
    assert evaluate("linear_probe", model, **asked).weights == first
    assert evaluate("knn", colours, **asked).weights is None
    with torch.no_grad():
        model.encoder.cls_token[..., -1] += 1e-3
    assert evaluate("knn", model, **asked).weights not in (first, None)


def test_the_same_request_overwrites_its_record(model, labelled, tmp_path):
    for _ in range(2):
        last = evaluate("knn", model, data=labelled, out=tmp_path / "out", **QUICK)
    now, earlier = records_of(tmp_path / "out")
    assert now == json.loads(json.dumps(asdict(last))) and earlier == []
    assert not (tmp_path / "out" / "evaluation" / "earlier").exists()


@pytest.mark.parametrize("changed", ["weights", "data", "options", "seed"])
def test_another_requests_record_is_kept(model, labelled, tmp_path, changed):
    asked = {"data": labelled, "out": tmp_path / "out", "baselines": False, **QUICK}
    evaluate("knn", model, **asked)
    first, _ = records_of(tmp_path / "out")
    if changed == "weights":
        with torch.no_grad():
            model.encoder.cls_token[..., -1] += 1e-3
    elif changed == "data":
        picture(labelled / "train" / "dark" / "9.png", seed=77, bright=0)
    else:
        asked |= {"options": {"ks": [1]}, "seed": {"seed": 1}}[changed]
    evaluate("knn", model, **asked)
    second, earlier = records_of(tmp_path / "out")
    assert earlier == [first] and first[changed] != second[changed]
    others = {"weights", "data", "options", "seed"} - {changed}
    assert all(first[name] == second[name] for name in others)
    evaluate("knn", model, **asked)  # the same as stands there
    assert records_of(tmp_path / "out")[1] == [first]
    evaluate("knn", model, **asked, temperature=0.5)
    kept = records_of(tmp_path / "out")[1]
    assert len(kept) == 2 and first in kept


def test_second_run_reuses_stored_features(labelled, tmp_path):
    counted = []

    def encode(images):
        counted.append(len(images))
        return images.mean(dim=(2, 3))

    mine = mae.Extractor(name="f", encode=encode, preprocessing=mae.Preprocessing(img_size=(8, 8)), identity="one")
    first, second, probe = (
        evaluate(protocol, mine, data=labelled, out=tmp_path / "out", **QUICK)
        for protocol in ("knn", "knn", "linear_probe")
    )
    assert first.result == second.result and sum(counted) == 15
    assert probe.result["this model"]["features"]["top1"] == 1.0


def test_a_function_is_computed_once(labelled, tmp_path):
    counted = []

    def encode(images):
        counted.append(len(images))
        return images.mean(dim=(2, 3))

    mine = mae.Extractor(name="f", encode=encode, preprocessing=mae.Preprocessing(img_size=(8, 8)))
    judging = evaluator(mine, labelled, tmp_path / "out")
    for name in ("knn", "linear_probe", "label_free"):
        judging.run(find_protocol(name)())
    # Training and test part once, and the two crops of each test image that are compared.
    assert sum(counted) == 10 + 5 + 2 * 5


def test_callers_model_and_generators_are_unchanged(model, labelled, tmp_path):
    model.train()
    model.decoder.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    evaluator(model, labelled, tmp_path / "out").run_all()
    assert torch.equal(torch.get_rng_state(), state) and np.random.get_state()[1].tolist() == numpy_state
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_all_is_one_page_of_the_labelled_set(model, labelled, tmp_path):
    page = evaluator(model, labelled, tmp_path / "out").run_all()
    assert page == tmp_path / "out" / "evaluation" / "index.html"
    text = page.read_text()
    assert all(f"<h2>{protocol.title}</h2>" in text for protocol in CHEAP)
    assert text.count("data:image/png;base64,") == 2
    record = json.loads(page.with_name("knn.json").read_text())
    for fact in ("train_version", "test_version", "note"):
        assert record["data"][fact] in text
    assert all(page.with_name(f"{protocol.name}.json").is_file() for protocol in CHEAP)


def test_all_opens_each_set_once(model, labelled, tmp_path, monkeypatch):
    held_out = counting(monkeypatch, "mae.evaluation.run.open_held_out", open_held_out)
    decoded = counting(monkeypatch, "mae.evaluation.extractors.opened.load_images", load_images)
    evaluator(model, labelled, tmp_path / "out").run_all()
    assert len(held_out) == 1
    assert len(decoded) == 3  # the parts with labels, and the images for what asks for none


def test_all_of_a_model_without_decoder(colours, labelled, tmp_path):
    text = evaluator(colours, labelled, tmp_path / "out").run_all().read_text()
    assert "Left out: colours has no decoder; reconstruction needs a masked autoencoder" in text
    assert text.count("<table") == len(CHEAP) - 1


def test_all_needs_labels_before_anything_is_computed(model, tmp_path):
    for number in range(4):
        picture(tmp_path / "flat" / f"{number}.png", seed=number)
    with pytest.raises(UsageError, match="no class folders"):
        evaluator(model, tmp_path / "flat", tmp_path / "out").run_all()
    assert not (tmp_path / "out").exists()


def test_images_without_labels(model, tmp_path):
    for number in range(4):
        picture(tmp_path / "flat" / f"{number}.png", seed=number)
    for protocol in ("label_free", "reconstruction"):
        found = evaluate(protocol, model, data=tmp_path / "flat", out=tmp_path / "out", **QUICK)
        assert found.data["images"] == 4 and found.chance is found.majority is None
    with pytest.raises(UsageError, match="flat has no class folders: .* is in none; expected class/image.jpg"):
        evaluate("knn", model, data=tmp_path / "flat", out=tmp_path / "out", **QUICK)


def test_pictures_of_16_bits_are_measured_by_the_part_that_they_fill(tmp_path):
    twelve = np.random.default_rng(0).integers(0, 4096, (4, 8, 8), dtype=np.uint16)
    (tmp_path / "images").mkdir()
    for number, values in enumerate(twelve):
        Image.fromarray(values).save(tmp_path / "images" / f"{number}.png")
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    model = create_model("mae_vit_lesson_patch4", **sizes, in_chans=1, mean=(0.03,), std=(0.02,), pixel_dtype="uint16")
    found = evaluate("reconstruction", model, data=tmp_path / "images", out=tmp_path / "out", **QUICK).result["model"]
    span = (int(twelve.max()) - int(twelve.min())) / 65535
    assert found["psnr"] == pytest.approx(10 * np.log10(span**2 / found["mse"]), abs=1e-3)


def test_label_free_uses_the_test_part(model, labelled, tmp_path):
    found = evaluate("label_free", model, data=labelled, out=tmp_path / "out", **QUICK)
    assert found.data["images"] == 5
    untrained = baseline_extractors(model_extractor(model, name="m"))[0]
    alone = evaluate("label_free", untrained.model, data=labelled, out=tmp_path / "untrained", baselines=False, **QUICK)
    assert found.result["random weights"] == alone.result["this model"] != found.result["this model"]
    for part in ("train", "test"):
        (labelled / part).rename(tmp_path / f"other-{part}")
    paths = {"data": tmp_path / "other-train", "test": tmp_path / "other-test"}
    apart = evaluate("label_free", model, **paths, out=tmp_path / "apart", **QUICK)
    assert apart.data["images"] == 5 and apart.result == found.result
    judged = evaluate("knn", model, **paths, out=tmp_path / "apart", **QUICK)
    assert judged.data["test_version"] == apart.data["version"] and judged.data["test"] == 5


def test_label_free_uses_all_images_without_a_test_part(colours, labelled, tmp_path):
    """No fifth is held out that the model may have trained on all the same, and train/ is not preferred."""
    (labelled / "test").rename(labelled / "more")
    for number, images in enumerate((15, 10)):
        found = evaluate("label_free", colours, data=labelled, out=tmp_path / str(number), **QUICK)
        assert found.data["images"] == images
        if number == 0:
            (labelled / "more").rename(tmp_path / "more")
    assert evaluate("knn", colours, data=labelled, out=tmp_path / "knn", **QUICK).data["test"] < 5


def test_test_images_without_labels(colours, labelled, tmp_path):
    (labelled / "test").rename(tmp_path / "flat")
    for number, path in enumerate(sorted((tmp_path / "flat").rglob("*.png"))):
        path.rename(tmp_path / "flat" / f"{number}.png")
    found = evaluate("label_free", colours, data=labelled, test=tmp_path / "flat", out=tmp_path / "out", **QUICK)
    assert found.data["images"] == 5


def test_the_same_image_in_both_parts(colours, labelled, tmp_path):
    (labelled / "test" / "light" / "copy.png").write_bytes((labelled / "train" / "light" / "2.png").read_bytes())
    with pytest.raises(UsageError, match=r"1 test image .*light/2.png and .*light/copy.png.*--overlap drop"):
        evaluate("knn", colours, data=labelled, out=tmp_path / "out", **QUICK)
    judging = evaluator(colours, labelled, tmp_path / "out", overlap="drop")
    record = judging.run(find_protocol("knn")())
    task = judging.labelled_task()
    assert record.data["test"] == 5 and "1 test image left out: trained on" in record.data["note"]
    kept = [task.images("test")._source.item_name(number) for number in range(5)]
    assert not any(name.endswith("copy.png") for name in kept) and len(kept) == 5
    assert task.labels("test").tolist() == [0, 0, 0, 1, 1] and task.overlap() == []


def test_a_test_part_that_is_all_training_images(colours, labelled, tmp_path):
    (labelled / "test").rename(tmp_path / "away")
    with pytest.raises(UsageError, match="every test image is among the training images"):
        paths = {"data": labelled / "train", "test": labelled / "train"}
        evaluate("knn", colours, **paths, out=tmp_path / "out", overlap="drop", **QUICK)


def test_a_class_whose_test_images_are_all_training_images(colours, labelled, tmp_path):
    for number in range(2):
        copied = (labelled / "train" / "light" / f"{number}.png").read_bytes()
        (labelled / "test" / "light" / f"{number}.png").write_bytes(copied)
    asked = {"data": labelled, "out": tmp_path / "out", **QUICK}
    with pytest.raises(UsageError, match="the training class 'light' has no test image"):
        evaluate("knn", colours, overlap="drop", **asked)
    picture(labelled / "test" / "light" / "2.png", seed=9, bright=150)
    assert evaluate("knn", colours, overlap="drop", **asked).data["test"] == 4


@dataclass(frozen=True)
class Failing(EvaluationProtocol):
    """A protocol that fails."""

    name = title = summary = "failing"
    error: Exception

    def run(self, task):
        raise self.error


class FailingWithoutLabels(Failing):
    """The same on images without labels."""

    labels = "none"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand a second line"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes\nframe #0"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    ],
)
def test_out_of_memory_is_one_line(colours, labelled, tmp_path, error):
    judging = evaluator(colours, labelled, tmp_path / "out")
    for kind in (Failing, FailingWithoutLabels):
        with pytest.raises(MAEError, match=r"^the device ran out of memory: .*; fine-tuning .* --accumulate 2; .*cpu$"):
            judging.run(kind(error))
    with pytest.raises(RuntimeError, match="^another$"):
        judging.run(Failing(RuntimeError("another")))


def test_test_class_missing_from_training_is_refused(colours, labelled, tmp_path):
    (labelled / "test" / "light").rename(labelled / "test" / "blue")
    with pytest.raises(UsageError, match="the test class 'blue' is not among the training classes"):
        evaluate("knn", colours, data=labelled, out=tmp_path / "out", **QUICK)
    (labelled / "test" / "blue").rename(tmp_path / "away")
    with pytest.raises(UsageError, match="the training class 'light' has no test image"):
        evaluate("knn", colours, data=labelled, out=tmp_path / "out", **QUICK)
    (labelled / "train" / "light").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="only the class 'dark'"):
        evaluate("knn", colours, data=labelled, out=tmp_path / "out", **QUICK)


def test_wrong_words(colours, labelled, tmp_path):
    asked = {"data": labelled, "out": tmp_path / "out", **QUICK}
    with pytest.raises(UsageError, match="unknown protocol 'linear_prob'; did you mean linear_probe"):
        evaluate("linear_prob", colours, **asked)
    with pytest.raises(UsageError, match="unknown option of knn 'temprature'; did you mean temperature"):
        evaluate("knn", colours, temprature=1, **asked)
    with pytest.raises(UsageError, match=r"ks is \[0\]"):
        evaluate("knn", colours, ks=[0], **asked)
    with pytest.raises(UsageError, match="nowhere does not exist"):
        evaluate("knn", colours, **{**asked, "data": "nowhere"})
    with pytest.raises(UsageError, match="has no decoder"):
        evaluate("reconstruction", colours, **asked)
    assert not (tmp_path / "out" / "evaluation").exists()


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused_before_anything_is_computed(seed, colours, labelled, tmp_path):
    with pytest.raises(UsageError, match=f"--seed is {seed}; expected a whole number from 0"):
        evaluate("linear_probe", colours, seed=seed, data=labelled, out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_unknown_overlap_is_refused(colours, labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user has no type checker that refuses it first
    with pytest.raises(UsageError, match="unknown overlap 'dorp'; did you mean drop"):
        evaluate("knn", colours, overlap="dorp", data=labelled, out=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_a_broken_model_is_reported(model, labelled, tmp_path):
    with torch.no_grad():
        model.encoder.patch_embed.proj.weight[0, 0] = float("nan")
    with pytest.raises(MAEError, match="features hold values that are not finite; the model is broken"):
        evaluate("knn", model, data=labelled, out=tmp_path / "out", **QUICK)


def test_untrained_model_is_near_chance(tmp_path):
    """Noise in random classes, 40 images to test: chance is 0.5, its deviation 0.08, so the band is 0.3 to 0.7."""
    for part, seed in (("train", 0), ("test", 1000)):
        for number in range(40):
            picture(tmp_path / "noise" / part / str(number % 2) / f"{number}.png", seed=seed + number)
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    fresh = create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)
    found = evaluate("knn", fresh, data=tmp_path / "noise", out=tmp_path / "out", ks=[20], **QUICK)
    for who in ("this model", "random weights", "raw pixels"):
        for of in found.result[who].values():
            assert 0.3 <= of["20"]["top1"] <= 0.7
    assert found.chance == found.majority == 0.5


def test_a_broken_file_in_a_set_that_does_not_fit_in_memory(tmp_path, monkeypatch):
    """Dark and bright by turns, 120 to test; the 10th is broken, which nobody sees before it is read."""
    forget_images(monkeypatch)
    monkeypatch.setattr("mae.evaluation.common.classified_images.default_workers", lambda *_, **__: 0)
    dark = np.arange(120) % 2
    test = [noise(8, 8, 1, seed=number) // 4 + 100 * dark[number] for number in range(120)]
    train = [noise(8, 8, 1, seed=500 + number) // 4 + 100 * dark[number] for number in range(40)]
    train[7] = test[30].copy()
    labels = torch.from_numpy(dark)
    task = make_task(
        tmp_path,
        by_function(lambda images: 5 * (images.mean(dim=(2, 3)) - 0.32), img_size=(8, 8)),  # -1 or 1
        train=(Pictures([np.uint8(image) for image in train]), labels[:40]),
        test=(Versioned([np.uint8(image) for image in test], frozenset({9})), labels),
        num_classes=2,
    )
    left = [number for number in range(120) if number != 9]
    assert task.images("test").readable.tolist() == left and not task.images("test").in_memory
    assert torch.equal(task.labels("test"), labels[left]) and len(task.features("test")["features"]) == 119
    assert task.overlap() == [(7, 30)]
    quick = LinearProbe(baselines=False).run(task)
    official = LinearProbe(official=True, epochs=2, batch_size=16, base_lr=1e-3).run(task)
    for result in (quick, official):
        assert result.ranking.shape == (119, 2)
        share = (result.ranking[:, 0] == labels[left]).float().mean().item()
        assert result.numbers["this model"]["features"]["top1"] == pytest.approx(share)
        # LARS hardly moves the random weight in six steps, and so low a rate leaves the bias at 0: it tells dark from
        # bright, or bright from dark; rows of other images would be at chance.
        assert share > 0.9 or (result is official and share < 0.1)


class Versioned(Pictures):
    """Another source than `Pictures`."""

    def version(self) -> str:
        return "d" * 16
