"""The classifier against timm's Vision Transformer, its start, its loss, and what each way of freezing trains."""

from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor, nn
from torch.testing import assert_close

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.layers.lora import merge_lora
from mae.layers.pos_embed import sincos_2d
from mae.models.classifier import ImageClassifier, build_classifier, train_biases, train_last_blocks, train_lora
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.training.optimizer import layered_groups

CLASSES = 5


def make(config: MethodConfig | None = None, **changes: Any) -> ImageClassifier:
    torch.manual_seed(0)
    options = {"num_classes": CLASSES, "drop_path": 0.0, "label_smoothing": 0.0, "pretrained": None} | changes
    return build_classifier(config or tiny_config(), **options)


def make_random(**changes: Any) -> ImageClassifier:
    """Every weight random, so that none can hide behind a zero or a one."""
    classifier = make(**changes)
    for weight in classifier.parameters():
        nn.init.normal_(weight, std=0.2)
    return classifier


def timm_twin(classifier: ImageClassifier, config: MethodConfig, **options: Any) -> VisionTransformer:
    twin = VisionTransformer(
        img_size=config.layout.size,
        patch_size=config.layout.patch,
        num_classes=CLASSES,
        embed_dim=config.encoder.embed_dim,
        depth=config.encoder.depth,
        num_heads=config.encoder.num_heads,
        mlp_ratio=config.encoder.mlp_ratio,
        class_token=config.encoder.cls_token,
        global_pool="avg",
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        **options,
    )
    state = {timm_name(name): weight for name, weight in classifier.state_dict().items()}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].reshape(-1, 3, *config.layout.patch)
    state["pos_embed"] = nn.functional.pad(state["pos_embed"], (0, 0, int(config.encoder.cls_token), 0)).unsqueeze(0)
    twin.load_state_dict(state)
    return twin


def timm_name(name: str) -> str:
    return name.removeprefix("encoder.").replace("pos_embed.table", "pos_embed")


def images() -> Tensor:
    return images_for(tiny_model())


@pytest.mark.parametrize("cls_token", [True, False])
def test_logits_and_gradients_are_those_of_timm(cls_token: bool) -> None:
    config = tiny_config(cls_token=cls_token)
    ours = make_random(config=config)
    theirs = timm_twin(ours, config)
    target = torch.tensor([0, 3, 4])
    logits = theirs(images())
    output = ours(images(), target)
    assert_close(output.logits, logits, rtol=1e-5, atol=1e-5)
    assert_close(ours(images()), logits, rtol=1e-5, atol=1e-5)
    output.loss.backward()
    nn.functional.cross_entropy(logits, target).backward()
    others = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        expected = others[timm_name(name)].grad
        assert weight.grad is not None and expected is not None, name
        if name == "encoder.pos_embed.table":
            expected = expected[0, int(cls_token) :]
        assert_close(weight.grad, expected.reshape(weight.shape), rtol=1e-4, atol=1e-5)


def test_layers_and_decay_are_those_of_timm() -> None:
    config = tiny_config(depth=4)
    ours = make(config=config)
    theirs = timm_twin(ours, config)
    names = {weight: name for name, weight in theirs.named_parameters()}
    expected = {
        names[weight]: (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(theirs, 0.05, theirs.no_weight_decay(), layer_decay=0.65)
        for weight in group["params"]
    }
    groups = layered_groups(
        ours,
        layer_of=ours.layer_of,
        num_layers=ours.num_layers,
        decay=0.65,
        weight_decay=0.05,
        undecayed=ours.undecayed,
    )
    found = {
        timm_name(name): (group["lr_scale"], group["weight_decay"]) for group in groups for name, _ in group["params"]
    }
    assert ours.num_layers == 5
    assert found == {name: pytest.approx(values) for name, values in expected.items()}
    assert found["patch_embed.proj.weight"] == pytest.approx((0.65**5, 0.05)) and found["head.bias"] == (1.0, 0.0)


def test_a_fresh_head_and_learned_positions_start_as_the_official_ones() -> None:
    classifier = make(config=tiny_config(embed_dim=192), num_classes=50)
    head = classifier.head
    assert float(head.weight.detach().std()) == pytest.approx(2e-5, rel=0.05)
    assert (head.bias == 0).all()
    assert classifier.fc_norm.eps == 1e-6
    table = classifier.encoder.pos_embed.table
    assert isinstance(table, nn.Parameter) and table.requires_grad
    assert torch.equal(table.detach(), sincos_2d((4, 6), 192))
    assert not any(name.startswith("encoder.norm") for name in classifier.state_dict())


@pytest.mark.parametrize("pos_embed", ["sincos2d", "learned"])
def test_a_pretrained_encoder_is_copied_whole(pos_embed: str) -> None:
    pretrained = tiny_model(pos_embed=pos_embed)
    classifier = make(pretrained=pretrained, drop_path=0.3).eval()
    pretrained.encoder.norm = nn.Identity()
    assert_close(classifier.encoder.encode(images()).mean, pretrained.encode(images()).mean, rtol=0, atol=0)
    before = {name: weight.clone() for name, weight in pretrained.state_dict().items()}
    for weight in classifier.parameters():
        nn.init.zeros_(weight)
    assert all(torch.equal(weight, before[name]) for name, weight in pretrained.state_dict().items())


def test_another_image_size_gets_its_own_table() -> None:
    pretrained = tiny_model()
    classifier = make(config=tiny_config(img_size=(8, 32)), pretrained=pretrained)
    assert torch.equal(classifier.encoder.pos_embed.table.detach(), sincos_2d((2, 8), 24))
    with pytest.raises(UsageError, match="learned positions know a grid of 4x6"):
        make(config=tiny_config(img_size=(8, 32)), pretrained=tiny_model(pos_embed="learned"))


@pytest.mark.parametrize(
    "change", [{"num_heads": 2}, {"patch_size": (2, 8)}, {"depth": 3}, {"cls_token": False}, {"cls_tokens": 2}]
)
def test_an_encoder_of_other_sizes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"the pre-trained encoder has {next(iter(change))}"):
        make(config=tiny_config(**change), pretrained=tiny_model())


