"""Action files: torch reads what is written here and the other way round; what is wrong is shown where it is."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from autosplit.errors import ScheduleError
from autosplit.schedule.action import Schedule
from autosplit.schedule.catalog import SCHEDULES, build
from autosplit.schedule.files import MOST_BYTES, dump_actions, from_rows, parse_actions, read_actions
from tests.schedule.test_schedule_torch import TORCH, torch_schedule

DEVICES, MICROBATCHES = 2, 4
MULTI = tuple(TORCH)


def theirs(name: str) -> Any:
    return torch_schedule(name, DEVICES, MICROBATCHES, SCHEDULES[name].virtual_stages or 2)


def ours(name: str, *, devices: int = DEVICES, microbatches: int = MICROBATCHES) -> Schedule:
    each = SCHEDULES[name].virtual_stages or 2
    return build(name, stages=devices * each, microbatches=microbatches, virtual_stages=each)


def same(schedule: Schedule, other: Schedule) -> bool:
    return (schedule.lanes, schedule.stage_lane) == (other.lanes, other.stage_lane)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_is_written_is_read_back(name: str, devices: int, tmp_path: Path) -> None:
    schedule = ours(name, devices=devices, microbatches=5)
    path = tmp_path / f"{name}.csv"
    path.write_text(dump_actions(schedule), newline="")
    assert read_actions(path) == schedule


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", list(MULTI))
def test_what_torch_writes_is_read(name: str, form: str, tmp_path: Path) -> None:
    """Its lowered form too: FSDP's actions stay where they are, how ranks talk is ours. Descending backwards ascend."""
    schedule = theirs(name)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(str(tmp_path / "torch.csv"), format=form)
    text = (tmp_path / "torch.csv").read_text()
    assert ("SEND_F" in text) == (form == "compute_comms")
    read = read_actions(tmp_path / "torch.csv")
    assert same(read, ours(name))
    rows = [
        [cell for cell in row if cell and "SEND" not in cell and "RECV" not in cell]
        for row in csv.reader(text.splitlines())
    ]
    kept = [[text if text[-1].isalpha() else "" for text in row] for row in rows]
    assert [[text if text[-1].isalpha() else "" for text in row] for row in read.texts] == kept
    assert any(any(row) for row in kept) == (form == "compute_comms")
    assert from_rows(read.texts, name="torch") == replace(read, name="torch")


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = ours(name)
    (tmp_path / "ours.csv").write_text(dump_actions(schedule), newline="")
    reader = theirs(name) if name in MULTI else theirs("zb_h1")
    if name == "forward":  # torch's reader asks for backwards; its parser of cells does not
        rows = list(csv.reader(dump_actions(schedule).splitlines()))
        read = [[action for cell in row if (action := torchs._Action.from_str(cell)) is not None] for row in rows]
    else:
        reader._load_csv(str(tmp_path / "ours.csv"))
        read = [[a for a in reader.pipeline_order[rank] if a is not None] for rank in range(DEVICES)]
        assert [reader.stage_index_to_group_rank[stage] for stage in range(schedule.stages)] == [*schedule.stage_lane]
    assert [[str(action) for action in row] for row in read] == [[str(a) for a in lane] for lane in schedule.lanes]


def test_the_order_that_torch_tells_of_its_gpipe_is_read() -> None:
    """That of its 1F1B, in torch 2.13, lacks the last rank's first forward and has one too many at the end."""
    stage = SimpleNamespace(num_stages=DEVICES, group_size=DEVICES, group_rank=0, stage_index=0, has_backward=True)
    order: Any = torchs.ScheduleGPipe(stage, MICROBATCHES)._get_pipeline_order()  # type: ignore[arg-type]
    text = "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in range(DEVICES))
    assert same(parse_actions(text, name="torch"), ours("gpipe"))


def test_a_file_may_put_stages_where_it_likes() -> None:
    found = parse_actions(" 1F0 ,, 3F0,3B0 , 1B0\r\n0F0,2F0,,2B0,0B0,,\n\n", name="mine")
    assert found.stage_lane == (1, 0, 1, 0)
    assert found.name == "mine"
    assert same(parse_actions(dump_actions(found), name="again"), found)


def test_forward_and_backward_together_are_taken_one_after_the_other() -> None:
    found = parse_actions("0F0,(0F1;0B0)OVERLAP_F_B,0B1", name="mine")
    assert [str(action) for action in found] == ["0F0", "0F1", "0B0", "0B1"]


BAD = {
    "": "line 1: there is nothing",
    "\n\n,,\n": "line 1: there is nothing",
    "0F0,0B0\n\n1F0,1B0": "line 2: it lists no work",
    "0F0,0B0\n1SEND_F0,1F0,1X0": "line 2, column 3: '1X0' is no action",
    "0F0,0b0": "line 1, column 2: '0b0' is no action",
    "0F0,0B0,-1F0": "line 1, column 3: '-1F0' is no action",
    "0F0,0B": "line 1, column 2: '0B' is no action",
    "0F0,٣F0": "column 2: '٣F0' is no action",
    "0F99999999999999999999": "a number of more than 6 digits",
    f"{'9' * 5000}F0": "a number of more than 6 digits",
    "0F0,(0F1;(0B0)OVERLAP_F_B": "column 2: '(0F1;(0B0)OVERLAP_F_B' is no action",
    '0F0,"0B0': "line 1: it is no line of a CSV file",
    "0F0,0B0\n2F0,2B0": "line 2, column 1: schedule 'mine': 2F0 is of stage 2, but stage 1 is in no row",
    "0F0,0B0,0F1": "end of line 1: schedule 'mine': 0B1 is missing",
    "0F0,0B0,0F0": "line 1, column 1; line 1, column 3: schedule 'mine': 0F0 is in lane 0 twice",
    "0F0,1F0,1B0\n1F1,0B0": "line 2, column 1: schedule 'mine': 1F1 is in lane 1; move it to lane 0",
    "0F0,,0B0\n1B0,1F0": "line 2, column 1: schedule 'mine': 1B0 comes before 1F0",
    "0F0,0F1,0B1,0F2,0B0,0B2": "line 1, column 5: schedule 'mine': 0B0 comes after 0B1",
    "0F0,0B0,1F0,1B0": "line 1, column 2: schedule 'mine': deadlock: 0B0 waits for 1B0",
    "0F999999": "0F0 is missing",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_what_is_wrong_is_shown_where_it_is(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError) as caught:
        read_actions(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert ("in lane" in message or "deadlock" in message) <= (">" in str(caught.value).partition("\n")[2])
    assert len(str(caught.value)) < 2000


def test_a_grid_of_very_many_cells_is_shown_around_the_bad_one() -> None:
    rows = dump_actions(build("1f1b", stages=70, microbatches=300)).splitlines()
    rows[40] = rows[40].replace("40B7,", "40B7,40B7,", 1)
    with pytest.raises(ScheduleError, match=r"line 41, column") as caught:
        parse_actions("\n".join(rows), name="mine")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 5
    assert max(map(len, lines)) < 600
    assert any(">40B7<" in line for line in lines)


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    (tmp_path / "large.csv").write_bytes(b"0F0," * (MOST_BYTES // 4 + 1))
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    for name, message in {
        "absent.csv": "cannot read the action file .*No such file",
        ".": "cannot read the action file .*directory",
        "large.csv": "larger than 1 MiB",
        "binary.csv": "byte 128 is no UTF-8 text",
    }.items():
        with pytest.raises(ScheduleError, match=message):
            read_actions(tmp_path / name)
