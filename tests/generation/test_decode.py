"""``pipe.decode``: models of one's own that keep state in their modules, from call to call as a plain loop does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosplit import PipelinedModule, autosplit

WIDTH, VOCABULARY, STEPS = 16, 64, 6

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_intra_op_thread")]


class Keeps(nn.Module):
    """Predicts tokens by all embeddings seen; a derived class keeps them, or their sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def seen(self, new: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        sums = self.seen(self.embedding(tokens))[:, -tokens.shape[1] :]
        logits: Tensor = self.head(self.hidden(sums).tanh())
        return logits


def longer(before: Tensor | None, new: Tensor) -> Tensor:
    return new if before is None else torch.cat([before, new], 1)


class Attribute(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.values: Any = None

    def seen(self, new: Tensor) -> Tensor:
        self.values = longer(self.values, new)
        return self.values.cumsum(1)


class Late(Keeps):
    """Has its attributes, a number among them, from the first call on."""

    def seen(self, new: Tensor) -> Tensor:
        self.values = longer(getattr(self, "values", None), new)
        self.count = getattr(self, "count", 0) + new.shape[1]
        return self.values.cumsum(1) / self.count


class Layers(Keeps):
    """Keeps state in its layers, and how many tokens it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.count = nn.ModuleList([Attribute(), Attribute()]), 0

    def seen(self, new: Tensor) -> Tensor:
        self.count += new.shape[1]
        for layer in self.layers:
            new = layer.seen(new)[:, -new.shape[1] :].tanh()  # type: ignore[operator]
        return new


class Buffer(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(1, 1, WIDTH), persistent=False)

    def seen(self, new: Tensor) -> Tensor:
        new = new.cumsum(1) + self.sums
        self.sums = new[:, -1:]
        return new


class Rows(Buffer):
    """Has a buffer for four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.zeros(4, 1, WIDTH)


class Counting(Keeps):
    """Has a buffer that is None at first, and writes one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def seen(self, new: Tensor) -> Tensor:
        self.count += new.shape[1]
        new = new.cumsum(1) if self.sums is None else new.cumsum(1) + self.sums
        self.sums = new[:, -1:]
        return new / self.count


class NewDict(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def seen(self, new: Tensor) -> Tensor:
        self.cache = {"values": longer(self.cache.get("values"), new)}
        return self.cache["values"].cumsum(1)


class NewList(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor | None] = [None, None]

    def seen(self, new: Tensor) -> Tensor:
        self.cache = [longer(values, new) for values in self.cache]
        return self.cache[0].cumsum(1) + self.cache[1].tanh()  # type: ignore[union-attr]


class FilledDict(Keeps):
    """Makes a dict in the first call and fills it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def seen(self, new: Tensor) -> Tensor:
        self.cache = {} if self.cache is None else self.cache
        self.cache["values"] = longer(self.cache.get("values"), new)
        sums: Tensor = self.cache["values"].cumsum(1)
        return sums


class HeldDict(NewDict):
    """Fills in place the dict that it has had from the start."""

    def seen(self, new: Tensor) -> Tensor:
        self.cache["values"] = longer(self.cache.get("values"), new)
        return self.cache["values"].cumsum(1)


class SharedDict(Keeps):
    """Makes a dict in the first call that two modules have, one of them in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None

    def seen(self, new: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = {"values": None, "more": [None]}
            self.hidden.cache = [self.cache, self.cache["more"]]  # type: ignore[assignment]
        self.cache["values"] = longer(self.cache["values"], new)
        dicts: Any = self.hidden.cache
        dicts[1][0] = longer(dicts[1][0], dicts[0]["values"][:, -new.shape[1] :].tanh())
        sums: Tensor = self.cache["more"][0].cumsum(1)
        return sums


class InPlace(Keeps):
    """Counts calls and averages, in buffers that it writes in place; ``assigns``: it has a new average each time."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def seen(self, new: Tensor) -> Tensor:
        self.count.add_(1)
        if self.assigns:
            self.mean = self.mean * 0.9 + 0.1
        else:
            self.mean.mul_(0.9).add_(0.1 * new.mean((0, 1)))
        return new.cumsum(1) * self.count + self.mean


KINDS = [Attribute, Late, Layers, Buffer, Rows, Counting, NewDict, NewList, FilledDict, HeldDict, SharedDict]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


class Pair:
    """A plain model, and a pipe of another like it."""

    def __init__(self, kind: Callable[[], Keeps]) -> None:
        self.plain, self.subject = kind().eval(), kind().eval()
        self.pipe: Any = autosplit(self.subject, devices=["cpu"] * 2, chunks=1)

    def made(self) -> int:
        """Return how many recordings the pipe has made to decode."""
        count: int = self.pipe._core.decoder._entry.pipe._core.recordings.made
        return count

    def decode(self, seed: int, rows: int = 4, length: int = 5) -> None:
        """Compare the tokens of a call, and what it leaves in the modules."""
        prompt = prompts(seed, rows, length)
        assert torch.equal(self.pipe.decode(prompt, STEPS), loop(self.plain, prompt))
        same_state(self.subject, self.plain)

    def reset(self) -> None:
        """Give both what their modules kept before their first call."""
        for each in (self.plain, self.subject):
            new = type(each)()
            for module, first in zip(each.modules(), new.modules(), strict=True):
                for name in kept(module).keys() - kept(first).keys():
                    delattr(module, name)
                for name, value in kept(first).items():
                    setattr(module, name, value)


def prompts(seed: int, rows: int = 4, length: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def loop(model: nn.Module, tokens: Tensor) -> Tensor:
    new = tokens
    with torch.no_grad():
        for _ in range(STEPS):
            new = model(new)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
    return tokens


def kept(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers that a module has of its own class."""
    every = {**vars(module), **module._buffers}
    return {name: every[name] for name in sorted(every.keys() - vars(nn.Module()).keys())}


def same_state(subject: nn.Module, plain: nn.Module) -> None:
    for left, right in zip(subject.modules(), plain.modules(), strict=True):
        torch.testing.assert_close(kept(left), kept(right))


@kinds
def test_nothing_is_recorded_after_the_third_call(kind: Callable[[], Keeps]) -> None:
    pair = Pair(kind)
    for seed in range(3):
        pair.decode(seed)
    before = pair.made()
    for seed in range(3, 6):
        pair.decode(seed)
    assert pair.made() == before


@kinds
def test_nothing_is_recorded_after_the_third_call_where_the_caller_resets_the_state(kind: Callable[[], Keeps]) -> None:
    pair, counts = Pair(kind), []
    for seed in range(5):
        pair.reset()
        pair.decode(seed)
        counts.append(pair.made())
    assert counts[2] == counts[4]
    if kind in (Attribute, Layers):  # what they have then is what they had at first
        assert counts[0] <= counts[4] <= counts[0] + 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Rows])
def test_other_calls_between_two_of_decode(kind: Callable[[], Keeps]) -> None:
    pair = Pair(kind)
    pair.decode(0)
    pair.reset()
    pair.decode(1, rows=3, length=7)
    with torch.no_grad():
        torch.testing.assert_close(pair.pipe(prompts(2, 3)), pair.plain(prompts(2, 3)))
    pair.decode(3, rows=3)
    pair.reset()
    for model in (pair.plain, pair.pipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()(prompts(4, 3)).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    pair.decode(5, rows=3)  # on the state that the step has left
    other: PipelinedModule = copy.deepcopy(pair.pipe)
    assert torch.equal(other.decode(prompts(6, 3), STEPS), loop(copy.deepcopy(pair.plain), prompts(6, 3)))
    pair.decode(7, rows=3)


@pytest.mark.parametrize("kind", [Attribute, Late, Layers, Buffer, NewDict, NewList, FilledDict])
def test_a_call_that_fails_leaves_what_the_modules_kept_before(kind: Callable[[], Keeps]) -> None:
    def choose(logits: Tensor) -> Tensor:
        calls.append(logits)
        if len(calls) == 4:
            raise ArithmeticError("no token is good enough")
        return logits.argmax(-1)

    pair = Pair(kind)
    for seed in range(2):
        pair.decode(seed)
    calls: list[Tensor] = []
    with pytest.raises(ArithmeticError):
        pair.pipe.decode(prompts(9), STEPS, choose=choose)
    same_state(pair.subject, pair.plain)
    pair.decode(2)


@pytest.mark.parametrize("assigns", [True, False])
@pytest.mark.parametrize("rows", [1, 4])
def test_buffers_are_written_once_per_call(rows: int, assigns: bool) -> None:
    pair = Pair(lambda: InPlace(assigns))
    for seed in range(2):
        pair.decode(seed, rows)
        assert not any(buffer.requires_grad for buffer in pair.subject.buffers())
    copy.deepcopy(pair.subject)
