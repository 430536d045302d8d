"""Lists of a step: the text is torch's and comes back, state is used while it is there, a pipe runs what is planned."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _Action
from torch.nn import functional as F

from autosplit import autosplit
from autosplit.errors import ScheduleError
from autosplit.planning.plan.fields import MeshDegrees
from autosplit.runtime.lanes.threads import backwards, forwards
from autosplit.schedule.action import Action
from autosplit.schedule.catalog import SCHEDULES, build, stages_per_device
from autosplit.schedule.entry import Entry, Receive, Reduce, Reshard, Route, Send, Unshard, Update, parse_entry
from autosplit.schedule.files import from_rows, parse_actions
from autosplit.schedule.lists import Actions
from autosplit.schedule.order import check_state, step_order, with_marks, with_reductions, with_updates
from tests.distributed.orders import chain, drawn
from tests.properties import examples

NAMES = list(SCHEDULES)


@pytest.mark.parametrize("name", [*NAMES, "shuffled"])
def test_the_text_of_lists_comes_back(name: str) -> None:
    chance = random.Random(name)
    for _ in range(examples(60, few=10)):
        case = drawn(name, chance)
        lists = Actions(tuple(with_updates(with_reductions(entries)) for entries in case.lists()))
        assert Actions.parse(str(lists)) == lists
        assert lists.check() is lists


def test_torch_reads_what_a_chain_of_stages_prints() -> None:
    lists = Actions.of(step_order(build("zb_v", stages=4, microbatches=5), chain(4)), 2)
    for entry in [*lists[0], *lists[1], Unshard(0), Reshard(1), Reduce(2)]:
        assert repr(_Action.from_str(str(entry))) == str(entry)


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("0SEND_F1", Send(Route(0, 1, 1))),
        ("0SEND_F1(3)", Send(Route(0, 3, 1))),
        ("2SEND_F0(3 loss)", Send(Route(2, 3, 0, loss=True))),
        ("1RECV_B4", Receive(Route(2, 1, 4, backward=True))),
        ("0RECV_B4(3)", Receive(Route(3, 0, 4, backward=True))),
        ("3RECV_F0(2 loss)", Receive(Route(2, 3, 0, loss=True))),
        ("12REDUCE_GRAD", Reduce(12)),
        ("0UNSHARD", Unshard(0)),
        ("0RESHARD", Reshard(0)),
        ("7UPDATE", Update(7)),
        ("2W3", Action(2, "W", 3)),
    ],
)
def test_an_entry_is_its_text(text: str, entry: Entry) -> None:
    assert str(entry) == text
    assert parse_entry(text) == entry


@pytest.mark.parametrize("text", ["0SEND1", "SEND_F0", "0REDUCE", "0SEND_F0()", "0F", ""])
def test_a_text_that_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        parse_entry(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0REDUCE_GRAD,0UPDATE", None),
        ("0F0,0F1,0B0,0REDUCE_GRAD,0B1", "'0REDUCE_GRAD' stands before '0B1'"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "'0REDUCE_GRAD' stands twice"),
        ("0F0,0B0,0UPDATE,0REDUCE_GRAD", "'0UPDATE' stands before '0REDUCE_GRAD'"),
        ("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD", None),
        ("0UNSHARD,0F0,0RESHARD,0B0", "'0B0' stands where stage 0 is not gathered"),
        ("0UNSHARD,0UNSHARD,0F0", "'0UNSHARD' stands where stage 0 is gathered already"),
        ("0F0,0RESHARD", "'0F0' stands where stage 0 is not gathered"),
        ("0UNSHARD,0F0,0RESHARD,0RESHARD", "'0RESHARD' stands where stage 0 is not gathered"),
    ],
)
def test_parameters_and_gradients_are_used_while_they_are_there(text: str, message: str | None) -> None:
    entries = Actions.parse(text)[0]
    if message is None:
        check_state(entries)
        return
    with pytest.raises(ScheduleError, match=message):
        check_state(entries)


def test_a_file_says_where_parameters_are_gathered_and_gradients_summed_up() -> None:
    text = "0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0B1\n1F0,1F1,1B0,1B1,1REDUCE_GRAD"
    with pytest.raises(ScheduleError, match="line 1: '0REDUCE_GRAD' stands before '0B1'; put it behind that"):
        parse_actions(text, name="mine")
    schedule = from_rows([line.split(",") for line in text.splitlines()], name="mine")
    marked = Actions(tuple(map(with_marks, Actions.of(step_order(schedule, chain(2)), 2), schedule.marks)))
    assert [str(entry) for entry in marked[0] if not isinstance(entry, (Send, Receive))] == list(schedule.texts[0])
    assert schedule.texts[1] == ("1F0", "1F1", "1B0", "1B1", "1REDUCE_GRAD")
    with pytest.raises(ScheduleError, match="'0REDUCE_GRAD' stands before '0B1'"):
        marked.check()
    assert schedule.upto(1).texts[0] == ("0UNSHARD", "0F0", "0RESHARD", "0UNSHARD", "0B0", "0REDUCE_GRAD")
    check_state(with_marks(schedule.upto(1).lanes[0], schedule.upto(1).marks[0]))
    assert forwards(schedule).marks == backwards(schedule).marks == ()


class Skips(nn.Module):
    """Layers of which each takes what some of those before it have made."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.takes = [[index - 1, *(i for i in range(index - 1) if chance.random() < 0.2)] for index in range(1, 8)]

    def forward(self, x: Tensor) -> Tensor:
        values = [self.layers[0](x)]
        for layer, takes in zip(self.layers[1:], self.takes, strict=True):
            values.append(torch.tanh(layer(sum(values[index] for index in takes))))
        return values[-1]


def runs_its_list(chance: random.Random, **options: Any) -> None:
    """Profile a step of a random program, and hold what ran against what its plan prints."""
    rows, chunks = chance.randint(6, 12), chance.randint(2, 6)
    recompute = chance.choice(["never", "always", "except_last"])
    sample = torch.randn(rows, 4)
    pipe = autosplit(Skips(chance), chunks=chunks, recompute=recompute, sample=sample, **options)
    ran = pipe.profile_step(sample, target=torch.randn(rows, 4), loss_fn=F.mse_loss)
    assert pipe.plan is not None
    assert ran.actions == pipe.plan.actions.check()
    assert sum(map(len, pipe.plan.actions)) > len(tuple(pipe.plan.schedule_for(chunks)))


def test_sums_of_a_file_are_for_replicas(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text("0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1F1,1B0,1B1,1REDUCE_GRAD\n")
    sample = torch.randn(4, 4)
    pipe = autosplit(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, 2, sample=sample, schedule=path)
    ran = pipe.profile_step(sample, target=sample, loss_fn=F.mse_loss)
    assert pipe.plan is not None
    assert ran.actions == pipe.plan.actions
    assert "REDUCE_GRAD" not in str(ran.actions)
    mesh = MeshDegrees(dp=2, tp=1, pp=2, runtime="autosplit")
    assert str(pipe.plan.model_copy(update={"mesh": mesh}).actions).count("B1,0REDUCE_GRAD") == 1


@pytest.mark.parametrize("lanes", ["inline", "threads"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "forward"])
def test_a_pipe_runs_the_list_that_its_plan_prints(name: str, lanes: str) -> None:
    chance = random.Random(name)
    for _ in range(examples(17, few=1)):
        runs_its_list(chance, devices=4 // stages_per_device(name), schedule=name, lanes=lanes)
