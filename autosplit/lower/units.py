"""Take nodes out of a graph and put a call of a module in their place."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx


def take_out(graph: fx.Graph, nodes: Sequence[fx.Node], *, attribute: str) -> fx.Graph:
    """Move nodes that follow each other into a graph of their own, which the module ``attribute`` is to run.

    What the new graph returns, a tuple, is taken apart where the nodes were.
    """
    own = set(nodes)
    taken = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in own))
    given = [node for node in nodes if not own.issuperset(node.users)]
    inside = fx.Graph()
    copies = {operand: inside.placeholder(operand.name) for operand in taken}
    for node in nodes:
        copies[node] = inside.node_copy(node, copies.__getitem__)
    inside.output(tuple(copies[node] for node in given))
    with graph.inserting_before(nodes[0]):
        call = graph.call_module(attribute, tuple(taken))
        for place, node in enumerate(given):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (call, place)))
    for node in reversed(nodes):
        graph.erase_node(node)
    return inside
