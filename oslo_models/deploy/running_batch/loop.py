"""The worker loop of the running batch, for the leader and the followers, from the first row to the last."""

from __future__ import annotations

import queue
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from oslo_models.deploy.errors import RanksDisagree
from oslo_models.deploy.messages import Failure, Reply, Request, Reused, Speculated, Stepped
from oslo_models.deploy.running_batch.draft_model import DraftModel
from oslo_models.deploy.running_batch.head_drafts import HeadDrafts
from oslo_models.deploy.running_batch.head_product import PackedHead
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.penalties import TokenTable
from oslo_models.deploy.running_batch.plain_settings import PlainSettings
from oslo_models.deploy.running_batch.plan_channel import PlanChannel
from oslo_models.deploy.running_batch.preparation import prepare
from oslo_models.deploy.running_batch.prompt_images import ImagesError, PromptImages
from oslo_models.deploy.running_batch.prompt_sounds import PromptSound, media_of_rows
from oslo_models.deploy.running_batch.row import Call, Row
from oslo_models.deploy.running_batch.row_adapters import ModelAdapters
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.sampling import choose_tokens
from oslo_models.deploy.running_batch.slot_groups import SlotGroups, limits_of_groups
from oslo_models.deploy.running_batch.speculation import Drafts, DraftSpeed, going_on
from oslo_models.deploy.running_batch.step import MOST_FORGOTTEN, Step
from oslo_models.deploy.serialization import portable
from oslo_models.distributed.stopping import OtherRankError
from oslo_models.pipeline.sharded_model import ShardedModel

CHANGING = frozenset(("adapters", "fuse", "unfuse"))
"""Methods that change the outputs of the model. They, and all later calls, wait until all rows have ended."""
UNCHANGING = frozenset(
    ("generate", "forward", "memory", "get_dtype", "reserve_batch", "batch_graphs", "reason_against_adapter_names")
)
"""Methods that keep cached keys and values valid."""
STEP_SECONDS = 0.5
"""CPU time limit for the processors of all rows in one step, such as grammars. Beyond it, the slowest calls end."""
GRACE = 3.0
"""Seconds that the followers get to end a step that failed on the leader. They may hang in a collective."""


