"""The scheduler: which tokens of which requests the next step computes. Pure Python over plain integers.

There is no prefill phase and no decode phase: a request has computed some of its tokens, and a step computes
some more, within a budget of tokens. A step is a transaction: `plan` chooses rows and reserves their blocks;
then either `commit` takes the sampled tokens in, or `rollback` gives back what holds no computed token.
"""

from bisect import insort
from collections.abc import Sequence

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.block_pool import BlockPool
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import FinishReason, Request, Rows, Sampled, Status, Step


def _seniority(request: Request) -> tuple[int, int]:
    return request.seniority


class Scheduler:
    """Queues and block tables. Both queues are ordered by seniority: priority, then arrival.

    Progress: the most senior running request is never preempted and has a row in every step, and what is
    waiting is admitted in order; so every request ends, whatever joins later with no higher priority.
    """

    def __init__(
        self,
        limits: Limits,
        tokens_per_block: int,
        pools: Sequence[BlockPool],
        policy: str = "max_utilization",
    ) -> None:
        assert limits.max_batch_size <= limits.max_num_tokens, limits
        self.limits = limits
        self.tokens_per_block = tokens_per_block
        self.pools = tuple(pools)  # one per KV group
        self.evicts = policy == "max_utilization"
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._arrivals = 0
        self._num_deadlines = 0  # of requests that are here
        self._budget = 0  # tokens that the step being planned may still have

    # -- requests come and go
    # ------------------------------------------------------------------------------------

    def check_fits(self, num_prompt: int, max_tokens: int) -> int:
        """The tokens that a request may put out: `max_tokens`, cut to the room that max_seq_len leaves.

        Raises InvalidArgument, with the numbers, for a request that could never run. Callable from any
        thread.
        """
        if not num_prompt:
            raise InvalidArgument("the prompt has no tokens; send at least one")
        room = self.limits.max_seq_len - num_prompt
        if room < 1:
            raise InvalidArgument(
                f"the prompt has {num_prompt} tokens; it may have at most {self.limits.max_seq_len - 1} "
                f"(max_seq_len {self.limits.max_seq_len} less one to put out)"
            )
        max_tokens = min(max_tokens, room)
        needed = self._full_need(num_prompt, max_tokens)
        there = min(pool.num_blocks for pool in self.pools)
        if needed > there:
            raise InvalidArgument(
                f"the request needs {needed} KV blocks of {self.tokens_per_block} tokens ({num_prompt} of prompt "
                f"+ {max_tokens} max_tokens), the pool has {there}; ask for fewer or enlarge the pool"
            )
        return max_tokens

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` has passed."""
        request.order = self._arrivals
        self._arrivals += 1
        self._num_deadlines += request.deadline is not None
        insort(self.waiting, request, key=_seniority)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
    ) -> None:
        """End a request between two steps, whatever it is doing, and free what it holds."""
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self._release(request, 0)
        self._num_deadlines -= request.deadline is not None
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error

    def expired(self, now: float) -> list[Request]:
        """Those whose deadline has passed."""
        if not self._num_deadlines:
            return []
        return [r for r in (*self.running, *self.waiting) if r.deadline is not None and r.deadline <= now]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # -- a step
    # --------------------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """Choose the next step's rows and reserve their blocks. Not empty if there is work.

        Rows that generate come first, so a long prompt that joins takes what they leave of the budget, chunk
        by chunk, and never stops them.
        """
        self._budget = self.limits.max_num_tokens
        rows = self._one_token_each()
        if rows is None:
            rows = {}
            for request in sorted(self.running, key=self._in_prompt):
                if request.status is Status.RUNNING and self._reserve(request, rows):
                    self._add_rows(request, rows)
        while self.waiting and self._admissible(self.waiting[0]):
            request = self.waiting.pop(0)
            request.status = Status.RUNNING
            request.block_tables = [[] for _ in self.pools]
            insort(self.running, request, key=_seniority)
            reserved = self._reserve(request, rows)
            assert reserved, "admission looked at the free blocks"
            self._add_rows(request, rows)
        assert rows or not self.has_work, "work, and no rows"
        return Step(tuple(rows.values()))

    def commit(self, step: Step, sampled: Sequence[Sampled | None]) -> None:
        """Take a step's result in: `sampled[i]` is for `step.rows[i]`, None where no logits were wanted."""
        for (request, start, count, num_logits), chosen in zip(step.rows, sampled, strict=True):
            assert start == request.num_computed, "a row is computed once"
            assert (chosen is not None) == bool(num_logits), "a token for each row of logits"
            request.num_computed += count
            if chosen is None:
                continue
            if chosen.error is not None:
                self.finish(request, FinishReason.ERROR, error=chosen.error)
                continue
            request.output_ids.append(chosen.token_id)
            if chosen.logprobs is not None:
                request.logprobs.append(chosen.logprobs)
            self._end(request)

    def rollback(self, step: Step) -> None:
        """Undo `plan` for a step that failed: its requests keep only the blocks that hold computed tokens."""
        for row in step.rows:
            self._release(row.request, self._blocks(row.request.num_computed))

    # -- the parts
    # -----------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def _full_need(self, num_prompt: int, max_tokens: int) -> int:
        return self._blocks(num_prompt + max_tokens - 1)  # the last token is never computed

    @staticmethod
    def _in_prompt(request: Request) -> bool:
        return request.num_tokens - request.num_computed > 1

    def _admissible(self, request: Request) -> bool:
        """Whether the first of the waiting may run now. Blocks for all the tokens that it has are taken at
        once: a prompt that is half computed when the pool runs out would have been computed for nothing.
        """
        if len(self.running) >= self.limits.max_batch_size or not self._budget:
            return False
        if self.evicts:
            return all(self._blocks(request.num_tokens) <= pool.num_free for pool in self.pools)
        promised = sum(self._full_need(len(r.prompt_ids), r.max_tokens) for r in [*self.running, request])
        return all(promised <= pool.num_blocks for pool in self.pools)

    def _one_token_each(self) -> dict[Request, Rows] | None:
        """The rows of all that is running if each request generates and there are blocks for that, which is
        so in most steps. Else None: that takes more thought, and comes to the same where this applies.
        """
        rows = {}
        for request in self.running:
            start = request.num_computed
            if start + 1 != len(request.prompt_ids) + len(request.output_ids):
                return None
            if start % self.tokens_per_block == 0:  # the token begins a block
                for pool, table in zip(self.pools, request.block_tables, strict=True):
                    if len(table) * self.tokens_per_block <= start:
                        if not pool.num_free:
                            return None
                        table += pool.allocate(1)
            rows[request] = Rows(request, start, 1, 1)
        self._budget -= len(rows)
        return rows

    def _add_rows(self, request: Request, rows: dict[Request, Rows]) -> None:
        start = request.num_computed
        count = min(self._budget, request.num_tokens - start)
        if count:
            self._budget -= count
            whole = start + count == request.num_tokens
            rows[request] = Rows(request, start, count, num_logits=1 if whole else 0)

    def _reserve(self, request: Request, rows: dict[Request, Rows]) -> bool:
        """Have blocks for all tokens of a running request, preempting the newest until they are there.

        False if the request was itself the newest.
        """
        needed = self._blocks(request.num_tokens)
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            while needed - len(table) > pool.num_free:
                victim = self.running[-1]
                if dropped := rows.pop(victim, None):
                    self._budget += dropped.count
                self._preempt(victim)
                if victim is request:
                    return False
            table += pool.allocate(max(0, needed - len(table)))
        return True

    def _preempt(self, request: Request) -> None:
        """Free what a request holds; it waits, and then computes prompt and output again, as one prompt.
        Nothing that it has put out is lost or put out again.
        """
        assert self.evicts, "guaranteed_no_evict promised blocks that are not there"
        assert len(self.running) > 1, "a request alone fits: check_fits"
        self.running.remove(request)
        self._release(request, 0)
        request.block_tables = []
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.num_preemptions += 1
        insort(self.waiting, request, key=_seniority)

    def _release(self, request: Request, keep: int) -> None:
        for g, table in enumerate(request.block_tables):
            self.pools[g].release(table[keep:])
            request.block_tables[g] = table[
                :keep
            ]  # a new list: whoever knows the old one sees that it is another

    def _end(self, request: Request) -> None:
        """End a request whose last token says so. Before min_tokens the sampler gives no end token."""
        output = request.output_ids
        if output[-1] in request.end_ids:
            self.finish(request, FinishReason.STOP, stop_reason=output[-1])
        elif len(output) >= request.max_tokens:
            self.finish(request, FinishReason.LENGTH)

    # -- invariants
    # ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """The invariants between two steps; AssertionError names the one that is broken."""
        assert len(self.running) <= self.limits.max_batch_size, "more requests than a step may have"
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            order = [r.seniority for r in queue]
            assert order == sorted(set(order)), f"{status.value} requests are not in order, or twice there"
            assert all(r.status is status for r in queue), f"a {status.value} request has another status"
        for r in self.waiting:
            assert not r.num_computed and not any(r.block_tables), f"{r.id} waits and holds blocks"
        for r in self.running:
            assert 0 <= r.num_computed < r.num_tokens, f"{r.id}: {r.num_computed} of {r.num_tokens} computed"
            assert r.num_tokens < len(r.prompt_ids) + r.max_tokens, f"{r.id} has all its tokens and runs on"
            for table in r.block_tables:
                low, high = self._blocks(r.num_computed), self._blocks(r.num_tokens)
                assert low <= len(table) <= high, f"{r.id}: {len(table)} blocks, not {low} to {high}"
        deadlines = sum(r.deadline is not None for r in (*self.running, *self.waiting))
        assert self._num_deadlines == deadlines, f"{self._num_deadlines} deadlines counted, not {deadlines}"
        for g, pool in enumerate(self.pools):
            pool.check_integrity(r.block_tables[g] for r in self.running)
