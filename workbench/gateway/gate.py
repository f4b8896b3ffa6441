"""Admit calls to a server: keys, bounds, limits, moderation, router, response cache and accounting.

    identify: key -> caller
    admit:    bounds -> request limit -> router -> token limits -> moderation -> response cache -> lease
    lease:    pieces -> moderation -> pieces ... settle: accounting, unused reservation returned, response cached

The router runs between the two parts of the limits: calls over the request limit are not classified, and tokens are
counted and priced for the model that answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.economics.prices import Usage
from workbench.errors import WorkbenchError
from workbench.gateway.accounting import Accounts, PriceBook, account_entry
from workbench.gateway.answer_cache import AnswerCache, passes_by
from workbench.gateway.bounds import check_bounds, check_prompt_tokens, fit_output, prompt_texts
from workbench.gateway.config import GatewayConfig
from workbench.gateway.keys import ADMIN, EVERY_MODEL, ApiKey, KeyStore
from workbench.gateway.limits.headers import limit_headers, refusal
from workbench.gateway.limits.limits import MICROS, TOKENS, Cost, Holder, MemoryLimiter
from workbench.gateway.limits.limits_redis import STORE_ERRORS, RedisLimiter
from workbench.gateway.limits.meters import LimitMeters
from workbench.gateway.limits.reservations import ONE_REQUEST, Reservations
from workbench.gateway.moderation import AnswerFilter, CheckFailed, Moderation
from workbench.gateway.router import ModelRouter, RouterConfig
from workbench.gateway.routes import gateway_routes
from workbench.serve.answers.pieces import Piece
from workbench.serve.call import Call, Caller
from workbench.serve.errors import ApiError
from workbench.serve.gate import ModelCatalog, Outcome
from workbench.serve.watch.snapshot import Meter

LOG = logging.getLogger(__name__)
EVERY_CALLER = Caller(scopes=frozenset({EVERY_MODEL, ADMIN}))


class Gateway:
    """The gate of a server (see `workbench.serve.gate`).

    Raises:
        WorkbenchError: if a file, price table or user-defined part of `config` cannot be used.
    """

    def __init__(self, config: GatewayConfig | Mapping[str, Any]):
        self.config = config if isinstance(config, GatewayConfig) else GatewayConfig.from_values(config)
        limits, answers = self.config.limits, self.config.answers
        self.keys = None if self.config.keys is None else KeyStore(self.config.keys)
        self.limiter = MemoryLimiter() if limits.redis is None else RedisLimiter(limits.redis)
        self.reservations = Reservations(self.limiter, limits.lease_seconds)
        self.moderation = None if self.config.moderation is None else Moderation(self.config.moderation)
        self.router = ModelRouter(self.config.router or RouterConfig())
        self.answers = None if answers is None else AnswerCache(answers)
        self.prices = PriceBook(self.config.accounting)
        self.accounts = Accounts(self.config.accounting.file, LOG.error)
        self._models: ModelCatalog | None = None
        self._meters = LimitMeters(limits, self.prices.currency)

    def connect(self, models: ModelCatalog) -> None:
        if self.config.limits.has_money:  # a call without a price would never reach its spending limit
            self.prices.check_models(models.names())
        self._models = models

    async def close(self) -> None:
        await self.reservations.close()
        if self.answers is not None:
            await self.answers.close()
        await asyncio.to_thread(self.accounts.close)

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        if self.keys is None:
            return EVERY_CALLER
        kind, _, rest = headers.get("authorization", "").partition(" ")
        text = rest.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        key = self._looked_up(lambda keys: keys.check(text))
        if key is None:
            wrong = "the key is wrong, was revoked or has expired"
            message = wrong if text else "a key is needed: send `authorization: Bearer KEY`"
            raise ApiError("authentication_error", message, code="invalid_api_key")
        return self.keys.caller(key)

    async def renew(self, caller: Caller) -> Caller:
        if self.keys is None:
            return EVERY_CALLER
        key = self._looked_up(lambda keys: keys.active(caller.key))
        if key is None:
            message = f"the key {caller.key} was revoked or has expired since the batch was made"
            raise ApiError("authentication_error", message, code="invalid_api_key")
        return self.keys.caller(key)

    def _looked_up(self, look: Callable[[KeyStore], ApiKey | None]) -> ApiKey | None:
        """Look up a key; ApiError, without details for the caller, if the key file cannot be read."""
        assert self.keys is not None
        try:
            return look(self.keys)
        except (WorkbenchError, OSError) as error:
            LOG.error("keys cannot be checked, calls are refused: %s", error)
            message = "keys cannot be checked now; try again later"
            raise ApiError("unavailable_error", message, "", "keys_unavailable", {"retry-after": "5"}) from None

    async def admit(self, call: Call) -> GatewayLease:
        models = self._models
        assert models is not None, "connect the gateway to its models first"
        call = fit_output(call, self.config.bounds)
        check_bounds(call, self.config.bounds)
        self._check_accounts()
        lease = GatewayLease(self, call, call.model, self.config.limits.holders(call.caller))
        if self.moderation is not None and self.moderation.moderates("output") and call.purpose == "answer":
            lease.filter = self.moderation.answer_filter(call.num_choices)
        await self._reserve(lease, lease.id, ONE_REQUEST)  # refused calls are neither classified nor tokenized
        try:
            decision = await self.router.choose(call, models, lambda model: may_use(call.caller, model))
            lease.call = call = replace(call, model=decision.model)
            call.notes["router"] = decision.as_dict()
            # Token counting is free, and the server tokenizes once.
            lease.prompt_ids = prompt_ids = () if call.purpose == "tokenize" else await models.prompt_ids(call)
            num_tokens = sum(map(len, prompt_ids))
            check_prompt_tokens(call, num_tokens, self.config.bounds)
            lease.tokens = self._largest_cost(call, prompt_ids)
            if lease.counts_tokens:
                try:
                    await self._reserve(lease, lease.id + TOKENS, lease.tokens)
                except ApiError:
                    await self.give_back(lease, Cost())  # a refused call does not count against limits
                    raise
            await self._moderate(call)
            if self.answers is not None and call.purpose == "answer":
                lease.fingerprint = models.fingerprint(call.model, call.caller.tenant)
                why = "several variants of the model answer"
                if lease.fingerprint:
                    lease.answer, why = await self.answers.find(call, lease.fingerprint, prompt_ids)
                call.notes["answers"] = why
                lease.keeps = bool(lease.fingerprint) and lease.answer is None and not passes_by(call)
        except BaseException as error:  # also on a disconnect: return the reservation
            is_ours = (
                isinstance(error, ApiError) and error.status >= 500
            )  # it does not count against the caller's limits
            await self.give_back(lease, Cost() if is_ours else ONE_REQUEST)
            raise
        return lease

    def aliases(self) -> Collection[str]:
        return self.router.aliases

    def may_use(self, caller: Caller, model: str) -> bool:
        return may_use(caller, model)

    def signing_key(self) -> bytes:
        return b"" if self.keys is None else self.keys.signing_key()

    def routes(self) -> Iterable[object]:
        found = self.config.limits, self.limiter, self.accounts, self.prices.currency, self.keys
        return (gateway_routes(self.identify, *found),)

    def meters(self) -> Iterable[Meter]:
        return list(self._meters)

    async def give_back(self, lease: GatewayLease, used: Cost) -> None:
        """End the reservation of a lease and return its unused part. If Redis is unreachable, the reservation expires
        there.
        """
        if not lease.holders or lease.begun is None:
            return
        try:
            give_back, begun = self.reservations.give_back, lease.begun
            if lease.counts_tokens:
                await give_back(lease.holders, lease.id + TOKENS, lease.tokens, used._replace(requests=0), begun)
            await give_back(lease.holders, lease.id, ONE_REQUEST, Cost(used.requests), begun)
            self._meters.set_rates(lease.call.caller, await self.limiter.remaining(lease.holders))
        except STORE_ERRORS as error:
            lease.call.notes["limits"] = f"not given back: {error}"

    async def settle(self, lease: GatewayLease, outcome: Outcome) -> None:
        """Record a call in the accounts, return the unused part of its reservation, and cache its response if
        allowed.
        """
        call, prices = lease.call, self.prices.of(lease.call.model)
        entry = account_entry(call, lease.asked, outcome, prices, time.time())
        self.accounts.add(entry, prices)
        cost = self.prices.cost(call.model, entry.usage)
        self._meters.add_cost(call.caller, cost)
        micros = math.ceil(cost * MICROS)
        prompt, output = (0, 0) if entry.kept else (outcome.used.prompt_tokens, outcome.used.completion_tokens)
        await self.give_back(lease, Cost(1, prompt + output, prompt, output, micros))
        if self.answers is not None and self._models is not None and lease.keeps and outcome.ended == "finished":
            fingerprint = self._models.fingerprint(call.model, call.caller.tenant)
            if fingerprint == lease.fingerprint:  # otherwise the answering variant is unknown
                await self.answers.keep(call, fingerprint, lease.prompt_ids, lease.pieces)

    def _check_accounts(self) -> None:
        """Raise ApiError if too many accounting entries wait for a full or locked disk."""
        if self.accounts.num_unwritten >= self.config.accounting.max_unwritten:
            message = "calls cannot be accounted for now; try again later"
            raise ApiError("unavailable_error", message, "", "accounts_unavailable", {"retry-after": "5"})

    async def _reserve(self, lease: GatewayLease, name: str, cost: Cost) -> None:
        if not lease.holders:
            return
        limits, call = self.config.limits, lease.call
        try:
            found = await self.reservations.reserve(lease.holders, name, cost)
        except STORE_ERRORS as error:
            if limits.on_failure == "open":
                call.notes["limits"] = f"not counted: the store of limits cannot be reached ({error})"
                return
            LOG.error("limits: Redis cannot be reached, calls are refused: %s", error)
            message = "limits cannot be checked now; try again"
            raise ApiError("unavailable_error", message, "", "limits_unavailable", {"retry-after": "1"}) from None
        self._meters.set_rates(call.caller, found.remaining)
        if not found.granted:
            raise refusal(call.dialect, found)
        lease.begun = found.now
        lease.headers = limit_headers(call.dialect, found.remaining, found.now)

    def _largest_cost(self, call: Call, prompt_ids: Sequence[Sequence[int]]) -> Cost:
        """Return the maximum cost of a call's tokens: the prompt at its highest possible price, and answers that fill
        the rest of the context.
        """
        assert self._models is not None
        prompt_tokens, output = sum(map(len, prompt_ids)), 0
        if call.purpose == "answer":
            context, wanted = self._models.max_model_len(call.model), call.sampling.max_output_tokens
            longest = (min(wanted, max(0, context - len(ids))) for ids in prompt_ids)
            output = call.sampling.num_sequences * sum(longest)
        prices = self.prices.of(call.model)
        kinds = ["input", *(("cache_write_5m", "cache_write_1h") if call.breakpoints else ())]
        micros = 0
        if prices is not None:
            dearest = max(prices.token_price(kind) for kind in kinds if getattr(prices, kind) is not None)
            micros = math.ceil((prompt_tokens * dearest + prices.cost(Usage(output=output))) * MICROS)
        return Cost(0, prompt_tokens + output, prompt_tokens, output, micros)

    async def _moderate(self, call: Call) -> None:
        if self.moderation is None or not self.moderation.moderates("input") or call.purpose == "tokenize":
            return
        texts = [text for prompt in call.prompts for text in prompt_texts(prompt)]
        texts += [await self._decoded(call, each) for each in call.prompts if isinstance(each, tuple)]
        try:
            found = await self.moderation.find_in_prompt(texts)
        except CheckFailed as error:
            call.notes["moderation"] = f"input: {error}"
            message = "prompts cannot be moderated now; try again"
            raise ApiError("unavailable_error", message, "", "moderation_unavailable", {"retry-after": "1"}) from None
        if found:
            call.notes["moderation"] = f"input: {found}"
            message = f"the prompt was refused by the rule {found!r} of this server"
            raise ApiError("invalid_request_error", message, "", "content_filter")

    async def _decoded(self, call: Call, ids: Sequence[int]) -> str:
        assert self._models is not None
        text = await self._models.decode(call.model, ids)
        if text is None:
            message = "prompt: token ids of a model without a tokenizer cannot be moderated; send text to another model"
            raise ApiError("invalid_request_error", message, "prompt", "content_filter")
        return text


@dataclass(eq=False)
class GatewayLease:
    """A lease: the admission of one call by a gateway (see `workbench.serve.gate.Lease`)."""

    gateway: Gateway
    call: Call
    asked: str  # the requested model
    holders: tuple[Holder, ...]
    filter: AnswerFilter | None = None
    prompt_ids: Sequence[Sequence[int]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: tuple[Piece, ...] | None = None
    id: str = field(
        default_factory=lambda: secrets.token_hex(12)
    )  # name of the reservation: two calls may have the same id
    tokens: Cost = Cost()  # reserved cost, in addition to one request
    begun: int | None = None  # time of the reservation, if any
    keeps: bool = False
    fingerprint: str = ""
    pieces: list[Piece] = field(default_factory=list)  # sent pieces, if cached
    is_settled: bool = False

    @property
    def counts_tokens(self) -> bool:
        return any(each.limits.counts_tokens for each in self.holders)

    @property
    def is_moderated(self) -> bool:
        return self.filter is not None

    async def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        found = list(pieces) if self.filter is None else await self.filter.take(pieces)
        if self.filter is not None and self.filter.stopped_by:
            self.call.notes["moderation"] = f"output: {self.filter.stopped_by}"
        if self.keeps:
            self.pieces += found
        return found

    async def settle(self, outcome: Outcome) -> None:
        if self.is_settled:
            LOG.error("call %s was settled twice; the first time counts", self.call.id)
            return
        self.is_settled = True
        await self.gateway.settle(self, outcome)


def may_use(caller: Caller, model: str) -> bool:
    """Return whether a caller's scopes include a model."""
    return EVERY_MODEL in caller.scopes or f"model:{model}" in caller.scopes
