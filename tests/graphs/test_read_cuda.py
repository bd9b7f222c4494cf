"""A CUDA graph's nodes become an operation list and an address book; tested over a driver made of plain data."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FILL, MUL, SPLIT_K, FakeDriver, kernel, pointers, segment

from mainspring.graphs import GraphError, Span, cuda_nodes
from mainspring.graphs.allocator import allocator_spans
from mainspring.graphs.cuda_nodes import Allocation, CudaDriver
from mainspring.graphs.kernel_names import has_typed_pointers, parameter_types, readable
from mainspring.graphs.loop_kernel import BEGIN, END_ITERATION
from mainspring.graphs.read_cuda import RANKS, CudaReader
from mainspring.graphs.spans import SpanMap

BASE = 0x7F10_0000_0000
WEIGHT, POOL_AT, DEAD = BASE, BASE + 0x10_0000, BASE + 0x20_0000
SPANS = [
    Span("layer.weight", "buffer", WEIGHT, 0x1000),
    *allocator_spans(
        [
            segment(BASE, (0x1000, "active_allocated"), (0x1000, "inactive")),
            segment(POOL_AT, (0x1000, "inactive"), (0x1000, "active_allocated"), pool=(0, 3)),
            segment(DEAD, (0x1000, "inactive"), (0x1000, "active_allocated")),
        ],
        [(0, 3)],
    ),
]


def read(driver: FakeDriver, **options: Any) -> Any:
    return CudaReader(driver, SpanMap(SPANS, RANKS), **options).read(1, size=4, name="step")


def one_kernel(symbol: str, *values: bytes, **options: Any) -> Any:
    return read(FakeDriver({1: ([10], [])}, {10: ("kernel", kernel(symbol, *values))}, **options)).operations[0]


def test_every_pointer_of_a_kernel_has_its_owner_and_offset() -> None:
    operation = one_kernel("gemv", pointers(WEIGHT + 64), pointers(POOL_AT + 8), (7).to_bytes(4, "little"))
    assert [(use.owner, use.parameter, use.kind) for use in operation.uses] == [
        ("layer.weight", 0, "pointer"),
        ("graph pool", 1, "pointer"),
    ]
    assert operation.parameters == (8, 8, 4)
    assert operation.grid == (1, 1, 1)
    assert operation.block == (128, 1, 1)


def test_the_address_book_tells_who_uses_what_from_where() -> None:
    nodes = {10: ("kernel", kernel("a", pointers(WEIGHT + 64))), 11: ("kernel", kernel("b", pointers(WEIGHT + 64)))}
    rung = read(FakeDriver({1: ([10, 11], [(10, 11, "programmatic")])}, nodes))
    (entry,) = rung.addresses
    assert (entry.owner, entry.kind, entry.offset, entry.operations) == ("layer.weight", "buffer", 64, (0, 1))
    assert [(edge.operation, edge.kind) for edge in rung.operations[1].dependencies] == [(0, "programmatic")]


def test_pointers_within_structs_are_found_with_their_place() -> None:
    struct = pointers(3, WEIGHT, 0, POOL_AT + 0x40)
    operation = one_kernel(MUL, (9).to_bytes(4, "little"), struct)
    assert operation.name == "elementwise_kernel<MulFunctor>"
    assert operation.symbol == MUL
    assert [(use.owner, use.parameter, use.offset, use.kind) for use in operation.uses] == [
        ("layer.weight", 1, 8, "struct"),
        ("graph pool", 1, 24, "struct"),
    ]


def test_words_within_structs_that_only_look_like_addresses_are_counted_apart() -> None:
    into_freed, into_nothing, number = DEAD + 16, BASE + 0x5000_0000, 0x0000_0300_0000_0007
    operation = one_kernel("k", pointers(into_freed, into_nothing, number, WEIGHT))
    assert [use.owner for use in operation.uses] == ["layer.weight"]
    assert operation.unresolved == 2


@pytest.mark.parametrize("symbol", [FILL, BEGIN, END_ITERATION])
def test_a_pointer_into_freed_memory_or_into_nothing_is_told(symbol: str) -> None:
    node = kernel(symbol, pointers(DEAD + 16), pointers(BASE + 0x5000_0000), pointers(5))
    rung = read(FakeDriver({1: ([10], [])}, {10: ("kernel", node)}))
    assert [(use.owner, use.parameter) for use in rung.operations[0].uses] == [("freed memory", 0), ("unknown", 1)]
    assert sorted(entry.kind for entry in rung.addresses) == ["freed", "unknown"]
    assert rung.unresolved == 0


def test_a_pointer_of_a_triton_kernel_into_nothing_is_told() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("mainspring.kernels.triton.norm")
    assert one_kernel("_norm_kernel", pointers(BASE + 0x5000_0000)).uses == ()  # no kernel of that name
    for symbol in triton_kernels():
        assert [use.owner for use in one_kernel(symbol, pointers(BASE + 0x5000_0000)).uses] == ["unknown"]


def triton_kernels() -> list[str]:
    """Names of our kernels in one module, as Triton's present and older versions give them to the driver."""
    import triton.runtime.jit

    from mainspring.kernels.triton import norm

    names = [name for name, value in vars(norm).items() if isinstance(value, triton.runtime.jit.KernelInterface)]
    assert names
    return [*names, f"{names[0]}_0d1d2de"]


