"""Whether the components of a method fit each other: told before anything is built."""

from typing import TYPE_CHECKING, Any

from mae.core.contracts import Term
from mae.core.kinds import find, kinds
from mae.errors import UsageError

if TYPE_CHECKING:
    from mae.core.method import MethodConfig

_MAX_TABLE = 1 << 28
"""Values of a table of positions: it must fit in memory."""


def check_method(method: "MethodConfig") -> None:
    """Refuse components that do not fit each other.

    Raises:
        UsageError: they do not.
    """
    layout, target = method.tokenizer.layout, method.target
    width = max(value for _, part in method.components() if (value := getattr(part, "embed_dim", 0)) >= 0)
    if layout.num_tokens * width > _MAX_TABLE:
        raise UsageError(
            f"img_size {layout.size} in patches of {layout.patch} makes {layout.num_tokens} tokens; of width {width} "
            f"at most {_MAX_TABLE // width}"
        )
    whole = [part.kind for part in (target, *method.terms) if part.reads_whole]
    for kind in whole:
        if method.tokenizer.nodata is not None:
            raise UsageError(
                f"{kind} reads whole samples, and those have gaps where no data is; leave out {kind} or nodata"
            )
    for term in method.terms:
        _check_term(term, method)
    for part in (target, *method.terms):
        if missing := sorted(part.needs - method.gives.keys()):
            giving = " or ".join(f"--teacher {kind}" for kind in _teachers_giving(missing[0], method)) or "one"
            raise UsageError(f"{part.slot} {part.kind} needs a teacher that gives {missing[0]}; give {giving}")
    _check_loss(method)
    if method.decoder.needs_mask_tokens != method.encoder.mask_tokens:
        have = "" if method.encoder.mask_tokens else "no "
        raise UsageError(
            f"decoder {method.decoder.kind} and an encoder with {have}mask tokens do not fit; "
            f"give --{'no-' if method.encoder.mask_tokens else ''}encoder-mask-tokens, or use another decoder"
        )
    _check_scores(method)
    check_visible(method)  # a ratio that leaves too little is refused before any training,
    target.width(layout, method.gives)  # and so are tokens that the target cannot be made of


def check_visible(method: "MethodConfig", ratio: float | None = None) -> None:
    """Refuse a mask ratio that leaves the decoder too few tokens; None: the mask's own.

    Raises:
        UsageError: it does; see `Mask.num_visible`.
    """
    visible, least = method.mask.num_visible(method.layout, ratio), least_visible(method.encoder, method.decoder)
    if visible < least:
        ratio = method.mask.ratio if ratio is None else ratio
        raise UsageError(
            f"decoder {method.decoder.kind} chooses among visible tokens, and mask_ratio {ratio} leaves {visible} of "
            f"{method.layout.num_tokens} patches; expected {least} or more: use a lower ratio or smaller patches"
        )


def least_visible(encoder: Any, decoder: Any) -> int:
    """Patches that must stay visible, so that the decoder has as many tokens as it needs."""
    return max(1, decoder.min_tokens - encoder.num_prefix)


def _teachers_giving(output: str, method: "MethodConfig") -> list[str]:
    found = {kind: find("teachers", kind) for kind in kinds("teachers")}
    # One that opens a network gives nothing before it is told which.
    each = {kind: cls(**({"source": "any"} if cls.opens else {})) for kind, cls in found.items()}
    return [kind for kind, teacher in each.items() if output in teacher.gives(method.encoder)]


def _check_loss(method: "MethodConfig") -> None:
    target, loss = method.target, method.loss
    if target.classes != loss.reads_classes:
        classes = "classes" if target.classes else "no classes"
        fitting = "--loss cross_entropy" if target.classes else "another --loss, or --target codes"
        raise UsageError(f"target {target.kind} has {classes}, and loss {loss.kind} does not fit it; give {fitting}")


def _check_scores(method: "MethodConfig") -> None:
    """Whether the teacher says of each token what the mask reads."""
    if "attention" in method.mask.reads:
        _check_attention(method)
    if "difficulty" in method.mask.reads:
        _check_difficulty(method)


def _check_attention(method: "MethodConfig") -> None:
    kind = method.mask.kind
    if method.teacher is None or not method.teacher.gives_scores:
        raise UsageError(f"mask {kind} follows a teacher's attention; choose one that gives it with --teacher ema")
    if not method.encoder.cls_token:
        raise UsageError(
            f"mask {kind} follows the attention of the teacher's class token, and the encoder has none; leave out "
            "--no-cls-token"
        )


def _check_difficulty(method: "MethodConfig") -> None:
    kind = method.mask.kind
    if method.teacher is None or not method.teacher.gives_scores:
        raise UsageError(
            f"mask {kind} asks a teacher which patches are hard; choose one that says so with --teacher ema"
        )
    if not any(term.predicts_loss for term in method.terms):
        raise UsageError(f"mask {kind} needs a term that learns which patches are hard; add --difficulty 1")


def _check_term(term: Term, method: "MethodConfig") -> None:
    if term.reads_whole and not method.mask.predicts_all:
        raise UsageError(
            f"{term.kind} reads whole samples, and the mask leaves masked patches out of the prediction; leave one "
            "of the two out"
        )
    if term.reads_pixels and method.target.to_pixels is None:
        raise UsageError(
            f"{term.kind} compares pixels, and the target {method.target.kind} has none; leave one of them out"
        )
    if term.predicts_loss and method.target.classes:
        raise UsageError(
            f"{term.kind} learns from squared errors, and the target {method.target.kind} has classes; leave one out"
        )
    if term.predicts_loss and method.loss.ignores_length:
        raise UsageError(
            f"{term.kind} learns from squared errors, and loss {method.loss.kind} leaves the length of predictions "
            "open; give --loss smooth_l1, or leave one of the two out"
        )
    if term.reads_cls and not method.encoder.cls_token:
        raise UsageError(
            f"{term.kind} is to read the class token, and the encoder has none; leave out --no-cls-token, or have "
            "the term read patch tokens"
        )
