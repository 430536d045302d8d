"""What ``Measured.load`` says of a file that is no table of measured times."""

from __future__ import annotations

import json

import pytest

from cost_models import Measured, Roofline, device

WORK = {"kind": "matmul", "flops": 1, "bytes": 1, "dtype": "fp32", "launches": 1}


def load(path):
    return Measured.load(path, fallback=Roofline(device("cpu-lane")))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([{"work": {"kind": "matmul"}, "seconds": 1}], "0.work.flops: Field required; "),
        ([{"work": WORK, "seconds": 0}], "0.seconds is 0: Input should be greater than 0 (1 problem in all)"),
        (
            [{"work": WORK | {"dtype": "half"}, "seconds": 1}],
            "0.work.dtype is 'half': Input should be 'fp64', 'fp32'",
        ),
        ([{"work": WORK, "second": 1}], "0.second is 1: Extra inputs are not permitted (2 problems in all)"),
        ({"work": WORK}, "Input should be a valid array"),
    ],
)
def test_the_field_the_value_and_the_range(tmp_path, table, said):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    with pytest.raises(ValueError, match=r"measured\.json' is no table of measured times: ") as caught:
        load(path)
    assert said in str(caught.value)


def test_no_json_and_no_file(tmp_path):
    path = tmp_path / "measured.json"
    with pytest.raises(ValueError, match=r"cannot read the file '.*measured\.json': No such file"):
        load(path)
    path.write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no table of measured times: the whole: Invalid JSON: "):
        load(path)
