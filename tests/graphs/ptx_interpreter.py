"""Runs the few PTX instructions that the loop's kernels consist of, one after another, over any memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BITS = (1 << 64) - 1
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}
ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "mul": lambda a, b: a * b,
    "rem": lambda a, b: a % b,
    "shl": lambda a, b: a << b,
}


@dataclass
class Entry:
    """One kernel: its parameters, instructions, and the instruction that each label stands before."""

    parameters: list[str]
    code: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> dict[str, Entry]:
    """The entries of a module by name."""
    text = re.sub(r"//.*", "", text)
    entries = {}
    for found in re.finditer(r"\.visible \.entry (\w+) \((.*?)\)\s*\{(.*?)\n\}", text, re.S):
        entry = Entry(re.findall(r"\.param \.u64 (\w+)", found[2]))
        for part in re.split(r"[;{}]", found[3]):
            part = " ".join(part.split())
            while label := re.match(r"(\w+): ?", part):
                entry.labels[label[1]] = len(entry.code)
                part = part[label.end() :]
            if part and not part.startswith((".reg", ".param")):
                entry.code.append(part)
        entries[found[1]] = entry
    return entries


@dataclass
class Machine:
    """Memory as two functions, a clock, and what the kernels did.

    Attributes:
        read: value of `size` bytes at an address.
        write: put a value of `size` bytes at an address.
        clock: `%globaltimer`.
        conditions: (handle, value) of every `cudaGraphSetConditional`.
        trace: "fence", or (qualifiers, address, value) of each store, in order.
    """

    read: Callable[[int, int], int]
    write: Callable[[int, int, int], None]
    clock: Callable[[], int] = lambda: 1
    conditions: list[tuple[int, int]] = field(default_factory=list)
    trace: list[str | tuple[str, int, int]] = field(default_factory=list)

    def launch(self, entry: Entry, arguments: list[int], threads: int) -> None:
        """Run one block; threads take turns at the barrier."""
        assert len(arguments) == len(entry.parameters)
        parameters = dict(zip(entry.parameters, arguments, strict=True))
        waiting = [self._thread(entry, parameters, index, threads) for index in range(threads)]
        while waiting:
            waiting = [thread for thread in waiting if next(thread, None) is not None]

    def _thread(self, entry: Entry, parameters: dict[str, int], index: int, threads: int) -> Iterator[str]:
        registers: dict[str, int] = {"%tid.x": index, "%ntid.x": threads}
        call: dict[str, int] = {}
        at = 0

        def value(operand: str) -> int:
            if operand == "%globaltimer":
                return self.clock()
            return registers[operand] if operand.startswith("%") else int(operand)

        def address(operand: str) -> int:
            base, _, offset = operand.strip("[]").partition("+")
            return (value(base) + int(offset or 0)) & BITS

        while at < len(entry.code):
            text = entry.code[at]
            at += 1
            guard, instruction = re.fullmatch(r"(?:@(%\w+) )?(.*)", text).groups()  # type: ignore[union-attr]
            if guard is not None and not registers[guard]:
                continue
            operation, _, rest = instruction.partition(" ")
            name, *kinds = operation.split(".")
            operands = [operand.strip() for operand in rest.split(",")]
            if operation == "ld.param.u64":
                registers[operands[0]] = parameters[operands[1].strip("[]")]
            elif name == "st" and kinds[0] == "param":
                call[operands[0].strip("[]")] = value(operands[1])
            elif name == "ld":
                registers[operands[0]] = self.read(address(operands[1]), int(kinds[-1][1:]) // 8)
            elif name == "st":
                self.trace.append((".".join(kinds[:-1]), address(operands[0]), value(operands[1])))
                self.write(address(operands[0]), value(operands[1]), int(kinds[-1][1:]) // 8)
            elif name in ("mov", "cvt"):
                registers[operands[0]] = value(operands[1])
            elif name in ARITHMETIC:
                registers[operands[0]] = ARITHMETIC[name](value(operands[1]), value(operands[2])) & BITS
            elif name == "setp":
                holds = COMPARE[kinds[0]](value(operands[1]), value(operands[2]))
                registers[operands[0]] = int(holds and (kinds[1] != "and" or bool(value(operands[3]))))
            elif name == "selp":
                registers[operands[0]] = value(operands[1] if registers[operands[3]] else operands[2])
            elif name == "bra":
                at = entry.labels[operands[0]]
            elif name == "fence":
                assert operation == "fence.acq_rel.sys"
                self.trace.append("fence")
            elif name == "bar":
                yield "barrier"
            elif name == "call":
                assert operands == ["cudaGraphSetConditional", "(handle", "value)"]
                self.conditions.append((call["handle"], call["value"]))
            elif name == "ret":
                return
            else:
                raise AssertionError(f"unknown instruction {text!r}")
