"""What is wrong with a file of figures: the field, the value that it has, and what is allowed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_SHOWN = 3
_LONGEST_VALUE = 60


def describe(error: ValidationError, *, schema: Mapping[str, Any]) -> str:
    """Return what a validation found: the first problems in full, and the number of all.

    ``schema`` is the JSON schema of what was validated: ``Model.model_json_schema()``.
    """
    problems = error.errors(include_url=False)
    shown = "; ".join(_problem(problem, schema) for problem in problems[:_SHOWN])
    count = len(problems)
    return f"{shown} ({count} problem{'s' if count > 1 else ''} in all)"


def _problem(problem: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    loc = [part for part in problem["loc"] if part != "[key]"]
    where = ".".join(map(str, loc))
    if problem["type"] == "json_invalid":
        return f"it is no JSON: {problem['ctx']['error']}"
    if problem["type"] == "missing":
        return f"{where} is missing; allowed: {_allowed(schema, loc)}"
    if problem["type"] == "extra_forbidden":
        return f"{where} is no field; fields: {', '.join(_fields(schema, loc[:-1]))}"
    if problem["type"] == "value_error":
        return ": ".join(part for part in (where, str(problem["ctx"]["error"])) if part)
    value = repr(problem["input"])
    if len(value) > _LONGEST_VALUE:
        value = f"{value[:_LONGEST_VALUE]}…"
    return f"{where or 'the whole'} is {value}; allowed: {_allowed(schema, loc)}"


def _allowed(schema: Mapping[str, Any], loc: Sequence[str | int]) -> str:
    return _range(_resolve(schema, schema, loc), schema)


def _fields(schema: Mapping[str, Any], loc: Sequence[str | int]) -> list[str]:
    return list(_resolve(schema, schema, loc).get("properties", ()))


def _resolve(node: Mapping[str, Any], root: Mapping[str, Any], loc: Sequence[str | int]) -> Mapping[str, Any]:
    """Return the part of a JSON schema that a path of field names and positions leads to."""
    if "$ref" in node:
        return _resolve(root["$defs"][node["$ref"].rpartition("/")[2]], root, loc)
    if not loc:
        return node
    if "anyOf" in node:
        found = [_resolve(choice, root, loc) for choice in node["anyOf"] if choice.get("type") != "null"]
        return next((choice for choice in found if choice), {})
    first, *rest = loc
    inner = node.get("properties", {}).get(first)
    if inner is None and "propertyNames" in node and first not in node["propertyNames"].get("enum", (first,)):
        return node["propertyNames"]
    if inner is None:
        inner = node.get("additionalProperties") or node.get("items") or {}
    if "prefixItems" in node and isinstance(first, int):
        inner = node["prefixItems"][first]
    return _resolve(inner, root, rest)


def _range(node: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return what a part of a JSON schema allows, in words."""
    if "$ref" in node:
        return _range(_resolve(node, root, ()), root)
    if "anyOf" in node:
        return " or ".join(_range(choice, root) for choice in node["anyOf"])
    if "enum" in node:
        return f"one of {', '.join(map(str, node['enum']))}"
    words = {
        "object": "an object",
        "array": "a list",
        "string": "a text",
        "number": "a number",
        "integer": "an integer",
        "null": "null",
    }
    kind = words.get(str(node.get("type")), "another value")
    low, high, above = node.get("minimum"), node.get("maximum"), node.get("exclusiveMinimum")
    if low is not None:
        return f"{kind} from {_plain(low)}" + (f" to {_plain(high)}" if high is not None else "")
    if above is not None:
        return f"{kind} above {_plain(above)}"
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}"
    if node.get("minLength") or node.get("minItems"):
        return f"{kind} that is not empty"
    return kind


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
