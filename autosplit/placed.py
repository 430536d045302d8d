"""What a pipe does where it is told to move: its stages stay on their devices."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from autosplit.errors import DeviceError


class Placed(nn.Module):
    """A module whose parts lie on the devices of a plan."""

    _core: Any

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype; a device is refused when stages lie on others: it would collapse the placement."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        self._refuse_collapse(device)
        self._core.model.to(*args, **kwargs)
        return self

    def cpu(self) -> Self:
        """Do nothing when all stages are on the CPU; else refuse, as :meth:`to` does."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Do nothing when all stages are on that CUDA device; else refuse, as :meth:`to` does."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def _refuse_collapse(self, device: torch.device | None) -> None:
        own = {str(d) for d in self._core.options.devices}
        if device is not None and own != {str(device)} and own != {f"{device.type}:{device.index or 0}"}:
            raise DeviceError(
                f"the stages lie on {', '.join(sorted(own))}; moving all to {device} would collapse the pipeline. "
                f"Take the model back with pipe.unsplit().to({str(device)!r}), or split it anew with devices="
            )
