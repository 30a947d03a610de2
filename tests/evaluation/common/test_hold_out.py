"""The part that is held out of the training samples."""

import torch

from mae.evaluation.common.hold_out import hold_out


def test_a_tenth_of_each_class_is_held_out():
    labels = torch.tensor([0] * 100 + [1] * 41 + [2] * 2 + [3])[torch.randperm(144)]
    fitted, held = hold_out(labels, seed=3)
    assert torch.bincount(labels[held], minlength=4).tolist() == [10, 5, 1, 0]
    assert torch.cat([fitted, held]).sort().values.tolist() == list(range(144))
    assert fitted.tolist() == sorted(fitted.tolist()) and held.tolist() == sorted(held.tolist())
    assert torch.equal(hold_out(labels, seed=3)[1], held)
    assert not torch.equal(hold_out(labels, seed=4)[1], held)
    assert hold_out(torch.arange(40) % 2, seed=0)[1].tolist() == [14, 19, 20, 31]  # on every machine
