"""What protocols on boxes are given."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from drawn_boxes import drawn_boxes
from tiny_task import evaluator, small_model

from mae.errors import UsageError
from mae.evaluation.common.task import DetectionTask
from mae.evaluation.protocol import DetectionProtocol, ProtocolResult


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return drawn_boxes(tmp_path / "boxes", train=4, test=3)


@dataclass(frozen=True, kw_only=True)
class Counting(DetectionProtocol):
    name = "counting"
    title = "Counting"
    summary = "how many objects there are"

    def run(self, task: DetectionTask) -> ProtocolResult:
        count = sum(map(len, task.objects("test")))
        return ProtocolResult(numbers={"count": count}, header=("what", "count"), rows=(("objects", str(count)),))


def test_objects_come_in_the_order_of_the_readable_images(tmp_path: Path):
    data = drawn_boxes(tmp_path / "many", train=101, test=3)  # of which a hundredth may be unreadable
    (data / "train" / "1.png").write_bytes(b"no image")
    task = evaluator(small_model(), data=data, out=tmp_path / "out").detection_task()
    images, objects = task.images("train"), task.objects("train")
    assert images.readable.tolist() == [0, *range(2, 101)] and len(objects) == 100
    for number, found in list(zip(images.readable.tolist(), objects, strict=True))[::20]:
        assert np.array_equal(found.boxes, task.data.train.objects(number).boxes)
        height, width = images.get(number).shape[1:]
        assert found.masks(height, width).any(axis=(1, 2)).all()
    facts = task.facts()
    assert facts["train"] == 101 and facts["test"] == 3 and facts["classes"] == 2
    assert facts["train_version"] != facts["test_version"]


def test_a_protocol_on_boxes_leaves_a_record(data: Path, tmp_path: Path):
    record = evaluator(small_model(), data=data, out=tmp_path / "out").run(Counting())
    assert record.result["count"] == record.data["test_objects"] > 2
    assert record.data["note"].startswith("COCO: 4 training images and 3 test images")


def test_test_images_that_were_trained_on_are_refused_or_left_out(data: Path, tmp_path: Path):
    shutil.copy(data / "train" / "2.png", data / "val" / "1.png")
    with pytest.raises(UsageError, match=r"1 test image is among the training images too: .*train/2.png and .*val/1"):
        evaluator(small_model(), data=data, out=tmp_path / "out").detection_task()
    task = evaluator(small_model(), data=data, out=tmp_path / "out", overlap="drop").detection_task()
    assert list(task.data.test.source.names) == ["0.png", "2.png"] and len(task.objects("test")) == 2
    assert "1 test image left out: trained on" in task.data.note


def test_a_test_part_elsewhere_is_refused(data: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="put test images and their labels into val/"):
        evaluator(small_model(), data=data, test="elsewhere", out=tmp_path / "out").detection_task()
