from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest

import cost_models
from cost_models import DeviceSpec, device, find, identify, link, machine, names


def test_names_are_the_devices_own():
    assert names() == sorted(names())
    assert {"cpu-lane", "H100-SXM5-80GB", "A100-SXM4-80GB", "V100-SXM2-16GB", "MI300X-192GB"} <= set(names())
    assert [device(name).name for name in names()] == names()


@pytest.mark.parametrize("name", names())
def test_every_device_is_plausible(name):
    spec = device(name)
    assert DeviceSpec.model_validate_json(spec.model_dump_json()) == spec
    assert 1e10 <= spec.peak("fp64") <= spec.peak("fp32") <= spec.peak("fp16") <= 1e16
    assert spec.peak("fp32") <= spec.peak("tf32") <= spec.peak("fp16")
    assert spec.peak("fp16") <= (spec.peak("fp8") if "fp8" in spec.dtypes else 1e16)
    assert 5e9 <= spec.memory_bandwidth_bytes_per_s <= 2e13
    assert 1e-6 <= spec.launch_s <= 1e-4
    assert 0 <= spec.issue_s <= 1e-4
    assert all(source.text.strip() for source in spec.sources.values())
    assert 1e10 <= spec.host_link.bandwidth_bytes_per_s <= link(name, name).bandwidth_bytes_per_s
    assert link(name, name).bandwidth_bytes_per_s <= 2 * spec.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu-lane"])
def test_every_gpu_has_what_a_memory_model_asks_for(name):
    spec, in_name = device(name), int(name.rpartition("-")[2].removesuffix("GB")) * 2**30
    assert 0.93 * in_name <= spec.memory_bytes <= in_name
    assert 300 * 2**20 <= spec.reserve_bytes <= 0.08 * spec.memory_bytes
    assert spec.compute_capability is not None
    assert spec.multiprocessors >= 30
    assert "fp64" in spec.peak_flops_per_s
    assert spec.driver_names


def test_a_dtype_that_a_device_lacks():
    with pytest.raises(
        ValueError, match="P40-24GB has no bf16 arithmetic; it has fp32, fp64, and emulates fp16; choose"
    ):
        device("P40-24GB").peak("bf16")
    with pytest.raises(ValueError, match="A100-SXM4-80GB has no fp8 arithmetic; it has bf16, fp16, tf32, fp32, fp64;"):
        device("A100-SXM4-80GB").peak("fp8")
    assert device("V100-SXM2-32GB").peak("bf16") == device("V100-SXM2-32GB").peak("fp32")


def test_an_unknown_device_names_the_nearest_and_where_all_are():
    with pytest.raises(
        ValueError, match="there is no device 'H1000', the nearest: H100-NVL-94GB, H100-PCIe-80GB, H100-SXM5-80GB; "
    ) as got:
        device("H1000")
    assert "names() list all" in str(got.value)
    assert "JSON file" in str(got.value)
    assert device("h100") == device("H100-SXM5-80GB")


def test_every_driver_name_belongs_to_one_device():
    assert identify("NVIDIA H100 80GB HBM3").name == "H100-SXM5-80GB"
    assert identify("NVIDIA H100 PCIe").name == "H100-PCIe-80GB"
    assert identify("no such device") is None
    for spec in map(device, names()):
        assert all(identify(driver_name) == spec for driver_name in spec.driver_names)


def test_a_name_is_no_path():
    with pytest.raises(ValueError, match="there is no device"):
        device("../devices/cpu-lane")


def test_a_device_from_a_file(tmp_path):
    mine = device("T4-16GB").model_copy(update={"name": "mine", "memory_bytes": 2**34})
    path = tmp_path / "mine.json"
    path.write_text(mine.model_dump_json(), encoding="utf-8")
    assert device(path) == device(str(path)) == find(path) == mine
    assert link(path, "T4-16GB") == device("T4-16GB").host_link
    assert machine([path, "T4-16GB"]).devices == (mine, device("T4-16GB"))
    assert machine(f"2x{path}").devices == (mine, mine)
    assert machine(path).name == "1xmine"


T4 = json.loads(device("T4-16GB").model_dump_json())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"memory_bandwidth_bytes_per_s": 320},
            "memory_bandwidth_bytes_per_s is 320: Input should be greater than or equal to 1000000",
        ),
        ({"issue_s": None}, "issue_s is None: Input should be a valid number (1 problem in all)"),
        (
            {"peak_flops_per_s": {"float32": 1e12, "fp32": 1e12}},
            "peak_flops_per_s.float32 is 'float32': Input should be 'fp64', 'fp32', 'tf32'",
        ),
        ({"memory_gb": 16}, "memory_gb is 16: Extra inputs are not permitted (1 problem in all)"),
        (
            {"sources": {"launch_s": {"status": "sure", "text": "x"}}},
            "sources.launch_s.status is 'sure': Input should be 'measured', 'datasheet'",
        ),
        (
            {"host_link": {"name": "wire", "sources": {}, "latency_s": 9}},
            "host_link.bandwidth_bytes_per_s: Field required; "
            "host_link.latency_s is 9: Input should be less than or equal to 1 (2 problems in all)",
        ),
        ({"multiprocessors": -1, "launch_s": 2, "issue_s": 3, "memory_bytes": 4}, "(4 problems in all)"),
    ],
)
def test_a_malformed_file_is_told_field_value_and_range(tmp_path, changes, said):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(T4 | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.json' does not describe a device: ") as caught:
        device(path)
    assert said in str(caught.value)


def test_the_package_runs_without_torch_and_without_autosplit():
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['autosplit'] = sys.modules['numpy'] = None\n"
        "import cost_models\n"
        "lane = cost_models.device('cpu-lane')\n"
        "work = cost_models.OpWork(kind='matmul', flops=10**9, bytes=10, dtype='fp32')\n"
        "print(cost_models.Roofline(lane).seconds(work) > 0)\n"
        "print(len(cost_models.machine('8xH100-SXM5-80GB')))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n8\n", "")


def test_the_examples_run_and_say_what_they_say():
    readme = Path(cost_models.__file__).parent / "README.md"
    result = doctest.testfile(str(readme), module_relative=False, encoding="utf-8")
    assert result.attempted >= 25
    assert result.failed == 0
