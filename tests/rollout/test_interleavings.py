"""Sessions, turns, aborts, lost replicas, moves, cancellations and waits in any order: nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ostinato_engines import (
    AsyncServerBase,
    Capabilities,
    EngineClosedError,
    EngineState,
    Health,
    PolicySpan,
    SamplingParams,
    StopReason,
    TokenOutput,
)
from ostinato_rollout import (
    AdmissionConfig,
    ChatSession,
    LLMServerClient,
    SessionBudget,
    SessionConfig,
    StickyLeastInFlight,
)
from ostinato_tokenization import ContinuousTokens, SanityCheckMode
from ostinato_tokenization.testing import tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()
TOKENS = ContinuousTokens(TOKENIZER)
END = TOKENIZER.token_id("<|im_end|>")
CONFIG = SessionConfig(tokenization_sanity_check_mode=SanityCheckMode.DISABLE)
MAX_SESSIONS = 1


class Call:
    """One generate inside of a replica, which ends when the test says so."""

    def __init__(self, prompt, params, request_id):
        self.prompt, self.params, self.request_id = prompt, params, request_id
        self.answer = asyncio.get_running_loop().create_future()


class Replica(AsyncServerBase):
    """Holds its calls; keeps prefixes, which it may forget; samples ids that say when they were sampled."""

    def __init__(self, version):
        self.policy_version = version
        self.calls = []
        self.prefixes = {}
        self.state = EngineState.READY

    def capabilities(self):
        return Capabilities(kv_capacity_sessions=MAX_SESSIONS)

    async def health(self):
        return Health(self.state, self.policy_version)

    async def generate(self, prompt_ids, sampling_params, request_id, media=()):
        if self.state is EngineState.FAILED:
            raise EngineClosedError("this replica is gone")
        call = Call(list(prompt_ids), sampling_params, request_id)
        self.calls.append(call)
        try:
            token_ids, reason = await call.answer
        finally:
            self.calls.remove(call)
        known = self.prefixes.get(request_id, [])
        cached = next((i for i, (a, b) in enumerate(zip(known, call.prompt, strict=False)) if a != b), 0)
        self.prefixes[request_id] = [*call.prompt, *token_ids]
        return TokenOutput(
            token_ids,
            [-float(token_id) for token_id in token_ids],
            reason,
            policy_versions=(PolicySpan(0, self.policy_version),),
            num_cached_tokens=cached,
        )

    async def chat_completion(self, raw_request):
        raise NotImplementedError

    async def release(self, request_id):
        self.prefixes.pop(request_id, None)


class Talk:
    """A session with what must be in its ledger."""

    def __init__(self, name, group, client):
        self.name, self.group = name, group
        budget = SessionBudget(max_prompt_tokens=100, max_response_tokens=300)
        self.session = ChatSession(
            client=client, tokens=TOKENS, config=CONFIG, budget=budget, request_id=name, group=group
        )
        self.recorded = []  # (id, version) of every token of the turns that have ended
        self.parts = []  # those of the turn under way
        self.arrival = None
        self.task = None


class Interleavings(RuleBasedStateMachine):
    """What may happen, in the order that hypothesis chooses; the event loop runs until nothing moves after each step."""

    talks = Bundle("talks")

    def __init__(self, make_loop):
        super().__init__()
        self.make_loop = make_loop

    @initialize(order=st.integers(0, 7), num_replicas=st.integers(1, 2))
    def start(self, order, num_replicas):
        self.loop = self.make_loop(order)
        self.pauses = mock.patch.multiple("ostinato_rollout.generating", _FIRST_PAUSE_S=0.0, _LONGEST_PAUSE_S=0.0)
        self.pauses.start()
        self.num_versions = self.num_talks = self.num_arrivals = 0
        self.replicas = [self.new_replica() for _ in range(num_replicas)]
        self.gone = []
        self.overbooked = False
        self.open = []
        self.client = LLMServerClient(
            self.replicas,
            policy=StickyLeastInFlight(1, 1),
            admission=AdmissionConfig(timeout_s=600),
        )

    def new_replica(self):
        self.num_versions += 1
        return Replica(self.num_versions)

    def settle(self):
        async def pause():
            for _ in range(30):
                await asyncio.sleep(0)

        self.loop.run_until_complete(pause())
        for talk in self.open:
            if talk.task is not None and talk.task.done():
                task, talk.task = talk.task, None
                error = None if task.cancelled() else task.exception()
                if not task.cancelled() and error is None and task.result():
                    talk.recorded += talk.parts
                talk.parts = []

    def calls(self):
        return [(replica, call) for replica in (*self.replicas, *self.gone) for call in replica.calls]

    @rule(target=talks, group=st.sampled_from([None, None, "g"]), text=st.text(max_size=6))
    def open_session(self, group, text):
        self.num_talks += 1
        talk = Talk(f"t{self.num_talks}", group, self.client)
        self.open.append(talk)
        self.overbooked = self.overbooked or group is not None
        self.begin_turn(talk, text, None)
        return talk

    @rule(talk=talks, text=st.text(max_size=6), seed=st.none() | st.integers(0, 9))
    def begin_turn(self, talk, text, seed):
        if talk.task is not None:
            return
        if talk.arrival is None:
            self.num_arrivals += 1
            talk.arrival = self.num_arrivals

        async def turn():
            if not talk.session.messages or talk.session.messages[-1]["role"] == "assistant":
                await talk.session.extend([{"role": "user", "content": text}])
            return (await talk.session.generate(SamplingParams(max_tokens=30, seed=seed))).num_tokens

        talk.task = self.loop.create_task(turn())
        self.settle()

    @precondition(lambda self: self.calls())
    @rule(
        data=st.data(), ids=st.lists(st.integers(0, 300), max_size=8), end=st.sampled_from(["stop", "abort", "raise"])
    )
    def answer(self, data, ids, end):
        replica, call = data.draw(st.sampled_from(self.calls()))
        talk = next(talk for talk in self.open if talk.name == call.request_id)
        if end == "raise":
            call.answer.set_exception(ValueError("this turn failed"))
            self.settle()
            return
        ids = [token_id for token_id in ids if token_id != END]
        ids = (ids if end == "abort" else [*ids, END])[: call.params.max_tokens]
        so_far = [token_id for token_id, _ in talk.parts]
        assert call.prompt == [*talk.session.ledger.token_ids, *so_far]
        assert call.params.max_tokens <= 30 - len(so_far)
        talk.parts += [(token_id, replica.policy_version) for token_id in ids]
        call.answer.set_result((ids, StopReason.STOP if end == "stop" else StopReason.ABORTED))
        self.settle()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), kind=st.sampled_from(["removed", "died"]))
    def lose_replica(self, data, kind):
        replica = data.draw(st.sampled_from(self.replicas))
        self.replicas.remove(replica)
        self.overbooked = True
        if kind == "died":
            replica.state = EngineState.FAILED
            for call in list(replica.calls):
                call.answer.set_exception(EngineClosedError("this replica is gone"))
            if not replica.calls:
                self.client.remove_server(replica)
        else:
            self.client.remove_server(replica)
            self.gone.append(replica)
        self.settle()

    @rule()
    def add_replica(self):
        replica = self.new_replica()
        self.replicas.append(replica)
        self.client.add_server(replica)
        self.settle()

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def forget_a_prefix(self, data):
        replica = data.draw(st.sampled_from(self.replicas))
        if replica.prefixes:
            del replica.prefixes[data.draw(st.sampled_from(sorted(replica.prefixes)))]

    @rule(talk=talks)
    def cancel(self, talk):
        if talk.task is not None:
            talk.task.cancel()
            self.settle()

    @rule(talk=consumes(talks))
    def close(self, talk):
        self.loop.run_until_complete(talk.session.close())
        self.settle()
        assert talk.task is None
        self.check_record(talk)
        self.open.remove(talk)

    def check_record(self, talk):
        recorded = []
        for ledger in talk.session.segments:
            spans = [*ledger.policy_versions, (len(ledger.response_ids), None)]
            versions = [v for (start, v), (end, _) in pairwise(spans) for _ in range(start, end)]
            assert len(versions) == len(ledger.response_ids) or not versions
            for place, (token_id, bit) in enumerate(zip(ledger.response_ids, ledger.response_mask, strict=True)):
                assert ledger.response_logprobs[place] == (-token_id if bit else 0)
                if bit:
                    recorded.append((token_id, versions[place]))
            assert len(ledger.response_ids) <= 300
        assert recorded == talk.recorded

    @invariant()
    def every_counter_is_the_number_of_calls(self):
        if not hasattr(self, "client"):
            return
        counts = sorted(self.client.num_in_flight.values())
        assert counts == sorted(len(replica.calls) for replica in self.replicas if self.in_service(replica))

    def in_service(self, replica):
        return replica in self.client._placement.servers.values()

    @invariant()
    def ledgers_hold_every_sampled_token_once(self):
        for talk in getattr(self, "open", []):
            self.check_record(talk)

    @invariant()
    def nobody_overtakes_and_nobody_waits_beside_a_free_place(self):
        if not hasattr(self, "client"):
            return
        seen = self.client.activity()
        waiting = {one.request_id for one in seen.conversations if one.place_in_queue}
        placed = {one.request_id for one in seen.conversations} - waiting
        groups = {talk.group for talk in self.open if talk.name in placed}
        for talk in self.open:
            if talk.name in waiting:
                assert talk.group is None or talk.group not in groups
        if waiting:
            assert all(replica.num_sessions >= MAX_SESSIONS for replica in seen.replicas)
        if not self.overbooked:
            assert all(replica.num_sessions <= MAX_SESSIONS for replica in seen.replicas)
            arrivals = {talk.name: talk.arrival for talk in self.open}
            first = min((arrivals[name] for name in waiting), default=None)
            assert first is None or all(arrivals[name] < first or self.came_back(name) for name in placed)

    def came_back(self, name):
        return next(talk for talk in self.open if talk.name == name).session.metrics.num_generations > 0

    def teardown(self):
        if not hasattr(self, "client"):
            return
        for talk in list(self.open):
            self.close(talk)
        seen = self.client.activity()
        assert seen.conversations == []
        assert all(not (one.num_in_flight or one.num_sessions or one.held_tokens) for one in seen.replicas)
        assert all(not replica.calls for replica in (*self.replicas, *self.gone))
        assert not asyncio.all_tasks(self.loop)
        self.pauses.stop()
        self.loop.close()


def test_interleavings(repeatable_loop):
    """In any order of turns, aborts, losses and waits, ledgers hold every sampled token once and nothing is left."""
    chosen = settings(max_examples=150, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(lambda: Interleavings(repeatable_loop), settings=chosen)
