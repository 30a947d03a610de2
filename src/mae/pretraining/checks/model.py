"""Checks of a model before its run: that it is masked, compared and trained as it says.

Each check is a function of a `Subject` and says what it found in one line, with its number. What changes the model
works on a copy. They catch faults by which nothing crashes and the result is worthless.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, comb, prod
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.core.contracts import Batch
from mae.core.types import Layout, MAEOutput, MaskPlan, MaskRequest
from mae.findings import Finding
from mae.models.inference import undisturbed
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.randomness import sample_keys, view_keys
from mae.training.optimizer import make_optimizer

_MASKED_SAMPLES, _MASKS = 1024, 2048
_SIGMAS = 6.0  # of a thousand positions, chance puts none so far out
_OVERFIT_STEPS, _OVERFIT_SECONDS = 60, 5.0
_LEARNED = 0.95
"""After these steps the loss must be below this share of the first; models that learn were at 0.8 and less."""
_SURELY = 0.8
"""Of the first loss: a model that is there has shown what was asked, and needs no further steps."""
_RATE = 1e-3
_ROUNDING = 1e-4
"""Relative; sums of float32 in another order differ by less, a part left out by far more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What is checked.

    Few images are enough, and keep it short: nothing here is an estimate.

    Attributes:
        model: on its device, as the run begins with it; no check changes it.
        images: normalised training crops `[B, C, H, W]`, a few; those of one image in a row.
        numbers: the numbers of the images that the run trains on.
        seed: of the run.
        mask_ratio: share hidden, as the run has it on an average step.
        betas: of the optimizer.
        weight_decay: likewise.
        views: crops of each image.
    """

    model: MaskedAutoencoder
    images: Float[Tensor, "B C H W"]
    numbers: Int64[Tensor, " n"]
    seed: int
    mask_ratio: float
    betas: tuple[float, float]
    weight_decay: float
    views: int = 1

    @property
    def layout(self) -> Layout:
        """Of the images."""
        return self.model.tokenizer.layout_of(self.images)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        rows, columns = self.layout.grid
        return rows, columns

    def plan(self) -> MaskPlan:
        """A mask for the images, as a step would draw it."""
        # Not by the model's own `plan`, which is among what is checked.
        scores = self.model.scores(self.images)
        request = MaskRequest(layout=self.layout, keys=self.keys, ratio=self.mask_ratio, x=self.images, scores=scores)
        return self.model.masking.plan(request)

    @property
    def keys(self) -> Int64[Tensor, " B"]:
        """Of the rows of `images`, as a step would have them."""
        ids = self.numbers[: len(self.images) // self.views]
        return view_keys(sample_keys(self.seed, 0, ids), self.views).to(self.images.device)

    def copied(self) -> MaskedAutoencoder:
        """A copy of the model to train."""
        return copy.deepcopy(self.model).train()

    def output(self, model: MaskedAutoencoder, **options: Any) -> MAEOutput:
        """What a model, such as a copy, makes of the images; `options` of its forward go over these."""
        return model(**{"images": self.images, "keys": self.keys, "views": self.views} | options)


def check_model(subject: Subject) -> list[Finding]:
    """Every check, in the order of a step; PyTorch's generators are left as they were."""
    gpus = [subject.images.device] if subject.images.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(subject.seed)
        return [check(subject) for check in CHECKS]


def check_masks(subject: Subject) -> Finding:
    """Every position is hidden as often as the ratio says, and no two samples, epochs or processes share a mask."""
    ids = subject.numbers[:_MASKED_SAMPLES]
    keys = torch.cat([sample_keys(subject.seed, epoch, ids) for epoch in range(ceil(_MASKS / len(ids)))])
    images = subject.images[:1].expand(len(keys), *subject.images.shape[1:])  # for strategies that read them
    masking, scores = subject.model.masking, subject.model.scores(subject.images[:1])
    hidden = subject.model.plan(
        images,
        keys=keys.to(images.device),
        ratio=subject.mask_ratio,
        scores=None if scores is None else scores.expand(len(keys), -1),
    ).hidden
    count, num_tokens = hidden.shape
    share = float(hidden.float().mean())
    rates = hidden.float().mean(dim=0)
    bound = _SIGMAS * (share * (1 - share) / count) ** 0.5
    furthest = float((rates - share).abs().max())
    # What chance gives: pairs of samples over the number of masks there are.
    possible = comb(num_tokens, int(hidden[0].sum()))
    expected = comb(count, 2) / possible
    twins = count - len(torch.unique(hidden, dim=0))
    value = (
        f"{share:.1%} hidden, each position {float(rates.min()):.0%} to {float(rates.max()):.0%} of the time; "
        f"{twins} of {count:,} masks twice"
    )
    wrong = abs(share - subject.mask_ratio) > 1 / num_tokens
    if masking.uniform:
        wrong |= furthest > bound or twins > 5 + 3 * expected
    elif not masking.reads:
        wrong |= twins == count - 1
        if not wrong and (float(rates.min()) == 0 or float(rates.max()) == 1):
            advice = (
                "some positions are always masked or never, as far as was drawn; another mask ratio gives all turns"
            )
            return Finding(name="masks", level="warn", value=value, advice=advice)
    advice = "masks must be drawn anew for every sample and epoch; look at the mask strategy and the keys it is given"
    return _finding("masks", not wrong, value, advice)


