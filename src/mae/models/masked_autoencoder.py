"""The masked autoencoder (He et al. 2021): mask most patches, encode the rest, predict what was masked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from mae.core.contracts import Batch, Mask, Step, Target, Taught, Teacher, Term, Tokenizer
from mae.core.types import Encoded, Layout, MAEOutput, MaskPlan, MaskRequest, SourceNetwork
from mae.errors import UsageError
from mae.layers.precision import without_autocast
from mae.masks.given import plan_from_mask
from mae.models.pretrained import PretrainedEncoder, described_component

if TYPE_CHECKING:
    from mae.core.method import MethodConfig


_METHOD = ("mask", "target", "loss", "term", "teacher")
"""What a model shows of its method, beside the networks themselves."""


class MaskedAutoencoder(PretrainedEncoder):
    """An encoder and a decoder with a mask, a target and a loss; two entrances, `forward` and `encode`.

    Args:
        tokenizer: what samples are.
        encoder: sees the visible patches.
        decoder: predicts the masked ones.
        masking: chooses what is masked.
        target: what must be predicted.
        loss: distance of prediction and target.
        terms: what is added to the loss; the networks of those that have one are in `self.term_heads`, by kind, and
            teachers of their own in `self.term_teachers`.
        reads_levels: whether the decoder reads all the encoder's levels, see `Decoder.reads`.
        teacher: what target and terms may read the outputs of; its network is `self.teacher`.
        config: what it was built from, written into the model's file; None for parts put together by hand, whose
            decoder predicts for the target alone.
    """

    _teacher: nn.Module | None

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        encoder: nn.Module,
        decoder: nn.Module,
        masking: Mask,
        target: Target,
        loss: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        terms: Sequence[Term] = (),
        reads_levels: bool = False,
        teacher: Teacher | None = None,
        config: "MethodConfig | None" = None,
    ) -> None:
        super().__init__(encoder=encoder, config=config)
        self.tokenizer = tokenizer
        self.decoder: Any = decoder
        self.masking = masking
        self.target = target
        self.loss = loss
        self.terms = tuple(terms)
        heads = {term.kind: term.head(encoder) for term in self.terms}
        self.term_heads = nn.ModuleDict({kind: head for kind, head in heads.items() if head is not None})
        own = {term.kind: term.own_teacher(tokenizer) for term in self.terms}
        self.term_teachers = nn.ModuleDict({kind: network for kind, network in own.items() if network is not None})
        outputs = {} if config is None else config.outputs
        self._for_terms = {kind: width for kind, width in outputs.items() if kind != "target"}
        self.reads_levels = reads_levels
        self._teacher_component = teacher
        # No submodule: it is trained by no optimizer, and stands in no model's file.
        self.__dict__["_teacher"] = None

    @property
    def teacher(self) -> nn.Module | None:
        """The teacher's network, made from the student's weights when it is first asked for.

        None: there is none, or it is one that is opened, and nobody has handed it in.
        """
        component = self._teacher_component
        if self._teacher is None and component is not None and not component.opens:
            self.__dict__["_teacher"] = component.build(self).to(next(self.parameters()).device)
        return self._teacher

    def hand_in(self, network: SourceNetwork | None) -> None:
        """Give the teacher the network that it names; None: it names none.

        Raises:
            UsageError: see `Teacher.build_from`.
        """
        if network is not None:
            assert self._teacher_component is not None
            self.__dict__["_teacher"] = self._teacher_component.build_from(network, self.tokenizer)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "MaskedAutoencoder":
        """Where the model goes, its teacher goes too."""
        if self._teacher is not None:
            self._teacher._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        generator: torch.Generator | None = None,
        plan: MaskPlan | None = None,
        keys: Shaped[Tensor, "..."] | None = None,
        views: int = 1,
    ) -> MAEOutput:
        """Mask, encode, decode, compare; the output unpacks as `loss, pred [B, N, P], mask [B, N]`.

        Give at most one of `mask`, `generator` and `plan`; without any, the mask is drawn from PyTorch's global
        generator.

        Args:
            images: normalised images; views of the same one stand in a row.
            mask: what to mask, true = masked: `[B, N]`, the grid's shape, or pixels.
            generator: where to draw the mask from.
            plan: the mask in full. Training passes it: only the tokens in `plan.predicted` are then predicted,
                while otherwise the output holds a prediction for visible patches too (which nothing trains).
            keys: of the rows `[B]`, int64, for targets and terms that read them.
            views: rows of each image. With one, terms that compare views are left out in evaluation mode.

        Raises:
            UsageError: no image; images, mask, plan or keys of a wrong shape, a mask that masks nothing or all; one
                view, in training mode, where a term compares views.
        """
        layout, terms = self.tokenizer.layout_of(images), self._terms_of(views)
        if plan is not None and not (mask is None and generator is None):
            raise UsageError("give at most one of mask, generator and plan")
        if not len(images):
            raise UsageError("the batch holds no image")
        _check_keys(keys, len(images))
        if plan is None:
            plan = self.plan(images, mask=mask, generator=generator).predict_all()
        elif any(term.predicts_visible for term in terms):
            plan = plan.predict_all()
        _check_plan(plan, len(images), layout)
        batch = Batch(x=images, tokenizer=self.tokenizer, keys=keys, views=views)
        taught = self.taught(batch, learning=self.training)
        own = {kind: network(batch) for kind, network in self.term_teachers.items()}
        with without_autocast(images.device):  # before the networks' activations take their memory
            target, std = self._target_values(batch, plan, taught)
        encoded = self.encoded(images, plan)
        prediction, projected = self.decoded(encoded, plan, layout)
        projected |= {
            t.kind: self.term_heads[t.kind](encoded, plan, layout) for t in terms if t.kind in self.term_heads
        }
        with without_autocast(images.device):
            step = Step(
                batch=batch, plan=plan, encoded=encoded, prediction=prediction, target=target, std=std, taught=taught
            )
            reconstruction = self.loss(prediction, target, plan.weight)
            values = {
                t.kind: t(replace(step, projected=projected.get(t.kind), taught={**taught, **own.get(t.kind, {})}))
                for t in terms
            }
        weighted = [reconstruction, *(term.weight * values[term.kind] for term in terms)]
        return MAEOutput(
            loss=torch.stack(weighted).sum(),
            terms={"reconstruction": reconstruction, **values},
            prediction=prediction,
            plan=plan,
            latent=encoded.tokens,
        )

    def keep_terms(self, terms: Sequence[Term]) -> None:
        """Go on with these of its terms alone; the networks of the others go too."""
        self.terms = tuple(terms)
        kept = {term.kind for term in self.terms}
        for networks in (self.term_heads, self.term_teachers):
            for kind in networks.keys() - kept:
                del networks[kind]

    def _terms_of(self, views: int) -> tuple[Term, ...]:
        """The terms that have something to compare where there are so many views of each image."""
        if views > 1:
            return self.terms
        for term in self.terms if self.training else ():
            if term.reads_views:
                raise UsageError(
                    f"{term.kind} compares views of an image, and views is {views}; give two or more of each image, in "
                    "a row, and their number as views, as mae pretrain --repeated-aug 2 does"
                )
        return tuple(term for term in self.terms if not term.reads_views)

    def scores(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N"] | None:
        """What the mask reads of the teacher: its attention or the difficulty; None where it reads neither."""
        read = next((name for name in ("attention", "difficulty") if name in self.masking.reads), None)
        if read is None or self.teacher is None:
            return None
        scores: Tensor = getattr(self.teacher, read)(Batch(x=images, tokenizer=self.tokenizer))
        return scores

    def taught(self, batch: Batch, *, learning: bool = False) -> Taught:
        """What the teacher says of a batch, by name; nothing where there is none, or nobody reads it.

        Args:
            batch: the samples.
            learning: whether they are trained on, and the teacher may learn of them.

        Raises:
            UsageError: target or terms need a teacher whose network is not there.
        """
        if not self._reads_teacher:  # one that the mask alone follows is not asked for more
            return {}
        if self.teacher is not None:
            self.teacher.training = learning
            return self.teacher(batch)
        source = getattr(self._teacher_component, "source", "none")
        raise UsageError(
            f"this model's loss compares with a teacher, and no model's file holds one (teacher_source {source}); "
            "use encode or predict, or train with mae.pretrain, which opens the teacher"
        )

    @property
    def _reads_teacher(self) -> bool:
        """Whether target or terms read the teacher's outputs."""
        return bool(self.target.needs or any(term.needs for term in self.terms))

    @property
    def has_loss(self) -> bool:
        """Whether a loss can be computed, not so where target or terms need a teacher whose network is not there."""
        return self.teacher is not None or not self._reads_teacher

    def predict(self, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> Float[Tensor, "B N P"]:
        """The prediction for every token in raster order, without a loss; so no teacher is needed.

        Args:
            images: normalised images.
            plan: what is masked; all of it is predicted, whatever `plan.predicted` holds.

        Raises:
            UsageError: see `encoded`; a plan for other images.
        """
        plan, layout = plan.predict_all(), self.tokenizer.layout_of(images)
        _check_plan(plan, len(images), layout)
        return self.decoded(self.encoded(images, plan), plan, layout)[0]

    def encoded(self, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> Encoded:
        """What the decoder is given.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        return self.encoder(images, plan, levels=self.reads_levels)

    def decoded(
        self, encoded: Encoded, plan: MaskPlan, layout: Layout
    ) -> tuple[Float[Tensor, "B M P"], dict[str, Float[Tensor, "B M _"]]]:
        """What the decoder predicts of the tokens in `plan.predicted`: for the target, and by kind for terms."""
        return self.by_reader(self.decoder(encoded, plan, layout))

    def by_reader(
        self, prediction: Float[Tensor, "B M _"]
    ) -> tuple[Float[Tensor, "B M P"], dict[str, Float[Tensor, "B M _"]]]:
        """What leaves the decoder's last layer, split: for the target, and by kind for terms."""
        if not self._for_terms:
            return prediction, {}
        widths = list(self._for_terms.values())
        target, *others = prediction.split([prediction.shape[-1] - sum(widths), *widths], dim=-1)
        return target, dict(zip(self._for_terms, others, strict=True))

    def _target_values(
        self, batch: Batch, plan: MaskPlan, taught: Taught
    ) -> tuple[Float[Tensor, "B M P"], Float[Tensor, "B M 1"] | None]:
        """What is to be predicted, and where terms compare pixels what one unit of it is in the samples' own."""
        if any(term.reads_pixels for term in self.terms):
            return self.target.with_std(batch, plan.predicted)  # type: ignore[attr-defined]
        return self.target(batch, plan.predicted, taught), None

    def plan(
        self,
        images: Shaped[Tensor, "B C H W"],
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        generator: torch.Generator | None = None,
        keys: Shaped[Tensor, "..."] | None = None,
        ratio: float | None = None,
        scores: Float[Tensor, "B N"] | None = None,
        progress: float | None = None,
    ) -> MaskPlan:
        """The mask for these images: the one given, or one drawn; only masked tokens are to be predicted.

        Args:
            images: normalised images.
            mask: see `forward`.
            generator: where to draw the keys from; None: PyTorch's global one.
            keys: one an image `[B]`, int64, of which the mask is a pure function.
            ratio: fraction to be masked; None: the strategy's own.
            scores: what `scores` gave of these images; None: it is asked where the mask reads it.
            progress: of the run, see `MaskRequest`.

        Raises:
            UsageError: see `forward`.
        """
        layout = self.tokenizer.layout_of(images)
        if mask is not None:
            if generator is not None:
                raise UsageError("give a mask or a generator to draw one from, not both")
            if not isinstance(mask, Tensor):
                raise UsageError(f"the mask is of type {type(mask).__name__}; expected a tensor, see torch.as_tensor")
            return plan_from_mask(mask.to(images.device), batch=len(images), layout=layout)
        if keys is None:
            device = images.device if generator is None else generator.device
            keys = torch.randint(-(2**63), 2**63 - 1, (len(images),), generator=generator, device=device)
        _check_keys(keys, len(images))
        scores = self.scores(images) if scores is None else scores
        plan = self.masking.plan(
            MaskRequest(
                layout=layout, keys=keys.to(images.device), ratio=ratio, x=images, scores=scores, progress=progress
            )
        )
        return replace(plan, grid=layout.grid)

    def _facts(self) -> list[tuple[str, str]]:
        parts = [("decoder", self.decoder), *([] if self._teacher is None else [("teacher's network", self._teacher)])]
        sizes = [(name, f"{sum(weight.numel() for weight in part.parameters()):,} parameters") for name, part in parts]
        config = self.config
        if config is None:
            return [*super()._facts(), *sizes]
        described = [(slot, described_component(part)) for slot, part in config.components() if slot in _METHOD]
        return [*super()._facts(), *sizes, *described]


def _check_plan(plan: MaskPlan, batch: int, layout: Layout) -> None:
    shape, expected = tuple(plan.hidden.shape), (batch, layout.num_tokens)
    if shape != expected:
        raise UsageError(f"the plan is for images and tokens {shape}; expected {expected}")
    if plan.visible.shape[1] < 1:
        raise UsageError("the plan leaves no token visible; at least one must be")


def _check_keys(keys: Tensor | None, batch: int) -> None:
    if keys is not None and (keys.shape != (batch,) or keys.dtype != torch.int64):
        raise UsageError(
            f"keys are {keys.dtype} of shape {tuple(keys.shape)}; expected torch.int64, one an image: {[batch]}"
        )