def test_a_model_without_configuration_and_a_single_class_are_refused() -> None:
    model = tiny_model()
    by_hand = MaskedAutoencoder(
        tokenizer=model.tokenizer,
        encoder=model.encoder,
        decoder=model.decoder,
        masking=model.masking,
        target=model.target,
        loss=model.loss,
    )
    with pytest.raises(UsageError, match="carries no configuration"):
        make(pretrained=by_hand)
    with pytest.raises(UsageError, match="num_classes is 1"):
        make(num_classes=1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_official_formula(smoothing: float) -> None:
    classifier = make_random(label_smoothing=smoothing)
    first, second = torch.tensor([0, 3, 4]), torch.tensor([2, 3, 1])
    on, off = 1 - smoothing + smoothing / CLASSES, smoothing / CLASSES
    spread = [torch.full((3, CLASSES), off).scatter(1, labels.unsqueeze(1), on) for labels in (first, second)]
    one_hot = [nn.functional.one_hot(labels, CLASSES).float() for labels in (first, second)]
    log_p = classifier(images()).log_softmax(dim=-1)

    def expected(target: Tensor) -> Tensor:
        return -(target * log_p).sum(dim=-1).mean()

    output = classifier(images(), first)
    assert_close(output.loss, expected(spread[0]))
    assert output.terms == {"cross_entropy": output.loss}
    mixed = classifier(images(), 0.3 * one_hot[0] + 0.7 * one_hot[1])  # mixup smooths, then mixes
    assert_close(mixed.loss, expected(0.3 * spread[0] + 0.7 * spread[1]))


def test_the_loss_is_float32_under_autocast() -> None:
    classifier = make_random()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = classifier(images(), torch.tensor([0, 3, 4]))
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    assert_close(output.loss, nn.functional.cross_entropy(output.logits.float(), torch.tensor([0, 3, 4])))


def trained(classifier: ImageClassifier) -> set[str]:
    """What gets a gradient; it must be what asks for one."""
    classifier(images(), torch.tensor([0, 3, 4])).loss.backward()
    named = dict(classifier.named_parameters())
    for name, weight in named.items():
        assert (weight.grad is not None) == weight.requires_grad, name
    return {name for name, weight in named.items() if weight.grad is not None}


HEAD = {"fc_norm.weight", "fc_norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_last_blocks_train_and_nothing_is_kept_of_the_others(k: int) -> None:
    config = tiny_config(depth=3)
    classifier = make(config=config)
    train_last_blocks(classifier, k)
    kept: list[bool] = []
    for block in classifier.encoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: kept.append(output.requires_grad))
    blocks = {name for name, _ in classifier.named_parameters() if name.startswith("encoder.blocks.")}
    expected = {name for name in blocks if int(name.split(".")[2]) >= 3 - k}
    assert trained(classifier) == HEAD | expected and len(expected) == 12 * k
    assert kept == [False] * (3 - k) + [True] * k


def test_frozen_blocks_say_the_same_in_training_and_after_it() -> None:
    classifier = make(config=tiny_config(depth=3), drop_path=0.9, pretrained=tiny_model(depth=3)).train()
    train_last_blocks(classifier, 1)
    frozen = classifier.encoder.blocks[:2]
    x = torch.randn(8, 3, 24)
    before = frozen(x)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.1, weight_decay=0.5)
    last = classifier.encoder.blocks[2].mlp.fc1.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        classifier(images(), torch.tensor([0, 3, 4])).loss.backward()
        optimizer.step()
    assert torch.equal(frozen(x), before)
    assert not torch.equal(classifier.encoder.blocks[2].mlp.fc1.weight, last)
    assert classifier.encoder.blocks[2].drop_path.rate == 0.9


@pytest.mark.parametrize("k", [-1, 3])
def test_more_blocks_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(UsageError, match=rf"last {k} blocks; the encoder has 2"):
        train_last_blocks(make(), k)


def test_biases_alone_train() -> None:
    classifier = make()
    train_biases(classifier)
    biases = {name for name, _ in classifier.named_parameters() if name.endswith(".bias")}
    assert trained(classifier) == biases | {"head.weight"}
    assert {"encoder.blocks.0.norm1.bias", "encoder.patch_embed.proj.bias", "fc_norm.bias"} <= biases


def test_low_rank_products_train_and_merge_into_the_same_classifier() -> None:
    classifier = make_random()
    plain_names = set(classifier.state_dict())
    before = classifier(images())
    train_lora(classifier, rank=2)
    assert torch.equal(classifier(images()), before)
    layers = [f"encoder.blocks.{k}.attn.{name}" for k in range(2) for name in ("qkv", "proj")]
    assert trained(classifier) == HEAD | {f"{layer}.{matrix}" for layer in layers for matrix in ("down", "up")}
    assert {classifier.layer_of(f"{layer}.up") for layer in layers} == {1, 2}
    torch.optim.SGD([p for p in classifier.parameters() if p.requires_grad], lr=0.1).step()
    after = classifier(images())
    assert not torch.allclose(after, before, atol=1e-3)
    merge_lora(classifier)
    assert_close(classifier(images()), after, rtol=1e-5, atol=1e-5)
    assert set(classifier.state_dict()) == plain_names
