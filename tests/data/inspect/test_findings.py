"""From a report to findings: where each level begins."""

from dataclasses import replace
from math import nan

import pytest

from mae.data.inspect.findings import data_findings
from mae.data.inspect.near_duplicates import Copies
from mae.data.inspect.report import Channel, DataReport, Kind, Sizes
from mae.findings import Finding

NONE = Copies(pairs=0, extra=0, share=0.0, groups=())
CHANNEL = Channel(
    low=0.0,
    high=0.0,
    largest=1.0,
    varies=True,
    mean=0.0,
    std=1.0,
    mean_error=0.0,
    std_error=0.0,
    whole_mean=1.0,
    whole_std=1.0,
)
SIZES = Sizes(smallest=(40, 50), median=(60, 70), largest=(80, 90), smaller=0.0, elongated=0.0)
KIND = Kind(dtype="uint8", channels=1, images=1000)
REPORT = DataReport(
    name="pictures",
    total=2000,
    looked_at=1000,
    unreadable=0,
    messages=(),
    not_finite=0,
    kinds=(KIND,),
    dtype="uint8",
    pixel_dtype="uint8",
    nodata=None,
    missing=0.0,
    marked=(),
    apart=None,
    img_size=(32, 32),
    sizes=SIZES,
    channels=(CHANNEL,),
    constant=0,
    nearly_constant=0,
    duplicates=NONE,
    near_duplicates=NONE,
)


def changed(**parts: object) -> DataReport:
    """A sound report but for some parts; those of its channel and sizes are known by their names."""
    channel = {name: parts.pop(name) for name in [*parts] if hasattr(CHANNEL, name)}
    sizes = {name: parts.pop(name) for name in [*parts] if hasattr(SIZES, name)}
    return replace(REPORT, channels=(CHANNEL, replace(CHANNEL, **channel)), sizes=replace(SIZES, **sizes), **parts)


def loud(report: DataReport) -> dict[str, str]:
    return {finding.name: finding.level for finding in data_findings(report) if finding.level != "ok"}


def some(share: float) -> Copies:
    return Copies(pairs=4, extra=4, share=share, groups=(("a.png", "b.png"),))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, {}),
        ({"unreadable": 1, "messages": ("x.png is empty",)}, {"unreadable images": "note"}),
        ({"not_finite": 1}, {"finite values": "warn"}),
        ({"marked": ("-9999",)}, {"nodata": "warn"}),
        ({"marked": ("-9999",), "nodata": "-9999", "missing": 0.1}, {}),
        ({"apart": (-9999.0, 0.01)}, {"nodata": "warn"}),
        ({"mean": nan}, {"channel statistics": "stop"}),
        ({"std": nan}, {"channel statistics": "stop"}),
        ({"nodata": "nan", "missing": 0.0}, {"nodata": "warn"}),
        ({"nodata": "nan", "missing": 0.5}, {}),
        ({"nodata": "nan", "missing": 0.51}, {"nodata": "warn"}),
        ({"low": 0.1, "high": 0.1}, {}),
        ({"low": 0.11, "high": 0.1}, {"saturation": "warn"}),
        ({"low": 0.03, "high": 0.97}, {"saturation": "warn"}),
        ({"low": 0.02, "high": 0.98}, {"saturation": "stop"}),
        ({"low": 0.98}, {"saturation": "stop"}),
        ({"mean": 0.29, "std": 1.29}, {}),
        ({"mean": -0.31}, {"channel statistics": "stop"}),
        ({"mean": -0.31, "mean_error": 0.01}, {}),
        ({"mean": -0.34, "mean_error": 0.01}, {"channel statistics": "stop"}),
        ({"std": 0.69}, {"channel statistics": "stop"}),
        ({"std": 1.31}, {"channel statistics": "stop"}),
        ({"std": 1.31, "std_error": 0.01}, {}),
        ({"std": 0.0, "varies": False}, {"empty channels": "warn"}),
        ({"constant": 4, "nearly_constant": 6}, {}),
        ({"constant": 5, "nearly_constant": 6}, {"constant images": "warn"}),
        ({"duplicates": some(0.1)}, {"duplicates": "note"}),
        ({"duplicates": some(0.11)}, {"duplicates": "warn"}),
        ({"near_duplicates": some(0.11)}, {"near duplicates": "warn"}),
        ({"kinds": (KIND, replace(KIND, channels=3, images=100))}, {}),
        ({"kinds": (KIND, replace(KIND, channels=3, images=101))}, {"kinds": "note"}),
        ({"kinds": (KIND, replace(KIND, dtype="uint16", images=1))}, {"kinds": "note"}),
        ({"smaller": 0.1, "elongated": 0.05}, {}),
        ({"smaller": 0.11, "elongated": 0.06}, {"sizes": "note", "shapes": "note"}),
        ({"smaller": 0.51}, {"sizes": "warn"}),
    ],
)
def test_each_level_begins_at_its_bound(parts, expected):
    assert loud(changed(**parts)) == expected


