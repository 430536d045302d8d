"""What plans assume of the runtime that trains on a mesh, as far as runtimes differ in it.

| | autosplit | megatron | torchtitan |
|---|---|---|---|
| ZeRO | 0, 3 | 0, 1, 2, 3 | 0 by dp alone; 3 |
| ZeRO-3 | stages are whole through a step | by blocks | by blocks, under a pipeline whole through a step |
| shards | gathered before a step, scattered behind it | beside the first forward, the last backward | likewise |
| sequence parallelism | what the tensor plan has | gathers all of it again, shares the loss's words | likewise |
| recomputed blocks | as far as the backward needs | whole | as far as the backward needs |
| schedules | all | 1F1B; interleaved where pp divides the microbatches | all |

Sums of whole gradients go on beside the last backward, in buckets, under all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

RuntimeName = Literal["autosplit", "megatron", "torchtitan"]
_ALL = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Runtime:
    """The switches of a runtime.

    Attributes:
        zero: the ZeRO stages that it has, and the dimensions beside dp that each goes with.
        whole_from: from how many stages of a pipeline on ZeRO-3 holds parameters and gradients whole through a step;
            None: it never does.
        beside: whether shards are gathered beside the first forward, and scattered beside the last backward.
        sequence: whether ranks of tp have Megatron-LM's sequence parallelism.
        bucket_bytes: how much a bucket of gradients has.
        sum_bytes: the least bytes of an element that gradients are added up in.
        varies: whether programs of its kind differ in what they keep: gradients of a model in bf16 in fp32
            (``accumulate_allreduce_grads_in_fp32`` of Megatron-LM, which its ``--bf16`` sets) or in bf16 (NeMo's
            configurations), logits of each rank's words, or gathered.
        schedules: those that it has; empty: all.
        stops: whether a block that is recomputed ends with the last value that its backward takes, as non-reentrant
            ``torch.utils.checkpoint`` does.
        in_rounds: whether interleaved takes microbatches in multiples of the devices of a pipeline.
    """

    zero: Mapping[int, Sequence[str]]
    whole_from: int | None
    beside: bool
    sequence: bool
    bucket_bytes: int
    sum_bytes: int = 0
    varies: bool = False
    schedules: Sequence[str] = ()
    stops: bool = True
    in_rounds: bool = False


RUNTIMES: Mapping[RuntimeName, Runtime] = {
    "autosplit": Runtime({0: _ALL, 3: _ALL}, whole_from=1, beside=False, sequence=False, bucket_bytes=25 << 20),
    "megatron": Runtime(
        dict.fromkeys(range(4), _ALL),  # from 1 on by its distributed optimizer, 2 and 3 by Megatron-FSDP
        whole_from=None,
        beside=True,
        sequence=True,
        bucket_bytes=80 << 20,  # 40M gradients (`DistributedDataParallelConfig.bucket_size`), in bf16
        varies=True,
        schedules=("1f1b", "interleaved"),
        stops=False,
        in_rounds=True,
    ),
    "torchtitan": Runtime(  # sums in fp32: `mixed_precision_reduce` of its configurations
        {0: (), 3: _ALL}, whole_from=2, beside=True, sequence=True, bucket_bytes=25 << 20, sum_bytes=4
    ),
}
