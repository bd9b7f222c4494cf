"""The core: schedule, launch, read back. One call of ``step`` hands out the tokens that are there."""

from __future__ import annotations

import logging
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from mainspring.engine.ambient import own_torch_state
from mainspring.engine.answers import Answer, Choice
from mainspring.engine.block_pool import BlockPool
from mainspring.engine.delivery import Delivery, Touched
from mainspring.engine.detokenizer import Detokenizer, TokenDecoder
from mainspring.engine.errors import EngineError
from mainspring.engine.generation_defaults import sampling_defaults
from mainspring.engine.intake import Intake, Needs, numbers_of_request
from mainspring.engine.interpreter import BRISK, switch_interval
from mainspring.engine.interrupts import Region
from mainspring.engine.launched import LaunchedStep
from mainspring.engine.limits import EngineLimits, choose_device, choose_launch_mode, derive_limits
from mainspring.engine.loop_driver import LoopDriver
from mainspring.engine.loops import Loops, RunningLoop
from mainspring.engine.memory import give_back_memory, plan_memory, record_ladder
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.pipeline import Pipeline
from mainspring.engine.request import Request
from mainspring.engine.samplers import PLAIN
from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.scheduler import Scheduler
from mainspring.engine.settings import EngineSettings
from mainspring.engine.stats import EngineStats
from mainspring.graphs import AuditReport, LoopError, Recording
from mainspring.graphs.capture import held_collector
from mainspring.models.loader import load_config, load_model, update_weights
from mainspring.models.source import resolve
from mainspring.models.tokenizer import load_tokenizer

logger = logging.getLogger("mainspring")


