"""The mask plan and the output of a forward."""

import torch

from mae.core.types import MAEOutput, MaskPlan


def make_plan() -> MaskPlan:
    hidden = torch.tensor([[True, False, True, False], [False, True, True, False]])
    return MaskPlan(visible=torch.tensor([[1, 3], [3, 0]]), predicted=torch.tensor([[2, 0], [1, 2]]), hidden=hidden)


def test_predict_all_keeps_the_mask_and_weighs_only_the_hidden() -> None:
    plan = make_plan()
    whole = plan.predict_all()
    assert whole.predicted.tolist() == [[0, 1, 2, 3]] * 2
    assert whole.weight is not None and whole.weight.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
    assert torch.equal(whole.visible, plan.visible) and torch.equal(whole.hidden, plan.hidden)


def test_output_unpacks_as_the_triple_of_the_field() -> None:
    plan = make_plan()
    prediction = torch.arange(12.0).reshape(2, 2, 3) + 1
    loss = torch.tensor(0.5)
    output = MAEOutput(
        loss=loss, terms={"reconstruction": loss}, prediction=prediction, plan=plan, latent=torch.zeros(2, 2, 8)
    )
    got, pred, mask = output
    assert got is loss
    assert pred.shape == (2, 4, 3) and mask.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0]]
    for image, tokens in enumerate([[2, 0], [1, 2]]):
        for place, token in enumerate(tokens):
            assert torch.equal(pred[image, token], prediction[image, place])
    assert pred[mask == 0].abs().max() == 0


def test_gradient_of_the_whole_grid_reaches_the_prediction() -> None:
    prediction = torch.randn(2, 2, 3, requires_grad=True)
    zero = torch.tensor(0.0)
    output = MAEOutput(loss=zero, terms={}, prediction=prediction, plan=make_plan(), latent=torch.zeros(2, 2, 8))
    output.pred.sum().backward()
    assert prediction.grad is not None and torch.equal(prediction.grad, torch.ones(2, 2, 3))