LIBRARY = "sgemm_largek_lds64"
STACK = BASE + 0x50_422C_F7A0


@pytest.mark.parametrize(("symbol", "first"), [(LIBRARY, pointers(WEIGHT)), (SPLIT_K, pointers(1, 2, 3, WEIGHT))])
def test_what_a_librarys_kernel_was_left_with_is_counted_and_no_pointer(symbol: str, first: bytes) -> None:
    """An address of the host's stack, which the driver does not know, in 8 bytes that may be anything."""
    values = [first, *(pointers(STACK + at if at == 4 else 0) for at in range(12))]
    driver = FakeDriver({1: ([10, 11], [])}, {node: ("kernel", kernel(symbol, *values)) for node in (10, 11)})
    rung = read(driver)
    assert [operation.unresolved for operation in rung.operations] == [1, 1]
    assert [entry.owner for entry in rung.addresses] == ["layer.weight"]
    assert driver.asked == [STACK + 4]


def test_a_librarys_kernel_has_a_pointer_wherever_there_is_memory_of_the_device() -> None:
    ours, known, freed, pinned = WEIGHT + 64, BASE + 0x6000_0000, DEAD + 16, BASE + 0x4000_0000
    allocations = [Allocation(known, 64, False), Allocation(pinned, 64, True)]
    values = [pointers(address) for address in (ours, known, freed, pinned, POOL_AT)]
    operation = one_kernel(LIBRARY, *values, allocations=allocations)
    assert [(use.owner, use.kind) for use in operation.uses] == [
        ("layer.weight", "pointer"),
        ("device memory outside torch", "pointer"),
        ("freed memory", "pointer"),
        ("pinned host memory", "pointer"),
        ("graph pool", "pointer"),
    ]
    assert operation.unresolved == 0


@pytest.mark.parametrize(
    ("symbol", "told", "typed"),
    [
        (FILL, True, True),
        (FILL, False, False),
        (SPLIT_K, True, False),
        (LIBRARY, False, False),
        ("_Z18sgemm_largek_lds64ILb1ELb0ELi5EEvPfPKfS2_iiiiii", True, False),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", False, False),
        (BEGIN, False, True),
    ],
)
def test_which_kernels_follow_all_their_pointers(symbol: str, told: bool, typed: bool) -> None:
    assert has_typed_pointers(symbol, told) is typed