def check_own_mask(subject: Subject) -> Finding:
    """The mask that is asked for is the one used and the one reported."""
    hidden = subject.plan().hidden
    with undisturbed(subject.model):  # no teacher learns from it
        reported = subject.output(subject.model, mask=hidden).mask.bool()
    differing = int((reported != hidden).sum())
    value = f"{differing} of {hidden.numel():,} patches differ from the mask that was asked for"
    return _finding("mask reported", differing == 0, value, "the mask is changed on its way through the model")


def check_encoder_is_blind(subject: Subject) -> Finding:
    """Noise in the place of hidden pixels changes nothing that the encoder says."""
    plan, tokenizer = subject.plan(), subject.model.tokenizer
    model = copy.deepcopy(subject.model).eval()
    values = plan.hidden.unsqueeze(-1).expand(-1, -1, subject.layout.token_values)
    where = tokenizer.join(values, subject.layout)
    noisy = torch.where(where, torch.randn_like(subject.images), subject.images)
    with torch.no_grad():
        seen, again = (model.encoder(images, plan).tokens for images in (subject.images, noisy))
    change = float((seen - again).abs().max())
    value = f"features change by {change:.1g} when hidden pixels are noise"
    return _finding("encoder sees visible patches only", change == 0, value, "masked patches leak into the encoder")


def check_encode(subject: Subject) -> Finding:
    """Whole images are encoded without a mask, alike each time."""
    model = copy.deepcopy(subject.model).eval()
    with torch.no_grad():
        first, second = model.encode(subject.images[:2]), model.encode(subject.images[:2])
    tokens, change = first.patches.shape[1], float((first.patches - second.patches).abs().max())
    whole = tokens == prod(subject.grid)
    value = f"{tokens} of {prod(subject.grid)} patches, and {change:.1g} of difference between two calls"
    return _finding("encode", whole and change == 0, value, "something random or a mask is left in the way to features")


def check_gradient(subject: Subject) -> Finding:
    """The loss asks for masked patches, and for nothing else."""
    model = subject.copied()
    output = subject.output(model, mask=subject.plan().hidden)
    output.prediction.retain_grad()
    output.loss.backward()
    assert output.prediction.grad is not None
    slope = output.prediction.grad.abs().amax(dim=-1)
    hidden = output.plan.hidden
    asked, unasked = int((slope[hidden] > 0).sum()), int((slope[~hidden] > 0).sum())
    value = (
        f"asks for {asked} of {int(hidden.sum())} masked patches and for {unasked} of {int((~hidden).sum())} visible"
    )
    raw = any(term.predicts_visible for term in model.terms)
    right = asked == int(hidden.sum()) and (raw or unasked == 0)
    if not right and float(slope.max()) == 0:
        value += "; the loss has no slope at all"
    return _finding("loss", right, value, "the mask is inverted on its way to the loss, or the target is constant")