@pytest.mark.parametrize(
    ("dtype", "largest", "level"),
    [
        ("uint16", 16384 / 65535, "ok"),
        ("uint16", 16383 / 65535, "note"),
        ("uint8", 32 / 255, "ok"),
        ("uint8", 31 / 255, "warn"),
        ("float32", None, "ok"),
    ],
)
def test_a_small_part_of_the_range_is_told(dtype, largest, level):
    report = replace(REPORT, pixel_dtype=dtype, channels=(replace(CHANNEL, largest=largest),))
    assert loud(report) == ({} if level == "ok" else {"range": level})


def test_statistics_of_the_images_themselves_are_no_mistake_whatever_crops_make_of_them():
    own = changed(mean=-0.5, std=0.4, whole_mean=0.29, whole_std=0.71)
    assert loud(own) == {"channel statistics": "note"}
    assert loud(changed(std=0.4, whole_mean=0.31)) == {"channel statistics": "stop"}
    assert loud(changed(std=0.4, whole_mean=0.0, whole_std=0.69)) == {"channel statistics": "stop"}
    assert loud(changed(std=nan, whole_mean=0.0)) == {"channel statistics": "stop"}


def test_statistics_that_were_chosen_warn():
    found = {finding.name: finding.level for finding in data_findings(changed(mean=-2.0), own_statistics=False)}
    assert found["channel statistics"] == "warn"


def test_a_set_of_one_value_all_over_stops():
    still = replace(CHANNEL, std=0.0, varies=False)
    assert loud(replace(REPORT, channels=(still,))) == {"channel statistics": "stop", "empty channels": "warn"}


def test_of_many_empty_channels_the_first_are_named():
    empty = replace(REPORT, channels=(CHANNEL, *[replace(CHANNEL, varies=False)] * 300))
    value = next(each.value for each in data_findings(empty) if each.name == "empty channels")
    assert "channel 1, 2," in value and "16, ... (300 in all), counted from 0" in value and len(value) < 120


def test_every_finding_has_a_number_or_a_word_and_advice_where_there_is_something_to_do():
    bad = changed(unreadable=2, messages=("x.png is empty",), low=0.99, mean=3.0, smaller=0.6, duplicates=some(0.3))
    for finding in data_findings(bad) + data_findings(REPORT):
        assert isinstance(finding, Finding) and finding.value and bool(finding.advice) == (finding.level != "ok")
    told = {finding.name: finding.value for finding in data_findings(bad)}
    assert told["duplicates"] == (
        "4 of 1,000 images hold the same pixels as another, 30.0% of the whole set by estimate: a.png = b.png"
    )
    assert told["unreadable images"] == "2 of 1,000 images (0.2%): x.png is empty"
    assert told["sizes"] == "50 x 40 to 90 x 80 pixels, 70 x 60 in the middle; 60.0% smaller than a crop of 32 x 32"


def test_what_the_source_leaves_out_and_hundreds_of_channels_take_a_line():
    many = replace(REPORT, channels=tuple(replace(CHANNEL, mean=number / 1000) for number in range(200)))
    told = {finding.name: finding.value for finding in data_findings(many, note="folder; not read: 9 .heic")}
    assert told["images"] == "1,000 of 2,000 looked at; folder; not read: 9 .heic"
    assert "mean 0.00 to 0.20 in 200 channels, std 1.00 to 1.00 in" in told["channel statistics"]