def test_rungs_read_by_one_reader_are_what_each_is_by_itself() -> None:
    weight, pool, garbage = pointers(WEIGHT), pointers(POOL_AT), pointers(STACK)
    nodes = {
        10: ("kernel", kernel(LIBRARY, weight, pool, garbage)),
        11: ("kernel", kernel(MUL, (1).to_bytes(4, "little"), pointers(0, WEIGHT, 0))),
        20: ("kernel", kernel("other", weight, weight)),
        21: ("memset", [("write", WEIGHT, 64)]),
        22: ("kernel", kernel(LIBRARY, weight, pool, garbage)),
        30: ("kernel", kernel(MUL, (1).to_bytes(4, "little"), pointers(0, WEIGHT, 0))),
    }
    driver = FakeDriver({1: ([10, 11], [(10, 11, "full")]), 2: ([20, 21, 22], []), 3: ([30], [])}, nodes)
    together = CudaReader(driver, SpanMap(SPANS, RANKS))
    for graph in (1, 2, 3, 1):
        assert together.read(graph) == CudaReader(driver, SpanMap(SPANS, RANKS)).read(graph)
    entries = [(entry.owner, entry.operations, entry.typed, entry.nbytes) for entry in together.read(2).addresses]
    assert entries == [("layer.weight", (0, 1, 2), True, 64), ("graph pool", (2,), True, None)]
    assert [entry.typed for entry in together.read(3).addresses] == [False]


def test_a_parameter_whose_type_is_no_pointer_is_none() -> None:
    symbol = "_Z4fillPfl"  # fill(float*, long)
    operation = one_kernel(symbol, pointers(WEIGHT), pointers(BASE + 0x5000_0000))
    assert operation.name == "fill"
    assert [(use.owner, use.kind) for use in operation.uses] == [("layer.weight", "pointer")]
    assert operation.unresolved == 1


def test_memory_that_torch_does_not_know_is_asked_of_the_driver_once() -> None:
    pinned, other = BASE + 0x4000_0000, BASE + 0x6000_0000
    driver = FakeDriver(
        {1: ([10, 11], [])},
        {node: ("kernel", kernel("k", pointers(pinned + 8), pointers(other))) for node in (10, 11)},
        [Allocation(pinned, 64, True), Allocation(other, 64, False)],
    )
    reader = CudaReader(driver, SpanMap(SPANS, RANKS))
    book = reader.read(1).addresses
    assert [(entry.owner, entry.kind, entry.offset) for entry in book] == [
        ("pinned host memory", "host", 8),
        ("device memory outside torch", "workspace", 0),
    ]
    assert sorted(driver.asked) == [pinned + 8, other]
    assert [span.owner for span in reader.found] == ["pinned host memory", "device memory outside torch"]


def test_child_graphs_and_bodies_are_entered_and_name_their_parent() -> None:
    driver = FakeDriver(
        {1: ([10, 20], [(10, 20, "full")]), 2: ([30, 31], [(30, 31, "full")]), 3: ([40], [])},
        {
            10: ("memset", [("write", POOL_AT, 64)]),
            20: ("conditional", [2]),
            30: ("graph", [3]),
            31: ("empty", None),
            40: ("memcpy", [("write", WEIGHT, 16), ("read", POOL_AT, 16)]),
        },
    )
    operations = read(driver).operations
    assert [(op.index, op.kind, op.parent) for op in operations] == [
        (0, "memset", None),
        (1, "conditional", None),
        (2, "graph", 1),
        (3, "memcpy", 2),
        (4, "empty", 1),
    ]
    assert operations[1].note == "while"
    assert [(use.role, use.owner, use.nbytes) for use in operations[3].uses] == [
        ("write", "layer.weight", 16),
        ("read", "graph pool", 16),
    ]
    assert [edge.operation for edge in operations[4].dependencies] == [2]


def test_bodies_that_the_driver_does_not_tell_may_be_given() -> None:
    driver = FakeDriver({1: ([10], []), 2: ([20], [])}, {10: ("conditional", []), 20: ("empty", None)})
    assert [op.kind for op in read(driver, bodies={10: [2]}).operations] == ["conditional", "empty"]


