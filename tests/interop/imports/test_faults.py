"""Known accidents of conversion, planted one by one: each is refused, in words that name it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import HEADS, mmpretrain, official, saved
from tiny import tiny_model
from torch import Tensor
from trained import trained

from mae.bench.peer import make_peer
from mae.encoders import vit
from mae.errors import MAEError, UsageError
from mae.interop.imports import convert as conversion
from mae.interop.imports import naming
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.interop.imports.naming import SCHEMES
from mae.interop.imports.open import open_model
from mae.layers.transformer import make_blocks
from mae.models import presets as zoo
from mae.models.file import load_with_report
from mae.models.masked_autoencoder import MaskedAutoencoder

pytestmark = pytest.mark.slow
TRAINED = WeightMetadata(num_heads=4, decoder_num_heads=4)
TOLD = WeightMetadata(**HEADS, norm_pix_loss=True)


@pytest.fixture(scope="module")
def pixels() -> MaskedAutoencoder:
    return trained(norm_pix_loss=False, steps=300)


@pytest.fixture(scope="module")
def standardised() -> MaskedAutoencoder:
    return trained(norm_pix_loss=True, steps=300)


@pytest.fixture(scope="module")
def rows_first() -> MaskedAutoencoder:
    return trained(norm_pix_loss=False, steps=300, rows_first=True)


def reorder(fused: Tensor, order: Sequence[int] = (1, 0, 2)) -> Tensor:
    return torch.cat([fused.chunk(3)[number] for number in order])


def reordered(tensors: dict[str, Tensor], order: Sequence[int], part: str) -> dict[str, Tensor]:
    """The fused matrices and biases of a part in another order of queries, keys and values."""
    chosen = [name for name in tensors if name.startswith(f"{part}.") and ".attn.qkv." in name]
    return tensors | {name: reorder(tensors[name], order) for name in chosen}


def without(tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Zeros for the biases of queries (0), keys (1) or values (2) of the encoder."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in tensors:
        if name.startswith("blocks.") and name.endswith("qkv.bias"):
            tensors[name].chunk(3)[number].zero_()
    return tensors


def turned(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return tensors | {name: tensors[name].roll(tensors[name].shape[-1] // 2, dims=-1) for name in names}


@pytest.mark.parametrize(("number", "what"), [(0, "query"), (2, "value")])
def test_biases_that_were_lost_are_missed(number: int, what: str, pixels: MaskedAutoencoder, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", without(official(pixels), number))
    with pytest.raises(MAEError, match=f"{what} biases of all 2 blocks of its encoder are exactly 0"):
        load_external(path, metadata=TRAINED)


def test_keys_need_no_bias_and_a_fresh_model_none_at_all(pixels: MaskedAutoencoder, tmp_path: Path) -> None:
    load_external(saved(tmp_path / "keys.pth", without(official(pixels), 1)), metadata=TRAINED)
    fresh = zoo.create_model("mae_vit_lesson_patch4", embed_dim=64, decoder_embed_dim=48)
    told = WeightMetadata(num_heads=4, decoder_num_heads=4, norm_pix_loss=True)
    _, report = load_external(saved(tmp_path / "fresh.pth", official(fresh)), metadata=told)
    assert "not checked on photos" in report.line()


@pytest.mark.parametrize("part", ["blocks", "decoder_blocks"])
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1)], ids=str)
def test_queries_keys_and_values_in_another_order_are_noticed(
    order: tuple[int, int, int], part: str, pixels: MaskedAutoencoder, tmp_path: Path
) -> None:
    path = saved(tmp_path / "w.pth", reordered(official(pixels), order, part))
    back = ", ".join("qkv"[order.index(number)] for number in range(3))
    where = "encoder" if part == "blocks" else "decoder"
    with pytest.raises(MAEError) as caught:
        load_external(path, metadata=TRAINED)
    told = str(caught.value)
    assert f"queries, keys and values of its {where} in the order {back}" in told or "its conversion went wrong" in told


def test_a_whole_file_in_another_order_predicts_nothing(standardised: MaskedAutoencoder, tmp_path: Path) -> None:
    tensors = reordered(reordered(official(standardised), (1, 0, 2), "blocks"), (1, 0, 2), "decoder_blocks")
    with pytest.raises(MAEError, match="order of queries, keys and values"):
        load_external(saved(tmp_path / "w.pth", tensors), metadata=TRAINED)


@pytest.mark.parametrize("names", [("pos_embed",), ("decoder_pos_embed",)], ids=str)
def test_positions_of_one_part_turned_round_are_noticed(
    names: tuple[str, ...], pixels: MaskedAutoencoder, tmp_path: Path
) -> None:
    with pytest.raises(MAEError, match="differ in the order of rows and columns"):
        load_external(saved(tmp_path / "w.pth", turned(official(pixels), *names)), metadata=TRAINED)


def test_positions_turned_round_are_noticed_and_may_be_meant(pixels: MaskedAutoencoder, tmp_path: Path) -> None:
    tensors = turned(official(pixels), "pos_embed", "decoder_pos_embed")
    path = saved(tmp_path / "w.pth", tensors)
    with pytest.raises(MAEError, match="encodes rows first"):
        load_external(path, metadata=TRAINED)
    meant = WeightMetadata(num_heads=4, decoder_num_heads=4, rows_first=True)
    with pytest.raises(
        MAEError, match="position embedding exchanged|its conversion went wrong"
    ):  # these weights were not trained so
        load_external(path, metadata=meant)
    model, report = load_external(
        path, metadata=WeightMetadata(**vars(meant) | {"norm_pix_loss": False}), photo_check=False
    )
    assert model.config is not None and model.config.encoder.pos_embed == "learned"
    assert "position embedding (rows first) kept as a learned table" in report.line()


def test_mmpretrains_rows_come_first(rows_first: MaskedAutoencoder, tmp_path: Path) -> None:
    """Its table is another than the official one, as its weights were trained."""
    path = saved(tmp_path / "w.pth", mmpretrain(rows_first))
    model, report = load_external(path, metadata=TRAINED)
    assert torch.equal(model.encoder.pos_embed.table, rows_first.encoder.pos_embed.table)
    assert "predicts pixels of photos" in report.line()


def test_positions_computed_anew_the_wrong_way_round_are_noticed(rows_first: MaskedAutoencoder, tmp_path: Path) -> None:
    """Weights that were trained with rows first, whose tables somebody computed as MAE has them."""
    tensors = turned(official(rows_first), "pos_embed", "decoder_pos_embed")
    with pytest.raises(MAEError, match="position embedding exchanged|its conversion went wrong"):
        load_external(saved(tmp_path / "w.pth", tensors), metadata=TRAINED)


@pytest.mark.parametrize("kind", [True, False], ids=["standardised", "pixels"])
def test_photographs_tell_the_target(
    kind: bool, pixels: MaskedAutoencoder, standardised: MaskedAutoencoder, tmp_path: Path
) -> None:
    model = standardised if kind else pixels
    path = saved(tmp_path / "w.pth", official(model))
    loaded, report = load_external(path, metadata=TRAINED)
    assert loaded.config == model.config and loaded.target == model.target  # type: ignore[union-attr]
    assert f"predicts {'per-patch normalised pixels' if kind else 'pixels'} of photos" in report.line()
    with pytest.raises(MAEError, match="has another target"):
        load_external(path, metadata=WeightMetadata(num_heads=4, decoder_num_heads=4, norm_pix_loss=not kind))


def test_two_of_many_tensors_are_not_enough(tmp_path: Path) -> None:
    tensors = official(tiny_model(img_size=16))
    few = {
        name: tensors[name] for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight", "cls_token")
    }
    path = saved(tmp_path / "w.pth", few)
    with pytest.raises(
        MAEError, match=r"holds 3 of \d+ encoder tensors; \d+ of the model's are missing \(.*--allow-partial"
    ):
        load_external(path, metadata=TOLD)
    with pytest.raises(MAEError, match=r"allow_partial asks for 90.0%"):
        load_external(path, metadata=TOLD, allow_partial=0.9)
    model, report = load_external(path, metadata=TOLD, allow_partial=0.1)
    assert report.encoder.tensors == 3 and "not in the file and fresh" in report.line()
    assert torch.equal(model.encoder.cls_token, few["cls_token"])


def test_tensors_nobody_knows_are_refused(tmp_path: Path) -> None:
    tensors = official(tiny_model()) | {"blocks.0.q_norm.weight": torch.ones(8), "reg_token": torch.zeros(1, 4, 24)}
    path = saved(tmp_path / "w.pth", tensors)
    for share in (None, 0.1):  # what is there changes what the model computes, however much of it is enough
        with pytest.raises(
            MAEError, match=r"holds 2 tensors that no such model has \('encoder.blocks.0.q_norm.weight', 'reg"
        ):
            load_external(path, metadata=TOLD, allow_partial=share)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", official(tiny_model()))
    with pytest.raises(UsageError, match="expected a share of the encoder above 0 and at most 1"):
        load_external(path, metadata=TOLD, allow_partial=share)


def test_who_cannot_be_told_points_to_who_can(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", official(tiny_model()))
    with pytest.raises(UsageError, match=r"give --num-heads.* \('mae import' takes these options\)"):
        open_model(path)
    with pytest.raises(UsageError, match="number of attention heads is unknown") as caught:
        open_model(path, metadata=WeightMetadata())
    assert "mae import" not in str(caught.value)
    with pytest.raises(MAEError, match="it is a file of torch.save; 'mae import' brings such weights in"):
        load_with_report(path)


def test_unknown_tensor_names_are_listed(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"conv1.weight": torch.zeros(4, 3, 7, 7), "fc.bias": torch.zeros(3)})
    with pytest.raises(UsageError, match="holds no known vision transformer: 2 tensors such as 'conv1.weight'"):
        load_external(path)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (WeightMetadata(norm_pix_loss=True), "attention heads is unknown for 2 blocks of width 24; give --num-heads"),
        (WeightMetadata(num_heads=3, norm_pix_loss=True), "give --decoder-num-heads"),
        (WeightMetadata(**HEADS), "does not state what its decoder predicts; give --norm-pix-loss"),
        (WeightMetadata(**HEADS, norm_pix_loss=True, trained_size=(32, 32)), "positions of 24 patches, not the 8x8"),
    ],
)
def test_what_nobody_says_is_asked_for(told: WeightMetadata, says: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", official(tiny_model()))
    with pytest.raises(UsageError, match=says):
        load_external(path, metadata=told, photo_check=False)


def test_hugging_faces_names_without_its_configuration_are_asked_about(tmp_path: Path) -> None:
    peer = make_peer(tiny_model(img_size=16))
    path = saved(tmp_path / "w.pth", peer.state_dict())
    with pytest.raises(UsageError, match="no config.json beside it, which states heads and norm epsilon"):
        load_external(path)


def wrong_eps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vit, "make_blocks", lambda eps, **sizes: make_blocks(**sizes))


def wrong_order(patch: pytest.MonkeyPatch) -> None:
    real = naming._fused

    def swapped(path: Path, tensors: Any) -> Any:
        found = real(path, tensors)
        return {name: reorder(tensor) if ".attn.qkv." in name else tensor for name, tensor in found.items()}

    patch.setattr(naming, "_fused", swapped)


def wrong_norms(patch: pytest.MonkeyPatch) -> None:
    real = conversion._under

    def swapped(tensors: Any, names: Any) -> Any:
        pairs = {".norm1.": ".norm2.", ".norm2.": ".norm1."}
        found = real(tensors, names)
        return {re.sub(r"\.norm[12]\.", lambda match: pairs[match[0]], name): t for name, t in found.items()}

    patch.setattr(conversion, "_under", swapped)


@pytest.mark.parametrize("plant", [wrong_eps, wrong_order, wrong_norms], ids=["eps", "order", "norms"])
def test_a_fault_of_our_own_reading_is_caught_by_the_librarys_answer(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(img_size=16, norm_eps=1e-12)
    peer = make_peer(model)
    peer.config.image_size = 16
    peer.save_pretrained(tmp_path)
    load_external(tmp_path, photo_check=False)
    plant(monkeypatch)
    with pytest.raises(MAEError, match="outputs differ from those of transformers"):
        load_external(tmp_path, photo_check=False)


def test_a_library_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mae.interop.imports.proof.find_spec", lambda name: None)
    _, report = load_external(saved(tmp_path / "w.pth", official(tiny_model())), metadata=TOLD, photo_check=False)
    assert "not compared with timm, which is not installed" in report.line()


def test_layouts_can_be_told_apart() -> None:
    signs = [layout.sign for layout in SCHEMES]
    assert not any(one != other and one.endswith(f".{other}") for one in signs for other in signs)


@pytest.mark.parametrize("told", [None, True])
def test_a_decoder_that_answers_no_number_is_refused(told: bool | None, tmp_path: Path) -> None:
    tensors = official(tiny_model(img_size=16))
    tensors["decoder_embed.weight"] = torch.full_like(tensors["decoder_embed.weight"], 3e38)
    path = saved(tmp_path / "w.pth", tensors)
    with pytest.raises(MAEError, match="with nan times the error of their mean colour"):
        load_external(path, metadata=WeightMetadata(**HEADS, norm_pix_loss=told))
