"""What blocks save of a microbatch and copy to the host: how much it is, and what they wait for beside their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autosplit.profile.types import Profile
from cost_models.specs import LinkSpec


def saved_by_block(costs: Profile, blocks: Mapping[str, int]) -> Counter[int]:
    """Return the bytes that each block saves for its backward; what several save is the first one's."""
    saved = {s: (blocks.get(name), n) for name, node in [*costs.nodes.items()][::-1] for s, n in node.saved.items()}
    sizes = Counter[int]()
    for block, count in saved.values():
        if block is not None:
            sizes[block] += count
    return sizes


def with_copies(costs: Profile, blocks: Mapping[str, int], link: LinkSpec) -> Profile:
    """Return the costs where blocks save nothing: their passes take as long as their copies, if that is longer than
    their work, and two blocks' are there at once."""
    nodes = {name: replace(node, saved={}) if name in blocks else node for name, node in costs.nodes.items()}
    for block, count in saved_by_block(costs, blocks).items():
        members = [node for name, node in nodes.items() if blocks.get(name) == block]
        first, copy_s = members[0], link.transfer_s(count)
        nodes[first.name] = replace(
            first,
            forward_s=first.forward_s + max(0.0, copy_s - sum(node.forward_s for node in members)),
            backward_s=first.backward_s + max(0.0, copy_s - sum(node.backward_s for node in members)),
            forward_transient_bytes=first.forward_transient_bytes + 2 * count,
            backward_transient_bytes=first.backward_transient_bytes + 2 * count,
        )
    return replace(costs, nodes=nodes)