class EngineCore:
    """A model, its runner and its scheduler. Calls from several threads take turns.

    Steps are launched ahead of reading: on a GPU the next decode step is queued before the tokens of the one under way
    have been read, since the step advances its own state on the device.
    """

    @own_torch_state()
    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        device = choose_device(settings.device)
        source = resolve(settings.model, weights=settings.load_format != "dummy")
        self.config = load_config(source)
        self.limits: EngineLimits = derive_limits(settings, self.config, device)
        self.launch_mode = choose_launch_mode(settings, device)
        self.tokenizer = None if settings.skip_tokenizer_init else load_tokenizer(source)
        self.sampling_defaults = sampling_defaults(source, settings.generation_config)
        self.token_decoder = None if self.tokenizer is None else TokenDecoder(self.tokenizer)
        model = load_model(
            source,
            dtype=self.limits.dtype,
            device=device,
            load_format=settings.load_format,
            seed=settings.seed,
            max_model_len=self.limits.max_model_len,
        )
        model.pack()
        progress = settings.progress if settings.progress is not None else os.isatty(2)
        self.runner = ModelRunner(
            model,
            self.limits,
            enforce_eager=self.launch_mode == "eager",
            progress=progress,
            verify_graphs=settings.verify_graphs,
        )
        with held_collector(collect=False):  # sizing begins with a collection; one for each recording would be six more
            self.memory = plan_memory(self.runner, settings)
            self.runner.allocate(self.memory.num_blocks)
            self.recorded = record_ladder(self.runner, self.memory)
        if self.launch_mode == "loop":
            self.runner.waits_asleep = True
            self.runner.loops.prepare_ladder(PLAIN)
        self.scheduler = Scheduler(
            BlockPool(self.memory.num_blocks + 1, self.limits.block_size, settings.enable_prefix_caching),
            num_seats=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
        )
        self._intake = Intake(
            self.config.vocab_size, self.config.eos_token_ids, self.tokenizer, self.limits.max_logprobs
        )
        self._delivery = Delivery(self.scheduler, self._intake, self.token_decoder)
        self.pipeline = Pipeline(
            self.scheduler,
            self.runner,
            self._delivery,
            LoopDriver(self.scheduler, self.runner, settings.loop_steps, settings.loop_timeout),
            depth=1 if device.type == "cuda" and self.launch_mode != "eager" else 0,
            looping=self.launch_mode == "loop",
        )
        self._shares_interpreter = device.type == "cuda" or self.launch_mode == "loop"
        self._eos_token_ids = frozenset(self.config.eos_token_ids)
        self._seeds = random.Random(settings.seed)
        self._arrivals = 0
        self._held: set[Request] = set()
        self._lock = threading.RLock()
        self._busy = False
        self.doomed: deque[Answer] = deque()
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._finalizer = weakref.finalize(self, _end_loops, self.runner.loops, self._process)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> Answer:
        """Take in one request (one per choice of ``params.n``). Raises ``RequestError`` and changes nothing when it
        can never be served."""
        self._check_alive()
        prompt_token_ids = numbers_of_request("prompt_token_ids", prompt_token_ids)
        (priority,) = numbers_of_request("priority", (priority,))
        self.scheduler.check_length(len(prompt_token_ids))
        self._intake.check_prompt(prompt_token_ids)
        needs = self._intake.needs(params)
        with self._exclusive():
            if not self._delivery.choices and not self.pipeline.in_flight:
                self._notice_replaced_weights()
            self.runner.require(needs.asks)
            return self._admit(request_id, prompt_token_ids, params, needs, prompt, priority)

    def _admit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        needs: Needs,
        prompt: str | None,
        priority: int,
    ) -> Answer:
        answer = Answer(request_id, prompt, prompt_token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        for index in range(params.n):
            request = Request(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                arrival=self._arrivals,
                priority=priority,
                choice=index,
                seed=seed,
                stop_ids=needs.stop_ids,
                asks=needs.asks,
                bad_word_ids=needs.bad_word_ids,
                prompt_logprobs_due=index == 0 and params.prompt_logprobs is not None and len(prompt_token_ids) > 1,
            )
            choice = Choice(request, self._eos_token_ids)
            if self.token_decoder is not None and params.detokenize:
                choice.detokenizer = Detokenizer(self.token_decoder, params)
            self.scheduler.add(request)
            answer.choices.append(choice)
            self._delivery.choices[request] = (answer, choice)
            if needs.grammar is not None:
                request.grammar = needs.grammar.copy()
            if needs.asks.need_cpu:
                self._held.add(request)
        self._arrivals += 1
        self.pipeline.driver.tell_of_arrival(self.pipeline.last_loop)
        return answer

    def check(self, params: SamplingParams) -> None:
        """Refuse what this model cannot do for any prompt, and compile a grammar that ``params`` may hold.

        May be called from any thread at any time: what takes long is then done when ``add`` is called. Raises
        ``RequestError``.
        """
        self._intake.needs(params)

    def abort(self, answer: Answer) -> None:
        """End an answer now; its blocks and seats are free when this returns.

        Called from inside another call, as when Python's collector closes a dropped stream in the middle of a step, it
        takes effect when that call ends.
        """
        if os.getpid() != self._process:
            return
        self.doomed.append(answer)
        with self._lock:
            if not self._busy:
                self._end_doomed()

    def _end_doomed(self) -> None:
        while self.doomed:
            self._end(self.doomed.pop())

    def _end(self, answer: Answer) -> None:
        ended = self._delivery.end(answer)
        if ended:
            self.pipeline.driver.tell_of_ending(self.pipeline.last_loop, ended, "abort")

    @contextmanager
    def _exclusive(self, closing: bool = False) -> Iterator[None]:
        """One call at a time: other threads wait, and a call from inside another is refused."""
        if not closing:
            self._check_alive()  # before the lock, which in a forked process may be held for ever
        with self._lock:
            if not closing:
                self._check_alive()
            if self._busy:
                raise EngineError(
                    "the engine was called from inside one of its own calls (by a hook or a logits processor, say); "
                    "call it when that has returned"
                )
            self._busy = True
            try:
                self._end_doomed()
                yield
            finally:
                self._busy = False
                self._end_doomed()

    def interrupt(self) -> None:
        """Let a ``step`` that waits for a loop's tokens return soon, so that its thread can see to something else.

        From any thread, without waiting; the loop itself goes on.
        """
        if "pipeline" in self.__dict__:
            self.pipeline.driver.bell.ring()

    def has_work(self) -> bool:
        """Whether some request has not ended, or some step has not been read back."""
        return "pipeline" in self.__dict__ and bool(self._delivery.choices or self.pipeline.in_flight)

    def brisk(self) -> AbstractContextManager[None]:
        """Around the steps of one drive, so that other threads of the program do not keep the interpreter for long
        when the engine wants it back; each step does so by itself. See `interpreter`."""
        return switch_interval.of(BRISK) if self._shares_interpreter else nullcontext()

    def step(self, patient: bool = False, may_be_cut: Region = nullcontext) -> list[Answer]:
        """Launch what there is to launch, and hand out tokens: of the oldest step under way, or those of a running loop
        that have come since the last call, for which it waits for a moment if there are none.

        ``patient`` says that the caller does nothing with tokens before their answer has ended: then they are taken
        from a running loop many at a time, which saves the CPU work. ``may_be_cut`` is entered around what may last,
        and may raise there.

        Returns the answers that got tokens. Whatever a step raises, every request under way is aborted and the engine
        goes on, unless the device itself is lost or a loop failed: then all later calls raise ``EngineError``.
        """
        self._check_alive()
        with self._lock:
            under_way = () if self._busy else self.pipeline.in_flight
            head = under_way[0] if under_way else None
        with self.brisk():
            if isinstance(head, RunningLoop):
                with may_be_cut():  # and without the lock: others may add and abort meanwhile
                    self.pipeline.driver.await_news(head, patient)
            with self._exclusive():
                return self._step(may_be_cut)

    def _step(self, may_be_cut: Region) -> list[Answer]:
        touched: Touched = {}
        try:
            with may_be_cut():
                self._held &= self._delivery.choices.keys()
                self.pipeline.advance(touched, held=bool(self._held))
            return list(touched.values())
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """After a step that failed midway: nothing half made stays, neither here nor on the device."""
        self._failure = error  # stays where this, too, is cut short: then the engine has stopped
        self.pipeline.in_flight.clear()
        for answer in self._delivery.end_all():
            logger.error("request %s was aborted: a step failed with %r", answer.request_id, error)
        self.scheduler.abort_all()
        if isinstance(error, LoopError):
            return
        try:
            self.runner.loops.abandon()
            self.runner.resynchronize()
        except Exception as lost:
            self._failure = lost
        else:
            self._failure = None

    @contextmanager
    def step_by_step(self) -> Iterator[None]:
        """Inside, ``step`` makes one decode step at a time, as in graph mode, in an engine in loop mode too."""
        with self._exclusive():
            usual, self.pipeline.looping = self.pipeline.looping, False
            self.runner.loops.end()
        try:
            yield
        finally:
            self.pipeline.looping = usual

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Write ``(checkpoint name, tensor)`` pairs into the weights where they lie; returns how many there were.

        Recordings stay valid and serve the new weights at once; the prefix cache is emptied, since its keys and values
        come from the old ones. Answers under way go on with the new weights.
        """
        with self._exclusive():
            self.runner.loops.end()
            self.scheduler.pool.forget_cached()
            return update_weights(self.runner.model, tensors)

    def release_graphs(self) -> None:
        """Give back the memory of everything recorded; it is recorded again when next needed."""
        with self._exclusive():
            self.runner.release_graphs("release_graphs() was called")

    def recording(self) -> Recording:
        """What the engine has recorded: operation lists and address books, as plain data."""
        with self._exclusive():
            return self.runner.recording()

    def audit(self) -> dict[str, AuditReport]:
        """Compare every recorded address with the memory that there is now, for each variant of the step."""
        with self._exclusive():
            return self.runner.audit()

    def verify_graphs(self) -> int:
        """Compare every recording with an eager run, bit for bit, on random requests; returns how many there were.

        Raises ``VerificationError`` where one differs. Requests under way are not touched.
        """
        with self._exclusive():
            return self.runner.verify()

    def _notice_replaced_weights(self) -> None:
        """Where weights have become other tensors, or lie elsewhere: record again, and say so. Contents that were
        changed in place need nothing."""
        replaced = self.runner.replaced_weights()
        if not replaced:
            return
        which = replaced[0] if len(replaced) == 1 else f"{replaced[0]} and {len(replaced) - 1} more weights"
        logger.warning("%s lies elsewhere than recorded; recording again, and emptying the prefix cache", which)
        self.scheduler.pool.forget_cached()
        self.runner.record_again("a weight was replaced by another tensor")

    def close(self) -> None:
        """End every request and give back the KV cache, the recordings and the model."""
        if os.getpid() != self._process:
            self._lock = threading.RLock()  # the other may be held by a thread that this process does not have
        with self._exclusive(closing=True):
            self._close()

    def _close(self) -> None:
        self._delivery.end_all()
        self.scheduler.abort_all()
        self._finalizer.detach()
        if "runner" in self.__dict__:
            if os.getpid() != self._process:
                self.runner.loops.launched.clear()  # they run in the process that was forked, if at all
            elif self._failure is None:
                self.runner.loops.abandon()
                for launched in self.pipeline.in_flight:
                    if isinstance(launched, LaunchedStep):
                        launched.results()
            if not isinstance(self._failure, LoopError):  # a device that is lost, or busy for ever, gives nothing back
                self.runner.deallocate()
            del self.runner, self.pipeline
            if os.getpid() == self._process and self._failure is None:
                give_back_memory(self.limits.device)
        self._failure = self._failure or EngineError("it was closed")

    def stats(self) -> EngineStats:
        """What the engine has done since it was made. Raises ``EngineError`` where it was closed."""
        if "pipeline" not in self.__dict__:
            self._check_alive()
        return self.pipeline.clock.stats(
            self.launch_mode, self.runner, self.scheduler, self._delivery.tokens, self.pipeline.driver
        )

    def _check_alive(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(
                f"this engine was made in process {self._process} and is used in process {os.getpid()}: it cannot be "
                f"used after a fork; make it in the child, or start processes with the 'spawn' method"
            )
        if self._failure is not None:
            raise EngineError(
                f"the engine has stopped ({type(self._failure).__name__}: {self._failure}); make a new one"
            ) from self._failure


def _end_loops(loops: Loops, process: int) -> None:
    """End what an engine that is gone, or whose program ends, has left running."""
    if os.getpid() == process:
        with suppress(Exception):  # there is nobody left to tell
            loops.abandon()