def check_positions(subject: Subject) -> Finding:
    """Positions differ, and those of far patches more than those of near ones, down as across."""
    table = subject.model.encoder.pos_embed(subject.grid).detach().float()
    rows, columns = subject.grid
    distances = torch.cdist(table, table)
    away = distances + torch.eye(len(table), device=table.device) * distances.max()
    nearest = float(away.min()) if len(table) > 1 else 1.0
    at = torch.arange(len(table), device=table.device)
    down = (at.unsqueeze(1) // columns - at // columns).abs()
    across = (at.unsqueeze(1) % columns - at % columns).abs()
    neighbours = {
        name: distances[(steps == 1) & (others == 0)]
        for name, steps, others, length in (("down", down, across, rows), ("across", across, down, columns))
        if length > 1
    }
    alike = {name: float(found.mean()) for name, found in neighbours.items()}
    # On another grid of as many patches, the next row of one patch is the middle of a row for another.
    even = all(float(found.max() - found.min()) < 0.01 * alike[name] for name, found in neighbours.items())
    far = float(distances[(down >= rows // 2) & (across >= columns // 2)].mean())
    value = ", ".join(f"one {name} {distance:.3g}" for name, distance in alike.items()) + f", far ones {far:.3g}"
    fixed = not any(True for _ in subject.model.encoder.pos_embed.parameters())
    ordered = even and all(0 < distance < far for distance in alike.values())
    right = nearest > 1e-6 and (ordered or not fixed)  # learned positions begin without an order
    return _finding("positions", right, f"distances: {value}", "positions are zero, alike, or of another grid")


def check_target(subject: Subject) -> Finding:
    """There is something to predict."""
    plan = subject.plan()
    batch = Batch(x=subject.images, tokenizer=subject.model.tokenizer)
    target = subject.model.target(batch, plan.predicted, subject.model.taught(batch)).float()
    if subject.model.target.classes:
        found = len(target[~target.isnan()].unique())
        return _finding(
            "target", found > 1, f"{found} classes among the masked patches", "all have one class: look at the data"
        )
    flat = float((target.var(dim=-1) < 1e-4).float().mean())
    value = f"std {float(target.std()):.3g}; {flat:.0%} of the masked patches are flat"
    finding = _finding("target", flat < 0.9, value, "the images are constant, or normalised away: look at the data")
    if finding.level == "ok" and flat > 0.5:
        return Finding(name="target", level="warn", value=value, advice="most of what is to be predicted is flat")
    return finding


def check_learning(subject: Subject) -> Finding:
    """Each trained tensor gets a gradient and moves; how far in one step, block by block, for its size."""
    model = subject.copied()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = _optimizer(subject, model)
    _step(model, optimizer, subject)
    ratios = dict[str, list[float]]()
    for name, parameter in trained.items():
        if float(norm := before[name].norm()) > 0 and parameter.ndim > 1:
            ratios.setdefault(_block(name), []).append(float((parameter.detach() - before[name]).norm() / norm))
    means = {name: sum(values) / len(values) for name, values in ratios.items()}
    lowest, highest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    if wrong := _unmoved(trained, before):
        _step(model, optimizer, subject)  # a factor of a product that begins with zeros has a slope from here on
        wrong = [name for name in _unmoved(trained, before) if name in wrong]
    value = (
        f"{len(before) - len(wrong)} of {len(before)} trained tensors move; a step of {_RATE:g} changes {lowest} by "
        f"{means[lowest]:.1e}, {highest} by {means[highest]:.1e} of its size"
    )
    if wrong:
        value += f"; without gradient or still: {', '.join(wrong[:3])}" + (", ..." if len(wrong) > 3 else "")
    return _finding("every tensor learns", not wrong, value, "a part is cut off from the loss or from the optimizer")


def _unmoved(trained: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that have no gradient, or are what they were before."""
    return [
        name
        for name, parameter in trained.items()
        if parameter.grad is None or float(parameter.grad.abs().max()) == 0 or torch.equal(parameter, before[name])
    ]


def check_parts(subject: Subject) -> Finding:
    """A batch in two parts gives the gradient of the whole."""
    if len(subject.images) < 2 or any(term.reads_batch for term in subject.model.terms):
        return Finding(name="batch in parts", level="ok", value="not compared: a term reads the batch as a whole")
    images, plan = subject.images, subject.plan()
    gradients = []
    for parts in (1, 2):
        model = subject.copied()
        for part in torch.arange(2, device=images.device).chunk(parts):
            some = {"images": images[part], "plan": plan.take(part), "keys": subject.keys[part]}
            (subject.output(model, **some).loss / parts).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    difference = float(_norm(one - other for one, other in zip(*gradients, strict=True)) / _norm(gradients[0]))
    value = f"gradients differ by {difference:.1e} of their size between one part and two"
    return _finding("batch in parts", difference < _ROUNDING, value, "the loss is no mean over the images of a batch")


def check_overfit(subject: Subject) -> Finding:
    """One batch under one mask is learned by heart, at least a little."""
    model = subject.copied()
    optimizer = _optimizer(subject, model)
    began = time.monotonic()
    losses = [_step(model, optimizer, subject)]
    while (
        losses[-1] > _SURELY * losses[0]
        and len(losses) < _OVERFIT_STEPS
        and time.monotonic() - began < _OVERFIT_SECONDS
    ):
        losses.append(_step(model, optimizer, subject))
    value = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    right = losses[-1] < _LEARNED * losses[0]
    # A trained model gets worse at first, since the optimizer is a fresh one: only all the steps tell.
    if not right and len(losses) < _OVERFIT_STEPS:
        return Finding(name="one batch overfits", level="ok", value=f"{value}: too few in the time there is to judge")
    return _finding("one batch overfits", right, value, "the model does not learn even what it sees again and again")


CHECKS: tuple[Callable[[Subject], Finding], ...] = (
    check_positions,
    check_masks,
    check_own_mask,
    check_encoder_is_blind,
    check_encode,
    check_target,
    check_gradient,
    check_parts,
    check_learning,
    check_overfit,
)


def _finding(name: str, right: bool, value: str, advice: str) -> Finding:
    return Finding(name=name, level="ok" if right else "stop", value=value, advice="" if right else advice)


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all values together, above 0."""
    return torch.stack([tensor.norm() for tensor in tensors]).norm().clamp(min=1e-12)


def _optimizer(subject: Subject, model: MaskedAutoencoder) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model, weight_decay=subject.weight_decay, betas=subject.betas)
    for group in optimizer.param_groups:
        group["lr"] = _RATE
    return optimizer


def _step(model: MaskedAutoencoder, optimizer: torch.optim.Optimizer, subject: Subject) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = subject.output(model, plan=subject.plan()).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _block(name: str) -> str:
    """The block a parameter belongs to, else its part: `encoder.blocks.3`, `decoder.embed`."""
    words = name.split(".")
    return ".".join(words[:3] if "blocks" in words else words[:2])
