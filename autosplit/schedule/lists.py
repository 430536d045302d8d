"""The lists of a step, one per device: printed and read as ``torch.distributed.pipelining`` keeps lowered schedules.

A row per device, a cell per entry (`autosplit.schedule.entry`):

```
    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
    1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1REDUCE_GRAD,1SEND_B1
```
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from autosplit.errors import ScheduleError
from autosplit.schedule.entry import Entry, Issued, parse_entry
from autosplit.schedule.order import Receives, check_order, check_state, of_device


@dataclass(frozen=True)
class Actions:
    """What every device does in a step, in order.

    Iterating gives the devices' lists; ``str`` gives the text that `parse` reads.

    Attributes:
        devices: by device, its entries.
        receives: where receives stand (`autosplit.schedule.order`); lists are equal whatever it says.
    """

    devices: tuple[tuple[Entry, ...], ...]
    receives: Receives = field(default="ahead", compare=False)

    @classmethod
    def of(cls, order: Iterable[Issued], devices: int) -> Actions:
        """Return the lists of a global order of so many devices."""
        issued = tuple(order)
        return cls(tuple(of_device(issued, device) for device in range(devices)))

    @classmethod
    def parse(cls, text: str) -> Actions:
        """Return the lists that a text has, as ``str`` writes them; raises ScheduleError where a cell is no entry."""
        rows = csv.reader(text.split("\n"))
        lists = []
        for line, row in enumerate(rows, start=1):
            try:
                lists.append(tuple(parse_entry(cell) for cell in row if cell.strip()))
            except ScheduleError as error:
                raise ScheduleError(f"line {line}: {error}") from None
        return cls(tuple(lists))

    def check(self) -> Actions:
        """Return the lists when all devices come to their end and use only what is there.

        Raises ScheduleError as `check_order` and `check_state` do.
        """
        order = [Issued(device, entry) for device, entries in enumerate(self.devices) for entry in entries]
        check_order(order, len(self.devices), receives=self.receives)
        for entries in self.devices:
            check_state(entries)
        return self

    def __getitem__(self, device: int) -> tuple[Entry, ...]:
        return self.devices[device]

    def __iter__(self) -> Iterator[tuple[Entry, ...]]:
        return iter(self.devices)

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, entries)) for entries in self.devices)