def test_operations_are_listed_after_those_that_they_depend_on() -> None:
    nodes = {node: ("kernel", kernel(f"k{node}", pointers(WEIGHT))) for node in (10, 11, 12)}
    edges = [(12, 11, "full"), (11, 10, "full")]
    operations = read(FakeDriver({1: ([10, 11, 12], edges)}, nodes)).operations
    assert [op.name for op in operations] == ["k12", "k11", "k10"]
    assert [[edge.operation for edge in op.dependencies] for op in operations] == [[], [0], [1]]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIiEESt5arrayIPcLm1EEEEviT0_T1_",
            "FillFunctor",
        ),
        ("_ZN7cutlass7Kernel2I12cutlass_gemmEEvNT_6ParamsE", "cutlass_gemm"),
        ("triton_kernel_0d1d2de", "triton_kernel"),
        ("_decode_attention", "_decode_attention"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("_ZN8cublasLt19splitKreduce_kernelILbadly", "splitKreduce_kernel"),
        ("_Z4fillPfi", "fill"),
    ],
)
def test_kernel_names_are_readable(symbol: str, name: str) -> None:
    assert name in readable(symbol)
    assert "::" not in readable(symbol) and "(" not in readable(symbol)


def test_parameter_types_come_from_mangled_names_only() -> None:
    assert parameter_types("_Z4fillPKfiSt5arrayIPcLm2EE") == ("float const*", "int", "std::array<char*, 2ul>")
    assert parameter_types("_Z4fillv") == ()
    assert parameter_types("triton_kernel") is None


# The driver through cuda.bindings


class Handle(int):
    """Stands for the bindings' handle types, which become integers."""

    def __new__(cls, init_value: int = 0) -> Handle:
        return super().__new__(cls, init_value)