class RunningBatch:
    """The batch of one rank.

    Every rank takes the same messages of the application in the same order. Between two steps, the leader takes
    messages and tells the followers how many it has taken. Calls that cannot join wait in a queue. They run one by one
    between two steps, on all ranks, while the rows keep their slots. `generate` gives way to the rows after each token,
    see `take_turn`. With several groups of slots, the leader publishes a step of each group before it computes the
    first one, see `slot_groups`.

    Args:
        stages: number of pipeline stages that compute at the same time, each for another group of slots. The channel
            must let the leader publish this many steps ahead.
        send: sends a message about a call to the application.
        cancelled: numbers of calls to end. Another thread changes it.
        count_token: is called after each step that generates tokens.
        draft_model: drafts tokens, on the leader; ``None`` for prompt lookup or heads.
    """

    def __init__(
        self,
        model: ShardedModel,
        limits: BatchLimits,
        channel: PlanChannel,
        leads: bool,
        send: Callable[[tuple[Any, ...], int], None],
        cancelled: set[int],
        count_token: Callable[[], None],
        stages: int = 1,
        draft_model: ShardedModel | None = None,
    ) -> None:
        # the last stage drafts the tokens of a step when it begins it, so the steps of groups would not overlap
        each = limits_of_groups(limits, 1 if limits.by_heads else stages)
        self._packed, self._adapters = PackedHead(), ModelAdapters(model)
        self.runners = [runner_of(model, own, True, self._packed, self._adapters) for own in each]
        drafts, speeds = HeadDrafts if limits.by_heads else Drafts, [DraftSpeed(time.perf_counter) for _ in each]
        self._drafts = [
            drafts(own.drafted, speed) if draft_model is None else DraftModel(draft_model, own, speed)
            for own, speed in zip(each, speeds, strict=True)
        ]
        self.channel, self.leads, self._slots = channel, leads, SlotGroups(each, self._drafts)
        self._model, self._send, self._cancelled, self._count_token = model, send, cancelled, count_token
        self._settings, self._token_table = PlainSettings(model), TokenTable()
        self._calls: dict[int, Call] = {}
        self._ahead: deque[Step] = deque()  # published, and not computed yet
        self._consumed = 0
        self._held: Request | None = None
        self._messages: Messages | None = None  # while the batch runs
        self._others: deque[Any] = deque()  # messages that cannot join
        self._joined: set[int] = set()  # on a follower: the calls that have joined
        self._images: dict[tuple[int, int], PromptImages | PromptSound] = {}  # of waiting prompts, by call and row
        self._forgotten: deque[int] = deque()  # calls whose images the followers may drop
        self._failed, self._skipped = False, 0  # on a follower: a step failed, and the steps skipped since

    def run(self, first: Request, messages: Messages) -> None:
        """Compute steps until no row is left, and no call that cannot join.

        Args:
            first: the call that begins the batch. It joins or gives way.
            messages: the later messages of the application.
        """
        self._messages, self._consumed = messages, 1
        try:
            if self.leads:
                self._lead(first, messages)
            else:
                self._joined, self._failed, self._skipped = set(), False, 0
                self._note(first)
                self._follow(messages)
                self._cancelled -= self._joined
        finally:
            self._messages = None

    def wants_turn(self) -> bool:
        """Return whether rows wait for a step, while a call that cannot join is computed. False on followers."""
        if not self.leads or self._messages is None:
            return False
        self._take_messages(self._messages)
        self._drop_cancelled()
        return not self._slots.is_idle

    def take_turn(self) -> None:
        """Compute one step of each group, between two tokens of a call that cannot join. A collective."""
        assert self._messages is not None
        if not self.leads:
            self._follow(self._messages)
            return
        self._publish_steps()
        while self._ahead:
            self._compute(self._ahead.popleft())
        self.channel.publish(Step(self._consumed, pause=True))

    def forget_prefixes(self) -> None:
        """Drop cached settings, adapters, former rows and CUDA graphs, on all ranks between the same two steps."""
        self._settings.forget()
        self._adapters.forget()
        for runner in self.runners:
            runner.rows.forget()
            runner.drop_graphs()
        self._slots.forget_prefixes()

    def reserve(self) -> int:
        """Allocate all caches and pack the head of a fused model. Return their bytes. A collective.

        Raises:
            MemoryError: there is too little memory.
        """
        drafting = [drafts for drafts in self._drafts if isinstance(drafts, DraftModel)]
        rows = sum(runner.reserve() for runner in self.runners) + sum(drafts.reserve() for drafts in drafting)
        return rows + self._packed.reserve(self._model)

    def describe_graphs(self) -> str:
        """Return the number of captured CUDA graphs, or why decoding is eager."""
        (reason, *_) = {runner.eager_reason for runner in self.runners}
        return reason or f"{sum(len(runner.static or ()) for runner in self.runners)} CUDA graphs"

    # The leader -------------------------------------------------------------------------------------------------------

    def _lead(self, first: Request, messages: Messages) -> None:
        self._take(first)
        while True:
            self._take_messages(messages)
            self._drop_cancelled()
            if self._others:
                while self._ahead:
                    self._compute(self._ahead.popleft())
                self.channel.publish(Step(self._consumed, other=True))
                messages.answer(self._others.popleft())
            self._publish_steps()
            if self._ahead:
                self._compute(self._ahead.popleft())
                continue
            if self._others:
                continue
            self.channel.publish(Step(self._consumed, idle=True))
            self._rest()
            held, self._held = self._held, None
            if held is not None:  # the followers take it as the first message after the batch
                messages.answer(held)
            return

    def _rest(self) -> None:
        self._images.clear()
        self._forgotten.clear()
        for runner in self.runners:
            runner.rest()

    def _publish_steps(self) -> None:
        """Publish the next step of each group."""
        for step in self._slots.plan(self._consumed, {step.group for step in self._ahead}):
            step.forgotten = [self._forgotten.popleft() for _ in range(min(MOST_FORGOTTEN, len(self._forgotten)))]
            self.channel.publish(step)
            self._ahead.append(step)

    def _take_messages(self, messages: Messages) -> None:
        """Take the received messages, up to one call with a grammar, because compiling grammars holds up the rows."""
        while self._held is None and (message := messages.poll()) is not None:
            if isinstance(message, Request) and message.method in CHANGING:
                self._held = message
                return
            self._consumed += 1
            self._take(message)
            if isinstance(message, Request) and getattr(message.kwargs.get("decoding"), "grammar", None) is not None:
                return

    def _take(self, message: Any) -> None:
        if isinstance(message, Request) and message.joins:
            self._add(message)
        else:
            self._others.append(message)

    def _add(self, request: Request) -> None:
        try:
            self._keep_images(request)
            if request.generation_config is not None:
                self._model.generation_config = request.generation_config
            call = prepare(self._model, request, self._settings, self._adapters)
        except Exception as error:  # noqa: BLE001  everything is reported
            self._fail(request.number, error)
            return
        self._calls[call.number] = call
        for row in call.rows:
            self._slots.add(row)

    def _drop_cancelled(self) -> None:
        if self._cancelled:
            for number in self._cancelled & self._calls.keys():
                self._forget(number)
                self._send(Reply(number), number)

    def _keep_images(self, request: Request) -> None:
        for images in media_of_rows(request.images, self._model.config):
            self._images[request.number, images.row] = images

    def _drop_images(self, number: int) -> bool:
        """Drop the images of a call. Return whether there were any.

        Published steps keep theirs: the other ranks compute these steps, too.
        """
        rows = [key for key in self._images if key[0] == number]
        published = {(step.number, step.row) for step in self._ahead if step.begins and step.encodes}
        for key in rows:
            if key not in published:
                del self._images[key]
        return bool(rows)

    def _run(self, step: Step) -> Tensor | None:
        """Compute a step on this rank. Give its prompt the images."""
        runner = self.runners[step.group]
        if step.begins and step.encodes:  # another row of the call may have no images
            runner.images = self._images.pop((step.number, step.row))
        return runner.run(step)

    def _forget(self, number: int) -> None:
        """Drop a call with its rows."""
        if self._drop_images(number):
            self._forgotten.append(number)
        self._calls.pop(number, None)
        self._slots.drop(lambda row: row.number == number)
        self._cancelled.discard(number)

    def _fail(self, number: int, error: BaseException) -> None:
        self._forget(number)
        secondary = isinstance(error, OtherRankError)
        text = "".join(traceback.format_exception(error))
        self._send(Failure(number, portable(error), text, secondary), number)

    def _compute(self, step: Step) -> None:
        begun = [step.number] if step.begins else [prompt.number for prompt in step.whole]
        calls = [self._calls[number] for number in begun if number in self._calls]
        streamed: list[tuple[int, Any]] = [
            (each.number, each.rows[0].host_ids_BL.tolist()) for each in calls if each.streams
        ]
        try:
            logits_BV = self._run(step)
        except ImagesError as error:
            if step.number in self._calls:  # another row of the call may have failed before
                self._fail(step.number, error.__cause__ or error)
            return
        except Exception as error:  # noqa: BLE001  everything is reported
            self._give_up(error)
            return
        rows = self._slots.rows(step)
        if step.reused:
            self._send(Reused(step.reused), 0)
        if logits_BV is not None:
            if step.drafts:
                self._take_drafted(rows, logits_BV, step.drafts, streamed)
            else:
                self._take_all(rows, logits_BV, streamed)
            self._count_token()
        self._finish({row.number for row in rows if row.ended}, streamed)

    def _take_drafted(
        self, rows: list[Row], logits_BLV: Tensor, drafts: list[list[int]], streamed: list[tuple[int, Any]]
    ) -> None:
        """Let each row take the drafted tokens that it would draw, and one more."""
        accepted, spent = -len(rows), 0.0
        for going, logits_BV in going_on(rows, logits_BLV, drafts):
            some = [rows[index] for index in going]
            self._take_all(some, logits_BV, streamed)
            accepted, spent = accepted + len(some), spent + sum(row.seconds for row in some)
            if spent > STEP_SECONDS:  # the other rows wait
                break
        self._send(Speculated(sum(map(len, drafts)), accepted), 0)

    def _take_all(self, rows: list[Row], logits_BV: Tensor, streamed: list[tuple[int, Any]]) -> None:
        """Let each row take its token. An exception ends only the call of its row."""
        tokens = choose_tokens(rows, logits_BV, self._token_table)
        for index, (row, chosen) in enumerate(zip(rows, tokens, strict=True)):
            if row.ended:  # dropped after the step was published
                continue
            try:
                if isinstance(chosen, Exception):
                    raise chosen
                value = row.take(logits_BV[index]) if chosen is None else row.take_token(chosen)
            except Exception as error:  # noqa: BLE001  everything is reported
                if row.number in self._calls:
                    self._fail(row.number, error)
                continue
            if row.number in self._calls and self._calls[row.number].streams:
                streamed.append((row.number, value))
        self._end_slowest(rows)

    def _end_slowest(self, rows: list[Row]) -> None:
        """End the calls with the slowest processors, if the step took more than `STEP_SECONDS` for them."""
        spent = sum(row.seconds for row in rows)
        for row in sorted(rows, key=lambda row: -row.seconds):
            if spent > STEP_SECONDS and row.number in self._calls and not row.ended:
                text = (
                    "the structured output or another setting of this call takes too much time per token; simplify it"
                )
                self._fail(row.number, ValueError(text))
            spent -= row.seconds

    def _finish(self, numbers: set[int], streamed: list[tuple[int, Any]]) -> None:
        """Send the tokens of the step, and the results of the calls that have ended."""
        ended = [self._calls[number] for number in numbers if number in self._calls and self._calls[number].ended]
        streamed += [(call.number, None) for call in ended if call.streams]
        if streamed:
            self._send(Stepped(streamed), 0)
        for call in ended:
            del self._calls[call.number]
            self._cancelled.discard(call.number)
            self._send(Reply(call.number, call.result()), call.number)

    def _give_up(self, error: Exception) -> None:
        """End all calls after a failed forward. Exit the process if the other ranks do not end the step."""
        for number in list(self._calls):
            self._fail(number, error)
        self._slots.clear()
        while self._ahead:  # the other stages compute them, or wait for this one
            step = self._ahead.popleft()
            self.runners[step.group].skip(step)
        self._clear()
        self.channel.publish(Step(self._consumed, reset=True))
        if not self.channel.settles(GRACE):
            raise RanksDisagree("a step of the running batch failed on one rank, and the others did not end it")

    # The followers ----------------------------------------------------------------------------------------------------

    def _follow(self, messages: Messages) -> None:
        """Compute steps until the batch is idle, or until the turn of the rows ends."""
        while True:
            step = self.channel.receive()
            while self._consumed < step.consumed:
                self._consumed += 1
                self._note(messages.wait())
            for number in step.forgotten:
                self._drop_images(number)
            if step.reset:
                self._failed, self._skipped = False, 0
                self._clear()
            if self._failed:  # the leader had published other steps before it could know
                if step.idle or step.other or step.pause or self._skipped >= len(self.runners) - 1:
                    raise RanksDisagree("a step of the running batch failed on this rank only")
                self.runners[step.group].skip(step)
                self._skipped += bool(step.shape[0] or step.encodes)
                continue
            if step.other:
                messages.answer(self._others.popleft())
                continue
            if step.idle:
                self._rest()
            if step.idle or step.pause:
                return
            try:
                self._run(step)
            except ImagesError:
                continue  # the leader ends the call
            except Exception as error:  # noqa: BLE001  everything is reported
                self._failed = True
                self._report(error)

    def _note(self, message: Any) -> None:
        """Note a message that the leader has taken. Of calls that join, followers need the images."""
        if isinstance(message, Request) and message.joins:
            self._joined.add(message.number)
            self._keep_images(message)
        else:
            self._others.append(message)

    def _report(self, error: Exception) -> None:
        """Report the failed calls to the application, which waits for the leader's answer for a while."""
        secondary, text = isinstance(error, OtherRankError), "".join(traceback.format_exception(error))
        for number in {number for runner in self.runners for number in runner.calls()}:
            self._send(Failure(number, portable(error), text, secondary), number)
        self._clear()

    def _clear(self) -> None:
        self._images.clear()
        self._forgotten.clear()
        for runner in self.runners:
            runner.clear()


class Inbox(Protocol):
    """The part of a queue that `Messages` needs."""

    def get_nowait(self) -> Any: ...

    def get(self) -> Any: ...


class Messages:
    """The messages of the application to the main thread of a worker.

    Args:
        inbox: the queue of messages that arrive while the batch runs.
        answer: runs a call that cannot join.
    """

    def __init__(self, inbox: Inbox, answer: Callable[[Any], None]) -> None:
        self._inbox, self.answer = inbox, answer

    def poll(self) -> Any:
        """Return the next message; ``None`` if none has arrived."""
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> Any:
        """Wait for the next message."""
        return self._inbox.get()
