"""The thread that owns the engines of all models: it alone steps them and runs anything else on the device."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from glasshouse.errors import InputError
from glasshouse.generation import Engine, SamplingParams
from glasshouse.serve.metrics import ModelMetrics
from glasshouse.serve.runtime.exchange import Job, Piece
from glasshouse.serve.runtime.fair_queue import FairQueue
from glasshouse.serve.schema.errors import never_begun, unavailable
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import Log

T = TypeVar("T")

MAX_FAILURES = 5  # steps that raise in a row, before an engine counts as broken


@dataclass(eq=False)
class Task:
    """Work on the device other than generation, with the future of its result."""

    key: str
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class Lane:
    """The jobs of one engine: waiting for a slot, and in the engine."""

    def __init__(self, engine: Engine, metrics: ModelMetrics, max_waiting: int, log: Log) -> None:
        self.engine, self.metrics, self._log = engine, metrics, log
        self.queue: FairQueue[Job] = FairQueue(max_waiting)
        self.active: list[Job] = []
        self.retries: deque[Job] = deque()  # after a step that raised, they run one at a time
        self.cancelled: list[Job] = []  # to end before the next step
        self.busy = False  # the engine has work, such as slots to release
        self.failures = 0  # steps that raised in a row

    @property
    def broken(self) -> bool:
        """Whether every step raises, as after an error of the device."""
        return self.failures >= MAX_FAILURES

    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return not self.broken and bool(self.busy or self.active or self.retries or len(self.queue))

    def admit(self) -> None:
        """End cancelled jobs, and hand others to the engine while it has slots; those behind them wait their turn."""
        for job in self.cancelled:
            self.engine.cancel(job.request)
        self.cancelled.clear()
        if self.retries:
            if not self.active:
                self._enqueue(self.retries.popleft())
            return
        while len(self.queue) and len(self.engine.slots.free) > self.engine.n_waiting:
            self._enqueue(self.queue.pop())

    def _enqueue(self, job: Job) -> None:
        self.engine.enqueue(job.request)
        self.active.append(job)

    def step(self) -> list[tuple[Job, Piece]]:
        """Run a step; return what is new for each job."""
        alone = len(self.active) == 1
        try:
            self.busy = self.engine.step()
            self.failures = 0
        except Exception as error:  # an out-of-memory too: one request must not fail the others
            self.failures += 1
            self.busy = self.engine.n_waiting > 0  # requests to drop; those that had a slot have left it
            self._log.error(f"a step of the engine raised {type(error).__name__}: {error}")
            if self.broken and self._answers():
                self.failures = 0  # so many bad requests in a row, but the engine is fine
            if self.broken:
                self._fail_all()
            elif not alone:
                self._retry()
        news = []
        for job in self.active:
            if job.first_token is None and job.request.ids:
                job.first_token = time.perf_counter()
            if (piece := self.piece(job)) is not None:
                news.append((job, piece))
        finished = [job for job in self.active if job.request.done]
        if finished:
            self.active = [job for job in self.active if not job.request.done]
            for job in finished:
                self.metrics.finished(job)
        return news

    def piece(self, job: Job) -> Piece | None:
        """Return what is new for a job; an error fails this one alone."""
        try:
            return job.take()
        except Exception as error:
            if not isinstance(error, InputError):
                self._log.exception(error)
            job.request.finish("cancelled")
            message = str(error) if isinstance(error, InputError) else "the answer could not be made; see the log."
            return Piece("", [], [], [], "error", message)

    def _retry(self) -> None:
        """Run the jobs of a step that raised again, one at a time: only the one that it was due to fails then."""
        for job in self.active:
            request = job.request
            self.engine.cancel(request)  # does nothing for those that had a slot, which have failed
            again = self.engine.make_request(request.source or request.prompt, request.options, namespace=job.key)
            job.retry(again)
        self.retries.extend(self.active)
        self.active = []

    def _answers(self) -> bool:
        """Whether the engine still generates a token."""
        try:
            probe = self.engine.submit_ids([0], SamplingParams(max_new_tokens=1))
            while not probe.done:
                self.engine.step()
        except Exception:
            return False
        return True

    def _fail_all(self) -> None:
        self.active += [*self.retries, *(self.queue.pop() for _ in range(len(self.queue)))]
        self.retries.clear()
        for job in self.active:
            job.request.fail("the engine has failed; restart the server.")


class Runner:
    """Steps the engines in turn, and hands what they generate to the event loop; jobs come in from there.

    It is started on an event loop. `max_waiting` bounds the jobs that wait, for each model and key, and so the tasks
    of each key.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        metrics: dict[str, ModelMetrics],
        max_waiting: int,
        candidates: int,  # that requests keep of each token
        log: Log,
    ) -> None:
        self._candidates, self._log = candidates, log
        self.lanes = {
            one.name: Lane(one.engine, metrics[one.name], max_waiting, log)
            for one in models
            if one.engine is not None
        }
        self.ready = False  # the engines are warmed up for their largest batches
        self._warm_ups: deque[Iterator[None]] = deque()  # of the other batches, for when there is nothing to do
        self.has_failed = False  # the thread ended by an error: only a new process helps
        self._tasks: FairQueue[Task] = FairQueue(max_waiting)
        self._condition = threading.Condition()  # guards the queues and what follows
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; on the event loop that waits for its output."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Cancel every job and stop the thread, after a running step."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def close(self) -> None:
        """Stop, and wait for the end of the thread."""
        self.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)

    @property
    def closed_reason(self) -> str:
        """Why no jobs are taken any more."""
        return "the engines have failed; restart the server." if self.has_failed else "the server is shutting down."

    def submit(self, name: str, jobs: Sequence[Job]) -> None:
        """Queue jobs for a model; raise ApiError if there are too many, or the engine cannot take them."""
        lane = self.lanes[name]
        with self._condition:
            if self._closed or lane.broken:
                raise unavailable(self.closed_reason if self._closed else "the engine has failed.")
            lane.queue.put([job for job in jobs if not job.request.done])
            self._condition.notify_all()
        for job in jobs:
            if job.request.done and (piece := job.take()) is not None:  # nothing to generate
                job.deliver(job.index, piece)

    def cancel(self, name: str, jobs: Sequence[Job]) -> bool:
        """End jobs, wherever they are; slots are free after the next step. Return whether all were still waiting."""
        lane = self.lanes[name]
        n_waiting = 0
        with self._condition:
            for job in jobs:
                if not lane.queue.remove(job):
                    lane.cancelled.append(job)
                else:
                    n_waiting += 1
                    job.request.finish("cancelled")
                    if (piece := job.take()) is not None:
                        job.deliver(job.index, piece)
        return n_waiting == len(jobs)

    async def call(self, work: Callable[[], T], key: str, end: float) -> T:
        """Run work between two steps, on behalf of a key, and return its result.

        Where it is not done at `end`, by the event loop's clock, raise TimeoutError, or ApiError if it only waited.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = Task(key, work, future)
        with self._condition:
            if self._closed:
                raise unavailable(self.closed_reason)
            self._tasks.put([task])
            self._condition.notify_all()
        try:
            async with asyncio.timeout_at(end):
                return await future
        except TimeoutError:
            with self._condition:
                if self._tasks.remove(task):
                    raise never_begun(self._tasks.seconds_until_empty()) from None
            raise  # what has begun runs to its end
        finally:
            with self._condition:
                self._tasks.remove(task)

    def _run(self) -> None:
        try:
            for lane in self.lanes.values():
                for temperature in (1.0, 0.0):
                    options = SamplingParams(temperature=temperature, candidates=self._candidates)
                    warm_up = lane.engine.warm_up_steps(options)
                    next(warm_up, None)  # the largest batch, with every kernel; the rest while there is nothing to do
                    self._warm_ups.append(warm_up)
            self.ready = True
            while self._turn():
                pass
        except BaseException as error:
            self.has_failed = True
            self._log.error(f"the thread of the engines ended by {type(error).__name__}: {error}")
            self._log.exception(error)
        finally:
            self.ready = False
            with self._condition:
                self._closed = True
                self._end_all()

    def _turn(self) -> bool:
        """Wait for work and do one round of it; return False once closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._tasks or self._working() or self._warm_ups)
            if self._closed:
                return False
            task = self._tasks.pop() if self._tasks else None
            working = self._working()
            for lane in working:
                lane.admit()
        if task is not None:
            self._do(task)
        elif not working and next(self._warm_ups[0], self) is self:  # captures one more batch size, or has no more
            self._warm_ups.popleft()
        news = [one for lane in working for one in lane.step()]
        if news:
            self._on_loop(_deliver, news)
        return True

    def _working(self) -> list[Lane]:
        return [lane for lane in self.lanes.values() if lane.has_work()]

    def _do(self, task: Task) -> None:
        try:
            result = task.work()
        except Exception as error:
            self._on_loop(_settle, task.future, None, error)
        else:
            self._on_loop(_settle, task.future, result, None)

    def _end_all(self) -> None:
        """Cancel what is left; called with the lock."""
        news = []
        for lane in self.lanes.values():
            jobs = [*lane.active, *lane.retries, *(lane.queue.pop() for _ in range(len(lane.queue)))]
            for job in jobs:
                job.request.finish("cancelled")
                news += [(job, piece)] if (piece := lane.piece(job)) is not None else []
            lane.engine.close()
            lane.active, lane.cancelled, lane.busy = [], [], False
        self._on_loop(_deliver, news)
        while self._tasks:
            self._on_loop(_settle, self._tasks.pop().future, None, unavailable(self.closed_reason))

    def _on_loop(self, work: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work, *args)


def _deliver(news: Sequence[tuple[Job, Piece]]) -> None:
    for job, piece in news:
        job.deliver(job.index, piece)


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
