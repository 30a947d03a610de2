"""The goals that the GPU benchmark tells: met by figures that meet them, open by others, left out if not measured."""

import json
from pathlib import Path

import gpu  # of benchmarks


def way(rate: float, beside: float | None, of_matmul: float, peak: int) -> dict[str, object]:
    found = {"rate": {"median": rate}, "of_matmul": of_matmul, "peak_bytes": peak}
    return {**found, "beside": None if beside is None else {"median": beside}}


def test_goals_are_met_or_open(tmp_path: Path):
    assert list(gpu.goals(tmp_path)) == []
    ways = {"self": way(90, 2.0, 0.3, 9), "self, compiled": way(120, 2.6, 0.41, 9), "ViTMAE": way(45, None, 0.2, 10)}
    ways["ViTMAE, compiled"] = way(90, 2.0, 0.3, 10)
    results = [{"way": name, **values} for name, values in ways.items()]
    for name in (gpu.BASE, gpu.LARGE):
        (tmp_path / f"step-{name}.json").write_text(json.dumps({"results": results}))
    (tmp_path / f"end-to-end-{gpu.LARGE}.json").write_text(json.dumps({"share": {"median": 0.94}}))
    decoding = {"ways": [{"name": "ours", "beside": {"median": 1.6}}], "loader_overhead": 0.11}
    (tmp_path / "data.json").write_text(json.dumps(decoding))
    (tmp_path / "latency.json").write_text(json.dumps({"seconds": {"ours": [0.006]}}))  # as on a CPU
    told = dict(gpu.goals(tmp_path))
    assert list(told.values()) == [True, True, True, True, False, True, False, True, False]
    words = list(told)
    assert words[0] == "mae_vit_base_patch16: self, compiled 2.60 times ViTMAE (goal 2.5), 1.30 times it compiled"
    assert words[4] == "mae_vit_large_patch16: 41% of the matrix product (goal 50%)"
    assert words[6] == "mae_vit_large_patch16 from JPEGs: 94% of the rate without loading (goal 95 %)"


def test_the_goal_of_one_image_is_told_of_the_graph(tmp_path: Path):
    (tmp_path / "latency.json").write_text(json.dumps({"seconds": {"ours": [0.006], "ours, CUDA graph": [0.0006]}}))
    assert dict(gpu.goals(tmp_path)) == {f"{gpu.BASE}, features of one image: 0.60 ms (goal below 5)": True}
