"""Which device holds which stage, when a device holds several."""

from __future__ import annotations


def looped(*, devices: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the lane of each stage when the stages go round the devices: stage ``s`` on device ``s mod devices``.

    ```
        device 0   0  4        4 devices, 2 virtual stages
        device 1   1  5
        device 2   2  6
        device 3   3  7
    ```
    """
    return tuple(stage % devices for stage in range(devices * virtual_stages))


def v_shaped(*, devices: int) -> tuple[int, ...]:
    """Return the lane of each of ``2 * devices`` stages when they go down the devices and up again.

    ```
        device 0   0  7        4 devices: the last stage is on the first device, which so starts the backward
        device 1   1  6
        device 2   2  5
        device 3   3  4
    ```
    """
    return (*range(devices), *reversed(range(devices)))
