"""Free blocks of the simulated allocator: best fit, split and join, segments and pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

MIB = 1 << 20

_ADDRESS_BITS = 64
"""A free block's key is ``size << 64 | address``: one integer sorts by size, then address."""

_ADDRESS_SPACE = 1 << 60
"""Addresses of an expandable segment: more than any device has memory for."""


class Block:
    """A range of a segment: in use, free, or (in an expandable segment) not mapped."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.free = True
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def key(self) -> int:
        """Order among free blocks: by size, then by address."""
        return self.size << _ADDRESS_BITS | self.address


class Pool:
    """The blocks of one pool; an expandable pool holds one segment, whose end is not mapped.

    ```
        [ in use | free | in use | free | not mapped ............ ]
    ```
    """

    def __init__(self, *, small: bool, page_bytes: int, expandable: bool) -> None:
        self.small = small
        self.reserved_bytes = 0
        self.segments = 0
        self._page_bytes = page_bytes
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._top = 0
        self._heads: dict[int, Block] = {}
        self._gaps: list[Block] = []
        self._expandable = expandable

    @property
    def heads(self) -> tuple[Block, ...]:
        """The first block of every segment."""
        return tuple(self._heads.values())

    def head(self, address: int) -> Block | None:
        """Return the first block of the segment at an address; None where there is no such segment."""
        return self._heads.get(address)

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest free block of at least ``size`` bytes, the lowest address among equals.

        The last block of an expandable segment counts as large as it can grow: it is taken when no other fits.
        """
        at = bisect_left(self._keys, size << _ADDRESS_BITS)
        if at == len(self._keys):
            return None
        found = self._blocks[self._keys[at]]
        if self._expandable:
            while at + 1 < len(self._keys):
                rival = self._blocks[self._keys[at + 1]]
                if _growable(rival) >= _growable(found):
                    break
                found, at = rival, at + 1
        return found

    def largest(self) -> Block | None:
        """Return the largest free block."""
        return self._blocks[self._keys[-1]] if self._keys else None

    def take(self, block: Block) -> None:
        """Remove a block from the free ones."""
        key = block.key
        del self._keys[bisect_left(self._keys, key)]
        del self._blocks[key]

    def put(self, block: Block) -> None:
        """Add a block to the free ones."""
        key = block.key
        insort(self._keys, key)
        self._blocks[key] = block

    def split(self, block: Block, size: int) -> None:
        """Cut a block that was taken to ``size`` bytes and put the rest among the free ones."""
        rest = Block(self, block.address + size, block.size - size)
        block.size = size
        _insert_after(block, rest)
        self.put(rest)

    def give_back(self, block: Block) -> None:
        """Free a block: join it with its free neighbours and put it among the free ones."""
        block.free = True
        following = block.next
        if following is not None and following.free and following.mapped:
            self.take(following)
            self._absorb(block, following)
        before = block.previous
        if before is not None and before.free and before.mapped:
            self.take(before)
            self._absorb(before, block)
            block = before
        self.put(block)

    def open(self, size: int, *, address: int | None = None) -> Block:
        """Reserve a segment, behind all others or at ``address``; return it as one block, not among the free ones."""
        block = Block(self, self._top if address is None else address, size)
        self._top = max(self._top, block.address + size)
        self._heads[block.address] = block
        self.segments += 1
        self.reserved_bytes += size
        return block

    def restore(self, address: int, blocks: Sequence[tuple[int, bool]]) -> list[Block]:
        """Take over a segment and return its blocks, of which sizes and whether they are free are given in order."""
        block = self.open(sum(size for size, _ in blocks), address=address)
        found = [block]
        for size, _ in blocks[:-1]:
            rest = Block(self, block.address + size, block.size - size)
            block.size = size
            _insert_after(block, rest)
            found.append(rest)
            block = rest
        for block, (_, free) in zip(found, blocks, strict=True):
            block.free = free
            if free:
                self.put(block)
        return found

    def close(self, block: Block) -> None:
        """Give a segment that is one free block back to the device."""
        self.take(block)
        del self._heads[block.address]
        self.segments -= 1
        self.reserved_bytes -= block.size

    def release(self) -> None:
        """Give back every segment that is one free block; of an expandable one every page that is wholly free."""
        for block in list(self._blocks.values()):
            if self._expandable:
                self._unmap(block)
            elif block.previous is None and block.next is None:
                self.close(block)

    def expand(self, size: int, *, room_bytes: float) -> Block | None:
        """Map pages until a block of ``size`` bytes is free, at the lowest address; None beyond ``room_bytes``.

        Pages that were mapped before the room ran out stay, as free blocks.
        """
        if not self._heads:
            everything = Block(self, 0, _ADDRESS_SPACE, mapped=False)
            self._heads[0] = everything
            self._gaps.append(everything)
            self.segments = 1
        block = self._lowest(size)
        while not block.mapped or block.size < size:
            gap = block
            if block.mapped:
                assert block.next is not None, "the end of an expandable segment is never mapped"
                gap = block.next
            missing = size if gap is block else size - block.size
            pages = min(-(-missing // self._page_bytes) * self._page_bytes, gap.size)
            if pages > room_bytes:
                return None
            room_bytes -= pages
            block = self._map(gap, pages)
        self.take(block)
        return block

    def _lowest(self, size: int) -> Block:
        """Return the first of a run of free and unmapped blocks that has ``size`` bytes and is partly unmapped."""
        for gap in self._gaps:
            before = gap.previous
            start = before if before is not None and before.free else gap
            run = 0
            block: Block | None = start
            while block is not None and block.free and run < size:
                run += block.size
                block = block.next
            if run >= size:
                return start
        raise AssertionError("the address range of an expandable segment is used up")

    def _map(self, gap: Block, size: int) -> Block:
        """Back the first ``size`` bytes of a gap with memory and return the free block that they are now part of."""
        self._gaps.remove(gap)
        if size < gap.size:
            rest = Block(self, gap.address + size, gap.size - size, mapped=False)
            _insert_after(gap, rest)
            insort(self._gaps, rest, key=_address)
            gap.size = size
        gap.mapped = True
        self.reserved_bytes += size
        before = gap.previous
        self.give_back(gap)
        return before if before is not None and before.free and before.mapped else gap

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages inside a free block."""
        page = self._page_bytes
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if last <= first:
            return
        self.take(block)
        self.reserved_bytes -= last - first
        end = block.address + block.size
        if last < end:
            after = Block(self, last, end - last)
            _insert_after(block, after)
            self.put(after)
        block.size = last - block.address
        if first > block.address:
            gap = Block(self, first, last - first, mapped=False)
            _insert_after(block, gap)
            block.size = first - block.address
            self.put(block)
        else:
            gap = block
            gap.mapped = False
        if gap.next is not None and not gap.next.mapped:
            self._gaps.remove(gap.next)
            self._absorb(gap, gap.next)
        if gap.previous is not None and not gap.previous.mapped:
            self._absorb(gap.previous, gap)
        else:
            insort(self._gaps, gap, key=_address)
        if self._gaps[0].size == _ADDRESS_SPACE:
            self._gaps.clear()
            self._heads.clear()
            self.segments = 0

    def _absorb(self, left: Block, right: Block) -> None:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left


def _address(block: Block) -> int:
    return block.address


def _insert_after(block: Block, new: Block) -> None:
    new.previous, new.next = block, block.next
    if block.next is not None:
        block.next.previous = new
    block.next = new


def _growable(block: Block) -> int:
    """Bytes that a free block has or can have by mapping what follows it."""
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
