"""CIFAR-10: 32-pixel images, a small model, one machine."""

from mae.config import RunConfig


def cifar10() -> RunConfig:
    """The lesson model on CIFAR-10's 50,000 training images, 100 epochs.

    Command: `mae pretrain cifar10 --recipe cifar10`, or any other source of 32-pixel images.
    Cost: 19,500 steps; 500 steps of 128 images took 3.6 minutes on two cores of an AMD EPYC. Result: not measured.
    """
    return RunConfig.of(
        source="cifar10",
        recipe="cifar10",
        model="mae_vit_lesson_patch4",
        img_size=(32, 32),
        epochs=100,
        batch_size=256,
        lr=2e-3,
        warmup_epochs=10,
    )
