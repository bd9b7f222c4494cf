"""Records the ATen operations of one run on the CPU, to replay them without the run's Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from mainspring.graphs.buffers import holders, is_opaque
from mainspring.graphs.cpu_program import Program, RecordedOp, Storage, TensorRef, map_structure, tensors_in
from mainspring.graphs.cpu_rules import (
    is_allocation,
    is_constant,
    is_random,
    literal,
    matching_out,
    refuse,
    same_bits,
    written_tensors,
)
from mainspring.graphs.cpu_watch import MemoryWatch
from mainspring.graphs.dispatch import DispatchMode
from mainspring.graphs.errors import CaptureError

__all__ = ["Recorder"]

_UNSEEN = (
    "memory used by {name} changed without an operation that the recorder sees (a write through numpy, "
    "ctypes or an interpreted kernel); a replay would miss it: write with torch operations, or inside a "
    "custom operation that declares the tensor as written"
)


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Builds a `Program` from the operations that run while it is entered.

    Views are recognised by the storage they share, not by schema. Tensors made by the run are held until
    `finish`, so that no two storages of the recording share an identity.

    Args:
        watch: tensors that the run reads, whose contents are followed from the start.
    """

    def __init__(self, watch: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.inside_operation = False
        self._program = Program([], [])
        self._index: dict[int, int] = {}  # identity of a StorageImpl made by the run -> number
        self._held: list[Tensor] = []
        self._memory = MemoryWatch()
        self._memory.observe(watch)

    def finish(self, results: Any) -> Program:
        """The program; tensors in `results` that the run made are kept out of the arena.

        Raises:
            CaptureError: memory changed behind the recorder's back.
        """
        self._memory.verify_all(lambda: _UNSEEN.format(name="the callable"))
        self._program.results = map_structure(results, self._frozen)
        for tensor in tensors_in(results):
            if not is_opaque(tensor) and tensor.untyped_storage()._cdata in self._index:
                number = self._index[tensor.untyped_storage()._cdata]
                self._program.storages[number].pinned = tensor.untyped_storage()
        self._program.escaped = self._escaped()
        self._held.clear()
        return self._program

    def _escaped(self) -> list[str]:
        """What the run made, did not return, and somebody still holds."""
        found = []
        for tensor, storage in zip(self._held, self._program.storages, strict=True):
            if storage.pinned is None and storage.nbytes and holders(tensor.untyped_storage()._cdata) > 1:
                maker = self._program.operations[storage.first].name if self._program.operations else "an operation"
                shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                found.append(f"{shape} made by operation {storage.first} {maker}")
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and record how to repeat it."""
        kwargs = kwargs or {}
        if any(
            kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
            and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
            for kind in types
        ):
            return NotImplemented  # a tensor subclass takes itself apart first
        if not isinstance(func, OpOverload):
            raise CaptureError(f"{func} cannot be recorded on the CPU; only plain operators can")
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        self.inside_operation = True
        try:
            return self._operation(func, args, kwargs)
        finally:
            self.inside_operation = False

    def _operation(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{func.namespace}::{func._schema.name.split('::')[-1]}"
        refuse(func, name, args, kwargs)
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        self._memory.verify(tensors, lambda: _UNSEEN.format(name=name))
        written = written_tensors(func, args, kwargs)
        before = [(t.untyped_storage()._cdata, t.untyped_storage().nbytes(), t.shape) for t in written]
        frozen_args = tuple(map_structure(arg, self._frozen) for arg in args)
        frozen_kwargs = {key: map_structure(arg, self._frozen) for key, arg in kwargs.items()}
        reads = tuple(self._frozen(t) for t in tensors if not any(t is w for w in written))
        writes = tuple(self._frozen(t) for t in written)
        random_state = torch.random.get_rng_state() if is_random(func) else None

        result = func(*args, **kwargs)

        if random_state is not None and not torch.equal(random_state, torch.random.get_rng_state()):
            raise CaptureError(
                f"{name} draws from the random generator; its state would not be part of the recording. "
                f"Compute random numbers from a seed and a counter that are tensors"
            )
        metadata_only = torch.Tag.inplace_view in func.tags
        for tensor, (identity, nbytes, shape) in zip(written, before, strict=True):
            storage = tensor.untyped_storage()
            moved = storage._cdata != identity or storage.nbytes() != nbytes
            if moved or (tensor.shape != shape and not metadata_only):
                raise CaptureError(
                    f"{name} resized or re-seated a tensor from {list(shape)} to {list(tensor.shape)} "
                    f"while recording; give outputs their final shape"
                )
        self._memory.observe(written)
        self._memory.verify(tensors, lambda: f"{name} wrote into an argument that its schema does not declare")
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        outputs = [item for out in outputs for item in (out if isinstance(out, (list, tuple)) else [out])]
        strangers = [out.device for out in tensors_in(outputs) if out.device.type != "cpu"]
        if strangers:
            raise CaptureError(f"{name} makes a tensor on {strangers[0]}; a CPU recording is of CPU tensors")
        if outputs and not any(isinstance(out, Tensor) or out is None for out in outputs):
            raise CaptureError(f"{name} gives a Python value, which a recording would freeze; keep it in a tensor")

        if metadata_only:
            return result  # later operations see the new metadata through their own alias

        if func is torch.ops.aten.lift_fresh.default:
            return self._constant(name, args[0])
        passed = {t.untyped_storage()._cdata for t in tensors if not is_opaque(t)}
        fresh = [out if isinstance(out, Tensor) and self._is_new(out, passed) else None for out in outputs]
        made = fresh if func._schema.returns else []
        if hasattr(func, "prepare") and self._can_be_prepared(func, args, kwargs, made, written):
            self._append(name, "prepared", func, frozen_args, frozen_kwargs, made, reads, writes)
            return result
        if written or not any(out is not None for out in fresh):
            if written or func.namespace not in ("aten", "prims") or not outputs:
                self._append(name, "in_place", func, frozen_args, frozen_kwargs, fresh, reads, writes)
            return result
        if is_allocation(func):
            self._adopt(fresh)
            return result
        if is_constant(func, tensors):
            self._adopt(fresh)
            for out in fresh:
                if out is not None:
                    self._copy(name, out, literal(out), constant=True)
            return result
        self._functional(name, func, args, kwargs, frozen_args, frozen_kwargs, fresh, reads)
        return result

    def _can_be_prepared(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[Tensor | None],
        written: list[Tensor],
    ) -> bool:
        """Whether all results are new tensors, and the prepared call gives the same bits where it can be tried."""
        made = [out for out in results if out is not None]
        if len(made) != len(results):
            return False
        if written:  # running it once more would change what it writes
            return True
        scratch = tuple(self._scratch(out) for out in made)
        func.prepare(*args, **kwargs, out=scratch)[0]()
        return all(same_bits(a, b) for a, b in zip(scratch, made, strict=True))

    def _functional(
        self,
        name: str,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frozen_args: tuple[Any, ...],
        frozen_kwargs: dict[str, Any],
        fresh: list[Tensor | None],
        reads: tuple[Any, ...],
    ) -> None:
        """Record an operation that makes new tensors: as a copy, through out=, or as run and copy."""
        made = [out for out in fresh if out is not None]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default) and self._try_copy(args, made[0]):
            self._adopt(fresh)
            self._copy(name, made[0], frozen_args[0])
            return
        match = matching_out(func)
        if match is not None and len(made) == len(fresh) == len(match[1]):
            out_func, names = match
            scratch = {key: self._scratch(out) for key, out in zip(names, made, strict=True)}
            if self._try_out(out_func, args, kwargs, scratch, made):
                self._adopt(fresh)
                targets = {key: self._frozen(out) for key, out in zip(names, made, strict=True)}
                self._append(
                    name,
                    "out",
                    out_func,
                    frozen_args,
                    {**frozen_kwargs, **targets},
                    [],
                    reads,
                    (*targets.values(),),
                )
                return
        self._append(name, "run_and_copy", func, frozen_args, frozen_kwargs, fresh, reads, ())

    def _try_copy(self, args: tuple[Any, ...], expected: Tensor) -> bool:
        """Whether copying the argument into a tensor like `expected` gives the same bits."""
        return not is_opaque(args[0]) and same_bits(self._scratch(expected).copy_(args[0]), expected)

    def _try_out(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scratch: dict[str, Tensor],
        expected: list[Tensor],
    ) -> bool:
        """Whether the out= form works, leaves tensors in place and gives the same bits."""
        addresses = [(t.data_ptr(), t.shape, t.stride()) for t in scratch.values()]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                func(*args, **{**kwargs, **scratch})
        except (RuntimeError, TypeError, NotImplementedError, Warning):
            return False
        stayed = addresses == [(t.data_ptr(), t.shape, t.stride()) for t in scratch.values()]
        return stayed and all(same_bits(a, b) for a, b in zip(scratch.values(), expected, strict=True))

    @staticmethod
    def _scratch(like: Tensor) -> Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)

    def _constant(self, name: str, value: Tensor) -> Tensor:
        """A new tensor that holds a literal; copied afresh on every replay: the run may write it."""
        made = value.clone()
        self._adopt([made])
        self._copy(name, made, literal(value), constant=True)
        return made

    def _copy(self, name: str, target: Tensor, source: Tensor | TensorRef, constant: bool = False) -> None:
        ref = self._frozen(target)
        reads = (source,)
        self._append(name, "copy", Tensor.copy_, (ref, source), {}, [], reads, (ref,))
        self._program.operations[-1].constant = constant

    def _append(
        self,
        name: str,
        kind: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fresh: list[Tensor | None],
        reads: tuple[Any, ...],
        writes: tuple[Any, ...],
    ) -> None:
        """Add an operation, with new storages for what it makes, and extend the life of all that it uses."""
        self._adopt(fresh)
        results = tuple(None if out is None else self._frozen(out) for out in fresh)
        writes = (*writes, *(result for result in results if result is not None))
        here = len(self._program.operations)
        for ref in (*reads, *writes):
            if isinstance(ref, TensorRef):
                self._program.storages[ref.storage].last = here
        self._program.operations.append(RecordedOp(name, kind, func, args, kwargs, results, reads, writes))

    def _adopt(self, fresh: Sequence[Tensor | None]) -> None:
        """Number the storages of tensors that the run just made."""
        here = len(self._program.operations)
        for tensor in fresh:
            if tensor is None:
                continue
            if is_opaque(tensor):
                raise CaptureError(
                    f"an operation made an opaque tensor ({tensor.layout}), which has no address to "
                    f"replay into; pack weights before recording"
                )
            storage = tensor.untyped_storage()
            if storage._cdata not in self._index:
                self._index[storage._cdata] = len(self._program.storages)
                self._program.storages.append(Storage(storage.nbytes(), here, here))
                self._held.append(tensor.detach())
                self._memory.observe([tensor])

    def _is_new(self, tensor: Tensor, passed: set[int]) -> bool:
        """Whether `tensor` shares no memory with arguments (`passed`) or with what the run made before."""
        if is_opaque(tensor):
            return True
        identity = tensor.untyped_storage()._cdata
        return identity not in passed and identity not in self._index

    def _frozen(self, value: Any) -> Any:
        """`value` as it is now: a reference if this run made it, an alias if it is from outside."""
        if not isinstance(value, Tensor) or is_opaque(value):
            return value
        number = self._index.get(value.untyped_storage()._cdata)
        if number is None:
            return value.detach()
        return TensorRef(
            number,
            value.dtype,
            tuple(value.shape),
            tuple(value.stride()),
            int(value.storage_offset()),
            value.is_conj(),
            value.is_neg(),
        )
