"""What each part of a method promises, and what it may read; the first thing to look at before writing one.

A component of your own may inherit from the class of its slot here, which gives the usual answers, or have the same
attributes without it. Whoever treats components differently asks an attribute named here, never a class or a name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxtyping import Float, Int64
from torch import Tensor, nn

from mae.core.component import Component
from mae.core.types import Encoded, Layout, MaskPlan, MaskRequest, SourceNetwork
from mae.errors import UsageError


@dataclass(frozen=True)
class Tokenizer(Component):
    """What samples are, and how they are cut into tokens: one per modality.

    Attributes:
        layout: sizes of a sample and of its tokens.
        mean: of each channel, of samples that are normalised; None where it is not known.
        std: likewise.
        channels: names of the channels in order; None where they have none.
        nodata: the value that stands for no measurement in files; None: every value is one.
        pixel_dtype: type of the values in files, which gives the unit of `mean` and `std`; None where it is not known.
    """

    slot: ClassVar[str] = "tokenizer"

    if TYPE_CHECKING:
        mean: Any
        std: Any
        channels: Any
        nodata: Any
        pixel_dtype: Any

    @property
    def layout(self) -> Layout:
        """Of the samples that the model is made for."""
        raise NotImplementedError

    def layout_of(self, x: Tensor) -> Layout:
        """Of these samples `[B, C, *size]`, which may have another size.

        Raises:
            UsageError: samples of a wrong shape or type.
        """
        raise NotImplementedError

    def cut(self, x: Tensor, tokens: Int64[Tensor, "B M"] | None = None) -> Float[Tensor, "B M P"]:
        """Raw values of the given tokens (None: every token in raster order)."""
        raise NotImplementedError

    def join(self, values: Float[Tensor, "B N P"], layout: Layout) -> Tensor:
        """The samples of a whole grid of tokens; the inverse of `cut`."""
        raise NotImplementedError

    def embed(self, dim: int) -> nn.Module:
        """A module from samples and the numbers of tokens (None: all) to `[B, V, dim]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mask(Component):
    """Which tokens are masked.

    Attributes:
        ratio: fraction of the tokens that is masked.
        uniform: whether every position is masked equally often and every set of tokens equally likely.
        predicts_all: whether all masked tokens are predicted in training.
        reads: what of a request it needs beside layout and keys: the samples (`x`), or as `scores` the teacher's
            attention (`attention`) or how hard it holds each token to be (`difficulty`).
    """

    slot: ClassVar[str] = "mask"
    uniform: ClassVar[bool] = True
    predicts_all: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset()

    if TYPE_CHECKING:
        ratio: Any

    def num_visible(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens stay visible; `ratio` None: the strategy's own.

        Raises:
            UsageError: the ratio is out of range, or would leave no visible or no masked token.
        """
        if ratio is not None:  # checked as any other is
            return replace(self, ratio=ratio).num_visible(layout)
        num_tokens = layout.num_tokens
        # The product of floats may fall a hair below the whole number it stands for: 10 * (1 - 0.9) < 1.
        num_visible = floor(num_tokens * (1 - self.ratio) + 1e-6)
        if not 0 < num_visible < num_tokens:
            raise UsageError(
                f"mask_ratio {self.ratio} on a grid of {'x'.join(map(str, layout.grid))} = {num_tokens} patches leaves "
                f"{num_visible} visible and {num_tokens - num_visible} masked; each must be at least 1: "
                "use smaller patches, larger images or another ratio"
            )
        return num_visible

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The plan of each sample, a pure function of its key; all samples have equally many visible tokens.

        Raises:
            UsageError: see `num_visible`.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The samples of a step.

    Attributes:
        x: normalised samples; views of the same one stand in a row.
        tokenizer: of the method.
        keys: one a row; None where they are not known.
        views: rows of each sample.

    Raises:
        UsageError: rows that are no whole samples.
    """

    x: Float[Tensor, "B C *size"]
    tokenizer: Tokenizer
    keys: Int64[Tensor, " B"] | None = None
    views: int = 1

    def __post_init__(self) -> None:
        if self.views < 1 or len(self.x) % self.views:
            raise UsageError(
                f"views is {self.views}, and the batch has {len(self.x)} rows; expected as many views of every sample, "
                "those of one in a row"
            )

    @property
    def layout(self) -> Layout:
        """Sizes of these samples and of their tokens."""
        return self.tokenizer.layout_of(self.x)

    def cut(self, tokens: Int64[Tensor, "B M"] | None = None) -> Float[Tensor, "B M P"]:
        """Raw values of the given tokens (None: every token in raster order)."""
        return self.tokenizer.cut(self.x, tokens)

    def paired(self, values: Float[Tensor, "B ..."]) -> Float[Tensor, "samples views ..."]:
        """Values of each row with those of the other views of its sample beside them."""
        return values.unflatten(0, (-1, self.views))


Taught = Mapping[str, Tensor]
"""What a teacher says of a batch, by name."""


@dataclass(frozen=True)
class Target(Component):
    """What the decoder must predict.

    Attributes:
        to_pixels: from target values to raw ones, `(values, batch, tokens) -> [B, M, P]`; None where there is no way
            back: no panels are then drawn, no PSNR is measured.
        reads_whole: whether a token's target depends on samples beyond that token.
        classes: whether its value is the number of a class, NaN without one, for a loss that `reads_classes`;
            the prediction is logits of `width` classes.
        needs: names of the teacher's outputs it reads.
    """

    slot: ClassVar[str] = "target"
    to_pixels: ClassVar[Any] = None
    classes: ClassVar[bool] = False
    reads_whole: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """Values predicted for a token: the size of the decoder's head.

        Args:
            layout: of the samples.
            gives: widths of the teacher's outputs, by name; None: there is no teacher.
        """
        raise NotImplementedError

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M P"]:
        """Target values of the given tokens (None: every token in raster order), float32; of `classes` P is 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Loss(Component):
    """The distance of prediction and target.

    Attributes:
        reads_classes: whether it takes predictions for logits of the target's `classes`, and asks nothing of a token
            without one.
        ignores_length: whether it is the same for a prediction of any length, so that its error says nothing.
    """

    slot: ClassVar[str] = "loss"
    reads_classes: ClassVar[bool] = False
    ignores_length: ClassVar[bool] = False

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M _"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """A scalar, float32; `weight` says how much each token counts, None: each alike."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """All that a term may read.

    Attributes:
        batch: the samples.
        plan: their mask.
        encoded: what the encoder made of the visible tokens.
        prediction: of the tokens in `plan.predicted`, in target units.
        target: true values of the same.
        std: what one unit of the target is in the samples' own unit; None: the same, or a target that is no pixels.
        taught: the teacher's outputs, and those of the term's own, see `Term.own_teacher`.
        projected: what the term's own head made, or the decoder for it, see `Term.head` and `outputs`; None: neither.
    """

    batch: Batch
    plan: MaskPlan
    encoded: Encoded
    prediction: Float[Tensor, "B M P"]
    target: Float[Tensor, "B M _"]
    std: Float[Tensor, "B M 1"] | None
    taught: Taught
    projected: Tensor | None = None

    @property
    def features(self) -> Float[Tensor, "B D"]:
        """The mean visible token of each row, float32."""
        return self.encoded.mean_visible(self.plan)

    def masked_pixels(self) -> Tensor:
        """Where samples are masked, `[B, 1, *size]`, true = masked."""
        layout = self.batch.layout
        where = self.plan.hidden.unsqueeze(-1).expand(-1, -1, layout.token_values // layout.channels)
        return self.batch.tokenizer.join(where, layout)

    def pixel_error(self, *, raw: bool = False) -> Tensor:
        """Prediction minus target as samples `[B, C, *size]`, in the samples' own unit.

        A per-patch normalised prediction is brought back with the true mean and std of its patch, so an error counts by
        the contrast of the patch it is made in.

        Args:
            raw: with the errors of visible tokens, which must then be predicted; else those are 0.
        """
        error = self.prediction.float() - self.target
        if self.std is not None:  # the mean is in both and cancels
            error = error * self.std
        whole = self.plan.on_grid(error)
        if not raw and self.plan.visible.shape[1] + self.plan.predicted.shape[1] > self.plan.hidden.shape[1]:
            whole = whole * self.plan.hidden.unsqueeze(-1)  # visible ones are predicted too
        return self.batch.tokenizer.join(whole, self.batch.layout)


@dataclass(frozen=True)
class Term(Component):
    """Something added to the loss, times its weight.

    Attributes:
        weight: how much it counts; 0: not at all.
        reads_batch: whether it compares samples of a batch, which micro-batches then change.
        reads_views: whether it compares views of a sample: there must be two or more, and where they are no views of
            one another, as in evaluation, the term is left out.
        reads_pixels: whether it reads `pixel_error`, which only a target with `to_pixels` has.
        reads_whole: whether it reads samples as wholes, which partial prediction and missing values leave holes in.
        predicts_visible: whether it reads predictions of visible tokens.
        predicts_loss: whether its head says of each predicted token `[B, M, 1]` how hard that is, for the teacher's
            `difficulty`; its error is then a squared one, which a target of classes has not.
        needs: names of the teacher's outputs it reads.
    """

    slot: ClassVar[str] = "term"
    predicts_loss: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = False
    reads_views: ClassVar[bool] = False
    reads_pixels: ClassVar[bool] = False
    reads_whole: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    if TYPE_CHECKING:
        weight: Any

    @property
    def predicts_visible(self) -> bool:
        """Whether predictions of visible tokens are read."""
        return False

    @property
    def reads_cls(self) -> bool:
        """Whether the class token is read."""
        return False

    def head(self, encoder: Any) -> nn.Module | None:
        """A network of the term's own, from what the encoder made to what the term compares; None: it has none.

        It is called with an `Encoded`, its `MaskPlan` and the samples' `Layout`, and its result is the term's
        `Step.projected`. Its weights are trained with the model's: they are in checkpoints and in the model's file, and
        in no export.

        Args:
            encoder: the network it reads.

        Returns:
            The network, with fresh weights from PyTorch's global generator.
        """
        return None

    def own_teacher(self, tokenizer: Tokenizer) -> nn.Module | None:
        """A network that says what is true, as a teacher's does (see `Teacher.build`), for the term alone; None: none.

        What it gives is in the term's `Step.taught`, in place of what the run's teacher gives by the same name. Unlike
        the latter's its state is in the model's file, and in no export.
        """
        return None

    @property
    def outputs(self) -> int:
        """How many values the decoder predicts of each token for the term, beside the target's, or 0.

        They are the term's `Step.projected`, `[B, M, outputs]`; it has them or a `head`, not both.
        """
        return 0

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """A scalar, float32, not multiplied by `weight`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Encoder(Component):
    """From the visible tokens to features.

    Attributes:
        embed_dim: width of a token.
        depth: blocks.
        mask_tokens: whether mask tokens stand where patches are masked, instead of nothing.
        cls_token: whether a class token leads the sequence.
    """

    slot: ClassVar[str] = "encoder"

    if TYPE_CHECKING:
        embed_dim: Any
        depth: Any
        mask_tokens: Any
        cls_token: Any

    @property
    def num_prefix(self) -> int:
        """Tokens that lead the sequence, which are no patches and never masked."""
        raise NotImplementedError

    def build(self, tokenizer: Tokenizer, **options: Any) -> nn.Module:
        """The network, with fresh weights from PyTorch's global generator.

        Its `mask_token` is None unless the option `mask_tokens` is set. One whose `attends` is true has `attention(x)`:
        block after block how much each token of whole samples attends to each other, `[B, heads, L, L]`, of which
        `num_prefix` lead; see `MAEEncoder`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Decoder(Component):
    """Predicts the masked tokens from the encoded visible ones.

    Attributes:
        reads: the encoder's last level, or all of them.
        needs_mask_tokens: whether it wants mask tokens to have passed the encoder.
        min_tokens: encoded tokens there must be at least.
    """

    slot: ClassVar[str] = "decoder"
    reads: ClassVar[Literal["last", "levels"]] = "last"
    needs_mask_tokens: ClassVar[bool] = False
    min_tokens: ClassVar[int] = 1

    def build(
        self, *, encoder: Any, layout: Layout, num_outputs: int, activation_checkpointing: bool = False
    ) -> nn.Module:
        """The network `(encoded, plan, layout) -> [B, M, num_outputs]`, with fresh weights.

        Args:
            encoder: the network it reads.
            layout: of the samples it is made for.
            num_outputs: values predicted for a token.
            activation_checkpointing: whether blocks are computed again in the backward pass instead of kept.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Teacher(Component):
    """A network that is not trained by gradients, and whose outputs targets and terms may read.

    Attributes:
        gives_scores: whether its network has `attention(batch)`: how much it attends to each token `[B, N]`, and, where
            a term `predicts_loss`, `difficulty(batch)`: how large a loss it expects there. A mask reads one of them.
        changes: whether its outputs for the same samples change in a run: a loss of one step is then measured on
            another scale than that of the next, and says little by itself.
        for_outputs: names of the options that say what its outputs are, and nothing of what a mask reads.
        opens: whether its network is the one that its option `source` names: a run, a file, `timm:NAME`, `hf:NAME`.
            Whoever trains opens that, keeps the teacher as `measured` of it, and hands it in (`build_from`). Nothing of
            it is stored, and a model's file is read without it.
        source: see there.
    """

    slot: ClassVar[str] = "teacher"
    gives_scores: ClassVar[bool] = False
    changes: ClassVar[bool] = False
    for_outputs: ClassVar[frozenset[str]] = frozenset()
    opens: ClassVar[bool] = False

    if TYPE_CHECKING:
        source: Any

    def gives(self, encoder: Encoder) -> Mapping[str, int]:
        """Names of its outputs `[B, N, width]`, and their widths; of classes their number, the output is `[B, N, 1]`.

        Args:
            encoder: of the student.

        Raises:
            UsageError: an option that does not fit that encoder.
        """
        raise NotImplementedError

    def build(self, student: Any) -> nn.Module:
        """The network, made when the student's weights are there: from a `Batch` to its outputs by name.

        Its `after_step(student, progress)` is called after each step that changed the student's weights, with the
        run's progress in (0, 1]. It is in training mode for batches that the student is trained on, and may learn of
        them; where it has `forget_step()`, that is called instead after a step that was skipped because it was not
        finite. Where it has `numbers()`, these are watched: names and values. What its `state_dict` holds is in
        checkpoints, and never in a model's file; every process must hold the same between steps.

        Args:
            student: the model, with its `encoder`, its `tokenizer` and the networks of its terms (`term_heads`); it
                must not be changed.
        """
        raise NotImplementedError

    def measured(self, network: SourceNetwork) -> "Teacher":
        """The same teacher with what is measured of its network, where it `opens` one: `gives` then knows its widths.

        What changes with the network's outputs must be among it: a run that goes on is refused where it differs.

        Raises:
            UsageError: an option that does not fit that network.
        """
        raise NotImplementedError

    def build_from(self, network: SourceNetwork, tokenizer: Tokenizer) -> nn.Module:
        """`build` for a teacher that `opens` a network.

        Args:
            network: the one it was measured of.
            tokenizer: of the student.

        Raises:
            UsageError: the network cannot see the student's samples, or has other tokens.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Adapter(Component):
    """What of an encoder is trained that begins with weights worth keeping, and what is added to it for that.

    Adapted weights are in checkpoints and in the files of a run; whoever else opens these gets a plain encoder, into
    which they are merged.
    """

    slot: ClassVar[str] = "adapter"

    def check(self, encoder: Encoder) -> None:
        """Refuse options that do not fit an encoder.

        Raises:
            UsageError: that.
        """
        raise NotImplementedError

    def apply(self, encoder: Any) -> None:
        """Change the encoder in place; it computes the same as before. Its own weights keep their names."""
        raise NotImplementedError

    def merge(self, encoder: nn.Module) -> None:
        """Make the encoder plain again in place; it computes the same as before, all of it is free to be trained."""
        raise NotImplementedError
