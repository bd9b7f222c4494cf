"""A loop on CUDA: one graph whose WHILE node holds the recording and, behind it, the kernel that decides.

    begin ─► WHILE { recording ─► end of iteration }

Through `cuda.bindings.driver`; CUDA Programming Guide, "Conditional Graph Nodes".
"""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.errors import GraphError, LoopError
from mainspring.graphs.loop_kernel import BEGIN, END_ITERATION, PTX
from mainspring.graphs.loop_layout import REASONS, Slot, Words, slot_at
from mainspring.graphs.mailbox import LoopMemory, Mailbox

__all__ = ["CudaLoop", "unavailable"]

MIN_VERSION = 12040
"""CUDA version, as the driver counts, that has conditional nodes with loops."""

LOOK_SECONDS = 10e-3
"""How often at most the driver is asked whether a launch has failed."""


def unavailable(device: torch.device) -> str | None:
    """Why a CUDA device has no loop, or None if it has."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if torch.cuda._is_in_bad_fork():
        return "the process was forked after CUDA was initialised; start it with the 'spawn' method"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return "the GPU's compute capability is below 7.5"
    driver = _driver()
    if driver is None:
        return "cuda.bindings is not installed (pip install cuda-bindings)"
    if not hasattr(driver, "cuGraphConditionalHandleCreate"):
        return "cuda.bindings is older than CUDA 12.4; upgrade it (pip install --upgrade cuda-bindings)"
    try:
        version = int(_call("cuDriverGetVersion"))
    except Exception as error:  # bindings raise several kinds where a library is missing
        return f"cuda.bindings does not work here: {error}"
    if version < MIN_VERSION:
        return f"the driver has CUDA {version // 1000}.{version % 1000 // 10}; graphs that repeat need 12.4 or newer"
    return None


def _driver() -> Any:
    """`cuda.bindings.driver`, or None where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def _call(name: str, *args: Any) -> Any:
    """Call the driver; return its result, or a tuple if there are several.

    Raises:
        GraphError: it reports an error.
    """
    error, *results = getattr(_driver(), name)(*args)
    if int(error) != 0:
        raise GraphError(f"{name} failed with {getattr(error, 'name', error)}")
    return results[0] if len(results) == 1 else tuple(results)


def _context(device: torch.device) -> Any:
    """The current context, which is the device's own: made current on a thread that has none yet."""
    context = _call("cuCtxGetCurrent")
    if int(context) == 0:
        context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", device.index))
        _call("cuCtxSetCurrent", context)
    return context


