"""The map of Python state: what holds values that a forward may read or change, how each is read and written.

modules                attributes, tables of parameters, buffers, children and hooks, classes
parameters             attributes and hooks
what they hold         lists, dicts, sets, plain objects, arrays, random generators, iterators, three levels deep
functions of the user  the globals that they load or store, their closures, defaults, attributes
classes of the user    attributes and methods whose names stand in code that the walk has come to

Code of installed packages is not followed: what it keeps outside of the modules is its own matter. The map serves who
puts state back, who tells what a run changed, and who tells the state of one call from that of another.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.trace.borrowed import contents
from autosplit.trace.borrowed.contents import Holder, Place
from autosplit.trace.borrowed.names import is_installed, names_in, names_of_installed
from autosplit.trace.borrowed.values import (
    ATOMIC,
    CACHED,
    ITERATORS,
    WRAPPERS,
    cell_content,
    defaults_of,
    is_apart,
    is_object,
    is_same_content,
    parts_of,
    referent,
    slot_names,
    slots_of,
    stand_in,
    swapped,
    values_of,
    with_parts,
)

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = frozenset(("_parameters", "_buffers", "_modules", *HOOK_TABLES))
_GLOBAL_TABLES = tuple(f"_global{table}" for table in HOOK_TABLES)
_DEPTH = 3


class Holders:
    """All holders of some modules and of what their code names, and the tensors that are in them.

    ``functions``, classes of objects that there are, and ``hooks`` are walked too. Other modules that these name are
    followed where they have no parameters and nothing of the ``skipped`` modules, told by their ids: a loss, say.
    Of ``values`` with their places all is walked but the skipped modules, and code.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        functions: Iterable[Callable[..., Any]] = (),
        skipped: Collection[int] | None = None,
        hooks: Iterable[Callable[..., Any]] = (),
        values: Sequence[tuple[Place, Any]] = (),
    ) -> None:
        self.found: list[Holder] = []
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}
        """Tensors outside of the tables of parameters and buffers, and where they are, by id."""
        self.stands: dict[int, tuple[Any, Any]] = {}
        """Iterators and caches by id, each with the one that stands for it."""
        self.functions: list[types.FunctionType] = []
        """The functions whose code was walked."""
        self._missing: set[str] = set()
        """The Python modules that they import and that were not imported yet."""
        self._mentioned: set[Any] = set()
        """The names in all code that the walk has come to, and the classes that it may call."""
        self._by_text = False
        """Whether that code may reach attributes by other names."""
        self._waiting: defaultdict[Any, list[Callable[[], None]]] = defaultdict(list)
        """What to walk when code is found to mention a name, or a class."""
        self._spaces: dict[Any, dict[str, None]] = {}
        """The names that are taken of each module's globals."""
        self._seen: dict[int, Any] = {}
        self._classes: set[type] = set()
        self._of_hook = self._of_function = False
        self._autograd_functions: list[type] = []
        """Classes of autograd functions, which are walked behind what else names the same."""
        modules = {id(m): (path, m) for model in models for path, m in model.named_modules()}
        self._modules: Collection[int] = modules.keys()
        self._skipped, self._follows_code = skipped, not values
        for where, value in values:
            self._value(value, where, _DEPTH)
        for path, module in modules.values():
            self._module(path, module)
        for function in functions:
            if isinstance(function, type):
                self._class(function)
            else:
                self._value(function, ("", "a function"), _DEPTH, getattr(function, "__qualname__", "a function"))
        self._of_function = True
        for kind in self._autograd_functions:
            self._members(kind)
        self._of_hook = True
        self.hook_tables = [m.__dict__.get(table, {}) for _, m in modules.values() for table in HOOK_TABLES]
        for table in _GLOBAL_TABLES if self._skipped is None else ():
            self.hook_tables.append(getattr(nn.modules.module, table))
            self._value(self.hook_tables[-1], ("", table), 0)
        for hook in [*hooks, *(hook for table in self.hook_tables for hook in table.values())]:
            self._value(hook, ("", "a hook"), _DEPTH, getattr(hook, "__qualname__", "a hook"))

    def read(self) -> list[Any]:
        """Return the contents of all holders."""
        return [holder.read() for holder in self.found]

    def is_as(self, contents: Iterable[Any]) -> bool:
        """Tell whether all is as when these were the contents: another walk would come to the same."""
        pairs = zip(contents, self.found, strict=True)
        return not self.misses() and all(is_same_content(before, holder.read()) for before, holder in pairs)

    def misses(self) -> bool:
        """Tell whether a Python module was imported since, whose variables the code that was walked may read."""
        return any(name in sys.modules for name in self._missing)

    def write(self, before: Iterable[Any]) -> None:
        """Give all holders the contents that they had when these were read."""
        for holder, content in zip(self.found, before, strict=True):
            holder.write(content)

    def has(self, value: Any) -> bool:
        """Tell whether the walk came to an object."""
        return id(value) in self._seen

    def named(self) -> Iterator[Any]:
        """Yield the functions and Python modules that the walk came to, and the classes of all else."""
        for value in self._seen.values():
            yield value if isinstance(value, (types.FunctionType, types.ModuleType)) else type(value)

    def entries(self, holder: Holder, content: Any) -> list[tuple[Any, Any]]:
        """Return the entries of a content that code may take, by key or position; a state has one, under None."""
        keyed = enumerate(content) if isinstance(content, list) else [(None, content)]
        pairs = content.items() if isinstance(content, dict) else keyed
        return [(k, value) for k, value in pairs if self.may_read(holder, k) and not str(k).startswith("__")]

    def may_read(self, holder: Holder, key: Any) -> bool:
        """Tell whether the code that was walked may take an entry, which it does of attributes by their names."""
        return not holder.attributes or self.may_name(key, type(holder.owner))

    def may_name(self, name: Any, kind: type | None = None) -> bool:
        """Tell whether code may take an attribute: what was walked, or installed classes of an object of this class."""
        if self._by_text or name in self._mentioned:
            return True
        installed = names_of_installed(kind or object)
        return installed.by_text or name in installed.mentioned

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors outside of the tables by the names of their places; further ones of a place by number."""
        counts: Counter[str] = Counter()
        for where, tensor in self.tensors.values():
            name = ".".join(filter(None, where))
            yield (f"{name}.{counts[name]}" if counts[name] else name), tensor
            counts[name] += 1

    def stand_in(self, contents: Iterable[Any]) -> None:
        """Put others in the places of iterators and of functions' caches, to be used up instead; caches are empty.

        ``contents`` are those that all holders have.
        """
        parts = itertools.chain.from_iterable(map(values_of, contents))
        self.stands = {id(value): (value, stand_in(value)) for value in parts if type(value) in (*ITERATORS, CACHED)}
        self.swap(self.stands.values())

    def swap(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Put the second of two values in the place of the first, and weak references to tensors in theirs."""
        pairs = [*pairs]
        weak = [(weakref.ref(value), weakref.ref(other)) for value, other in pairs if isinstance(value, torch.Tensor)]
        others = {id(value): other for value, other in (*weak, *pairs)}
        for holder in self.found if others else ():
            content = holder.read()
            if not is_same_content(content, now := with_parts(content, lambda item: swapped(item, others))):
                holder.write(now)

    @contextlib.contextmanager
    def swapped(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
        """Do so; at the end all holders have the contents again that they have now."""
        before = self.read()
        try:
            self.swap(pairs)
            yield
        finally:
            self.write(before)

    # -- the walk ----------------------------------------------------------------------------------------------------
    def _add(self, where: Place, read: Callable[[], Any], write: Callable[[Any], None], **known: Any) -> None:
        self.found.append(Holder(where, read, write, self._of_hook, self._of_function, **known))

    def _module(self, path: str, module: nn.Module) -> None:
        fields = module.__dict__
        self._add((path, ""), lambda: {**fields, contents.CLASS: type(module)}, partial(contents.refill_module, module))
        if isinstance(module, torch.jit.ScriptModule):
            return
        for key, value in fields.items():
            if key in _TABLES:
                self._add((path, key), partial(contents.copied, value), partial(contents.refill, value))
            else:
                self._value(value, (path, key), _DEPTH)
        for name in module._parameters:
            self._parameter(module._parameters, path, name)
        self._class(type(module))

    def _parameter(self, table: dict[str, Any], path: str, name: str) -> None:
        """Walk what hangs on the parameter that is in a table: attributes, such as sums of gradients, and hooks."""
        read, write = partial(contents.marks, table, name), partial(contents.refill_marks, table, name)
        self._add((path, name), read, write)
        for key, value in read().items():
            self._value(value, (path, f"{name}.{key}" if isinstance(key, str) else name), _DEPTH)

    def _value(self, value: Any, where: Place, depth: int, name: str = "") -> None:
        value = referent(value)
        if isinstance(value, ATOMIC) or depth < 0 or id(value) in self._seen or not self._follows(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = where, value
        elif isinstance(value, type):
            self._class(value)
            self._mention(value.__mro__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.ModuleType):
            for key in () if is_installed(value.__name__) else list(vars(value)):
                self._when_mentioned(key, partial(self._take, vars(value), key))
        elif (state := contents.state_of(value)) is not None:
            self._add(where, *state, name=name, draws=isinstance(value, contents.GENERATORS), owner=value)
        else:
            self._parts(value, where, depth, name)

    def _follows(self, value: Any) -> bool:
        if not isinstance(value, nn.Module):
            return True
        if self._skipped is None:
            return bool(self._modules) and is_apart(value, self._modules)
        trained = self._follows_code and next(value.parameters(), None) is not None
        return not trained and is_apart(value, self._skipped)

    def _parts(self, value: Any, where: Place, depth: int, name: str) -> None:
        if isinstance(value, (dict, list, set, deque)):
            read, write = partial(contents.copied, value), partial(contents.refill, value)
            self._add(where, read, write, name=name, owner=value, space=value if type(value) is dict else None)
        attributes: dict[str, Any] = {}
        if is_object(value) or isinstance(value, nn.Module):
            kind: Any = type(value)
            slots = partial(slots_of, value)
            known: dict[str, Any] = {"name": name, "attributes": True, "owner": value}
            if hasattr(value, "__dict__"):
                space = attributes = value.__dict__
                self._add(where, space.copy, partial(contents.refill, space), space=space, **known)
            if slot_names(kind):
                assign = partial(object.__setattr__, value), partial(object.__delattr__, value)
                self._add(where, slots, contents.writer(slots, *assign), **known)
            attributes = {**attributes, **slots()}
            self._class(kind)
        is_callable = isinstance(value, WRAPPERS)
        for key, item in parts_of(value, ()) or ():
            if not isinstance(item, ATOMIC):
                named = name and (name if is_callable else f"{name}.{key}")
                walk = partial(self._value, item, where, depth if is_callable else depth - 1, named)
                if name and attributes.get(key) is item:
                    self._when_mentioned(key, walk, kind=type(value))
                else:
                    walk()

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if self._follows_code and each not in self._classes and not is_installed(each.__module__):
                self._classes.add(each)
                if issubclass(each, torch.autograd.Function) and not self._of_function:
                    self._autograd_functions.append(each)
                else:
                    self._members(each)

    def _members(self, kind: type) -> None:
        """Walk the members of a class that are called without being named, and others when their names are met."""
        name, where = kind.__qualname__, ("", f"class {kind.__qualname__}")
        assign = partial(type.__setattr__, kind), partial(type.__delattr__, kind)
        read: Callable[[], dict[str, Any]] = partial(dict, vars(kind))
        self._add(where, read, contents.writer(read, *assign), name=name, attributes=True)
        installed = [base for base in kind.__mro__ if base is not object and is_installed(base.__module__)]
        inherited = {key for base in installed for key in vars(base)}  # code that is not followed may call these
        for key, member in list(vars(kind).items()):
            value = member.fget if isinstance(member, property) else member
            walk = partial(self._value, value, where, _DEPTH, f"{name}.{key}")
            if key in ("__init__", "__new__"):
                self._when_mentioned(kind, walk)
            else:
                self._when_mentioned(key, walk)
                generated = key in ("__repr__", "__eq__") and "__dataclass_params__" in vars(kind)  # names every field
                self._mention({key} if key in inherited or (key[:2] == key[-2:] == "__" and not generated) else ())

    def _when_mentioned(self, name: Any, walk: Callable[[], None], kind: type | None = None) -> None:
        if self.may_name(name, kind):
            walk()
        else:
            self._waiting[name].append(walk)

    def _mention(self, names: Iterable[Any]) -> None:
        new = {*names} - self._mentioned
        self._mentioned |= new
        waiting = sorted(new & self._waiting.keys(), key=str)  # the walk is the same in every process
        for walk in [walk for name in waiting for walk in self._waiting.pop(name)]:
            walk()

    def _function(self, function: types.FunctionType) -> None:
        if not self._follows_code or is_installed(function.__module__):
            return
        self.functions.append(function)
        name = function.__qualname__
        where = ("", name)
        fields = function.__dict__
        self._add(where, fields.copy, partial(contents.refill, fields), name=name, attributes=True)
        for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            read, write = partial(cell_content, cell), partial(contents.refill_cell, cell)
            self._add(where, read, write, name=f"{name}.{free}", cell=True)
        write = partial(contents.refill_defaults, function)
        self._add(where, partial(defaults_of, function), write, name=name)
        for key, value in parts_of(function, ()) or ():
            self._value(value, where, _DEPTH, f"{name}.{key}")
        names = names_in(function.__code__)
        if names.by_text and not self._by_text:
            self._by_text = True
            self._mention([*self._waiting])
        self._mention(names.mentioned)
        for variable, attributes in names.globals:
            self._variable(function.__globals__, (variable, *attributes), names.mentioned)
        for module in names.imported:
            if module not in sys.modules:
                self._missing.add(module)
            elif not is_installed(module):
                self._variable(vars(sys.modules[module]), (), names.mentioned)

    def _variable(self, space: dict[str, Any], path: tuple[str, ...], mentioned: Collection[str]) -> None:
        """Walk a global variable, or an attribute of a Python module that it is; all that may be, of a bare module."""
        for name in path:
            self._take(space, name)
            value = space.get(name)
            if not isinstance(value, types.ModuleType) or is_installed(value.__name__):
                return
            space = vars(value)
        for name in sorted(mentioned & space.keys()):
            self._take(space, name)

    def _take(self, space: dict[str, Any], name: str) -> None:
        key, module = (id(space), self._of_hook, self._of_function), str(space.get("__name__", ""))
        if key not in self._spaces:
            names = self._spaces[key] = {}
            read = partial(contents.named, space, names)
            assign = space.__setitem__, space.__delitem__
            self._add(("", module), read, contents.writer(read, *assign), name=module, attributes=True)
        if name not in self._spaces[key]:
            self._spaces[key][name] = None
            if not isinstance(space.get(name), types.ModuleType):  # of one, code names attributes in a row
                self._value(space.get(name), ("", module), _DEPTH, f"{module}.{name}")