class FakeBindings:
    """`cuda.bindings.driver` with one graph of a kernel, a copy and a memset."""

    CUgraph = CUdeviceptr = Handle
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE=1, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR=2, CU_POINTER_ATTRIBUTE_RANGE_SIZE=3
    )

    def __init__(self, by_kernel: bool = True, packed: bool = False) -> None:
        self.values = [ctypes.create_string_buffer(pointers(WEIGHT), 8), ctypes.create_string_buffer(b"\x07\0\0\0", 4)]
        self.array = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in self.values))
        self.buffer = ctypes.create_string_buffer(pointers(WEIGHT) + b"\x07\0\0\0", 12)
        self.size = ctypes.c_size_t(12)
        ends = (1, ctypes.addressof(self.buffer), 2, ctypes.addressof(self.size), 0)
        self.extra = (ctypes.c_void_p * 5)(*ends)
        self.by_kernel, self.packed = by_kernel, packed
        self.described = 0

    def cuGraphGetNodes(self, graph: Handle, count: int = 0) -> tuple[Any, ...]:
        return 0, [Handle(10), Handle(11), Handle(12)][:count], 3

    def cuGraphGetEdges(self, graph: Handle, count: int = 0) -> tuple[Any, ...]:
        data = [SimpleNamespace(type=1), SimpleNamespace(type=0)][:count]
        return 0, [Handle(10), Handle(11)][:count], [Handle(11), Handle(12)][:count], data, 2

    def cuGraphNodeGetType(self, node: Handle) -> tuple[Any, ...]:
        if node == 12:
            raise ValueError("99 is not a valid CUgraphNodeType")
        return 0, {10: 0, 11: 1}[node]

    def cuGraphKernelNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        params = {f"{kind}Dim{axis}": 1 for kind in ("grid", "block") for axis in "XYZ"}
        array, extra = ctypes.addressof(self.array), ctypes.addressof(self.extra)
        where = {"kernelParams": 0, "extra": extra} if self.packed else {"kernelParams": array, "extra": 0}
        func, kern = (0, 5) if self.by_kernel else (6, 0)
        return 0, SimpleNamespace(func=func, kern=kern, sharedMemBytes=32, **params, **where)

    def cuKernelGetName(self, kern: int) -> tuple[Any, ...]:
        self.described += 1
        return 0, b"by_kernel"

    def cuFuncGetName(self, func: int) -> tuple[Any, ...]:
        return 0, b"by_function"

    def cuKernelGetParamInfo(self, kern: int, at: int) -> tuple[Any, ...]:
        return (0, (0, 8)[at], (8, 4)[at]) if at < 2 else (1, 0, 0)

    cuFuncGetParamInfo = cuKernelGetParamInfo

    def cuGraphMemcpyNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        ends = {
            f"{end}{key}": value
            for end, device in (("src", 0), ("dst", WEIGHT))
            for key, value in {
                "Device": device,
                "Host": 4096,
                "Pitch": 64,
                "Height": 4,
                "XInBytes": 8,
                "Y": 1,
                "Z": 0,
            }.items()
        }
        return 0, SimpleNamespace(WidthInBytes=16, Height=2, Depth=1, **ends)

    def cuGraphMemsetNodeGetParams(self, node: Handle) -> tuple[Any, ...]:
        return 0, SimpleNamespace(dst=WEIGHT, width=4, elementSize=4, height=3, pitch=32)

    def cuGraphChildGraphNodeGetGraph(self, node: Handle) -> tuple[Any, ...]:
        return 0, Handle(77)

    def cuPointerGetAttributes(self, count: int, wanted: list[int], address: Handle) -> tuple[Any, ...]:
        return 0, ([2, WEIGHT, 64] if address == WEIGHT + 8 else [0, 0, 0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_driver_reads_names_sizes_and_bytes_of_parameters(by_kernel: bool, packed: bool) -> None:
    bindings = FakeBindings(by_kernel, packed)
    driver = CudaDriver(bindings)
    assert driver.nodes(1) == [10, 11, 12]
    assert driver.count(1) == 3
    assert [driver.kind(node) for node in (10, 11, 12)] == ["kernel", "memcpy", "other"]
    node = driver.kernel(10)
    assert node.function.symbol == ("by_kernel" if by_kernel else "by_function")
    assert node.function.sizes == (8, 4)
    assert node.values == (pointers(WEIGHT), b"\x07\0\0\0")
    assert node.shared_memory == 32
    driver.kernel(10)
    assert bindings.described == (1 if by_kernel else 0)


@pytest.mark.parametrize("places", [(0, 8, 16), (0, 8, 40), (16, 8, 0), (None, 8, 16), (0, None, 16)])
def test_parameters_are_read_wherever_each_lies(places: tuple[int | None, ...]) -> None:
    memory = ctypes.create_string_buffer(bytes(range(1, 65)), 64)
    begin = ctypes.addressof(memory)
    array = (ctypes.c_void_p * 3)(*(None if place is None else begin + place for place in places))
    sizes = (8, 4, 16)
    read = cuda_nodes._values(ctypes.addressof(array), 0, sizes, (0, 8, 16))
    assert read == tuple(
        bytes(size) if place is None else memory.raw[place : place + size]
        for place, size in zip(places, sizes, strict=True)
    )
    assert cuda_nodes._values(ctypes.addressof(array), 0, (), ()) == ()


def test_the_driver_tells_edges_copies_memsets_and_allocations() -> None:
    driver = CudaDriver(FakeBindings())
    driver.nodes(1)
    assert driver.edges(1) == [(10, 11, "programmatic"), (11, 12, "full")]
    assert driver.memcpy(11) == [("write", WEIGHT + 8 + 64, 16 + 64), ("read", 4096 + 8 + 64, 16 + 64)]
    assert driver.memset(12) == [("write", WEIGHT, 16 + 64)]
    assert driver.bodies(11, "graph") == ([77], "")
    assert driver.bodies(11, "conditional")[0] == []
    assert driver.allocation(WEIGHT + 8) == Allocation(WEIGHT, 64, False)
    assert driver.allocation(3) is None


def test_edges_are_read_through_the_older_bindings_second_version() -> None:
    bindings: Any = FakeBindings()
    bindings.cuGraphGetEdges_v2 = bindings.cuGraphGetEdges
    bindings.cuGraphGetEdges = lambda *_: (912,)  # a lossy query
    assert CudaDriver(bindings).edges(1)[0] == (10, 11, "programmatic")


def test_a_call_that_fails_is_an_error_with_its_name() -> None:
    bindings: Any = FakeBindings()
    bindings.cuGraphGetNodes = lambda *_: (400, [], 0)
    with pytest.raises(GraphError, match="cuGraphGetNodes failed with 400"):
        CudaDriver(bindings).nodes(1)