class CudaControl:
    """What all loops of one mailbox share: the kernels, and an event behind each launch.

    Attributes:
        begin: the kernel in front of the loop.
        end_iteration: the kernel behind the recording.
    """

    def __init__(self, memory: LoopMemory) -> None:
        self._memory = memory
        with torch.cuda.device(memory.device):
            torch.cuda.current_stream().synchronize()  # the device's words are zero from here on
            _context(memory.device)
            module = _call("cuModuleLoadData", PTX.encode() + b"\0")
            self.begin = _call("cuModuleGetFunction", module, BEGIN.encode())
            self.end_iteration = _call("cuModuleGetFunction", module, END_ITERATION.encode())
            self._events: list[Any] = [torch.cuda.Event() for _ in range(Words.LAUNCHES)]  # type: ignore[no-untyped-call]
        self._last: tuple[int, Any] | None = None
        self._looked = 0.0
        weakref.finalize(self, _unload, module, memory.device).atexit = False

    def launch(self, executable: Any, max_steps: int, name: str) -> int:
        """Queue one launch on the current stream; the caller holds the memory's lock."""
        memory = self._memory
        with torch.cuda.device(memory.device):
            _context(memory.device)
            stream = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                raise GraphError(f"loop {name!r} cannot be launched while its stream is being captured")
            if self._last is not None and self._last[0] != stream.cuda_stream:
                stream.wait_event(self._last[1])  # the mailbox's launches run one after another
            number = memory.number_launch(max_steps)
            event = self._events[number % Words.LAUNCHES]
            try:
                _call("cuGraphLaunch", executable, stream.cuda_stream)
                event.record(stream)
            except Exception as error:
                memory.failures[number] = error
                memory.broken = f"launch {number} of {name!r} failed: {error}"
                memory.store(slot_at(number) + Slot.REASON, REASONS.index("failed"))
                raise LoopError(memory.broken, number, fatal=True) from error
        self._last = (stream.cuda_stream, event)
        return number

    def fault(self, launch: int) -> BaseException | None:
        """The error that stopped `launch`, if the driver knows one."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        try:
            if not self._events[launch % Words.LAUNCHES].query():
                return None
        except RuntimeError as error:
            return error
        if self._memory.reason(launch):
            return None
        return GraphError("its graph is done, but the kernel that ends it did not say so")

    def wait(self, launch: int) -> None:
        """Block until a launch that has ended has also left the device."""
        self._events[launch % Words.LAUNCHES].synchronize()


def _unload(module: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        _driver().cuModuleUnload(module)


class CudaLoop:
    """The executable graph that repeats one recording."""

    def __init__(self, graph: CudaGraph, flag: Tensor, record: Tensor | None, mailbox: Mailbox, name: str) -> None:
        self._name = name
        self._memory = mailbox.memory
        if mailbox.runner is None:
            mailbox.runner = CudaControl(mailbox.memory)
        self._control: CudaControl = mailbox.runner
        self._newest = 0
        with torch.cuda.device(mailbox.device):
            parent = _call("cuGraphCreate", 0)
            try:
                self._build(parent, graph.raw, flag, record)
                self._executable: Any = _call("cuGraphInstantiate", parent, 0)
            except GraphError as error:
                raise GraphError(
                    f"loop {name!r} could not be built: {error}. What it repeats may hold kernels, copies on the "
                    f"device, fills and child graphs only"
                ) from error
            finally:
                _driver().cuGraphDestroy(parent)
            _call("cuGraphUpload", self._executable, torch.cuda.current_stream().cuda_stream)

    def start(self, max_steps: int) -> int:
        """Queue a launch on the current stream; the caller holds the memory's lock."""
        if self._executable is None:
            raise GraphError(f"loop {self._name!r} was released; make a new one")
        self._newest = self._control.launch(self._executable, max_steps, self._name)
        return self._newest

    def fault(self, launch: int) -> BaseException | None:
        """The error that stopped `launch`, if the driver knows one."""
        return self._control.fault(launch)

    def may_wait(self) -> bool:
        """Any thread may."""
        return True

    def free(self) -> None:
        """Destroy the executable; the last launch has ended."""
        if self._executable is not None:
            if self._memory.known(self._newest):
                self._control.wait(self._newest)
            with torch.cuda.device(self._memory.device):
                _driver().cuGraphExecDestroy(self._executable)
            self._executable = None

    def _build(self, parent: Any, recording: int, flag: Tensor, record: Tensor | None) -> None:
        """Put the nodes into `parent`."""
        driver, memory = _driver(), self._memory
        context = _context(memory.device)
        handle = _call("cuGraphConditionalHandleCreate", parent, context, 1, driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        depth = 0 if record is None else memory.depth
        common = [memory.block.data_ptr(), memory.state.data_ptr(), int(handle), depth]
        first = _call("cuGraphAddKernelNode", parent, None, 0, _kernel(self._control.begin, 1, common))

        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        params.conditional.size = 1
        params.conditional.ctx = context
        # With edge data in its signature it is "_v2" in bindings 12 and the only one in 13.
        add_node = "cuGraphAddNode_v2" if hasattr(driver, "cuGraphAddNode_v2") else "cuGraphAddNode"
        _call(add_node, parent, [first], [driver.CUgraphEdgeData()], 1, params)  # zeros: an ordinary edge
        body = params.conditional.phGraph_out[0]

        step = _call("cuGraphAddChildGraphNode", body, None, 0, driver.CUgraph(recording))
        count = 0 if record is None else record.numel()
        source = 0 if record is None else record.data_ptr()
        values = [*common, memory.ring.data_ptr(), source, count, flag.data_ptr()]
        threads = min(1024, max(32, -(-count // 32) * 32))
        _call("cuGraphAddKernelNode", body, [step], 1, _kernel(self._control.end_iteration, threads, values))


def _kernel(function: Any, threads: int, values: list[int]) -> Any:
    """Parameters of a kernel node of one block whose arguments are all u64."""
    params = _driver().CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX, params.blockDimY, params.blockDimZ = threads, 1, 1
    params.sharedMemBytes = 0
    params.kernelParams = (tuple(values), (ctypes.c_uint64,) * len(values))
    return params
