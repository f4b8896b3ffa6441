"""Store limit state in Redis for several gateways: one script with the arithmetic of `limits.py` and Redis's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.errors import installed_by
from workbench.gateway.limits.limits import BUCKETS, DAY, MICROS, SCALE, TOKENS, Cost, Holder, Remaining, Reservation

with installed_by("serve", "a gateway"):
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError

# Each holder is a hash: `at`, `day`, `spent`, a `level:` of each bucket, and a `lease:` of each call that runs. What is
# returned: granted, now, number of the limit that refused, number of the holder, wait, then limit, remaining and reset
# of each bucket, with a limit of 0 where there is none.
SCRIPT = f"""
local SCALE, DAY, BUCKETS = {SCALE}, {DAY}, {len(BUCKETS)}
local operation, lease, life, begun = ARGV[1], 'lease:' .. ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = tonumber(ARGV[5])
if now < 0 then local time = redis.call('TIME'); now = time[1] * 1000000 + time[2] end
local today = math.floor(now / DAY)
local function cost(b) return tonumber(ARGV[5 + b]) end  -- of each bucket, then of money
local function used(b) return tonumber(ARGV[6 + BUCKETS + b]) end
local function whole(number) return string.format('%.0f', number) end

local holders = {{}}
for h = 1, #KEYS do
  local first = 7 + 2 * BUCKETS + (h - 1) * (BUCKETS + 2)
  local it = {{key = KEYS[h], rates = {{}}, levels = {{}}, leases = {{}}, running = 0}}
  local state, fields = {{}}, redis.call('HGETALL', KEYS[h])
  for f = 1, #fields, 2 do
    if fields[f]:sub(1, 6) == 'lease:' then
      it.leases[fields[f]] = tonumber(fields[f + 1])
      if it.leases[fields[f]] > now and fields[f]:sub(-{len(TOKENS)}) ~= '{TOKENS}' then it.running = it.running + 1 end
    else state[fields[f]] = tonumber(fields[f + 1]) end
  end
  local at = state.at or 0
  local passed = math.min(2 * SCALE, math.max(0, now - at))
  for b = 1, BUCKETS do
    local rate = tonumber(ARGV[first + b])
    it.rates[b] = rate
    it.levels[b] = math.min(rate * SCALE, (state['level:' .. b] or rate * SCALE) + passed * rate)
  end
  it.most, it.budget = tonumber(ARGV[first + BUCKETS + 1]), tonumber(ARGV[first + BUCKETS + 2])
  it.at, it.day = math.max(at, now), math.max(state.day or 0, today)
  it.spent = (state.day or 0) >= today and state.spent or 0
  holders[h] = it
end

local function answer(granted, limit, h, wait)
  local found = {{granted, now, limit, h, wait}}
  for b = 1, BUCKETS do
    local best = {{0, 0, 0}}
    for _, it in ipairs(holders) do
      local rate, here = it.rates[b], it.levels[b]
      local left = math.max(0, math.floor(here / SCALE))
      if rate > 0 and (best[1] == 0 or left < best[2]) then
        best = {{rate, left, math.ceil((rate * SCALE - here) / rate)}}
      end
    end
    for i = 1, 3 do found[#found + 1] = best[i] end
  end
  return found
end

local function save(it)
  local fields = {{'at', whole(it.at), 'day', whole(it.day), 'spent', whole(it.spent)}}
  local last, expired = it.at, {{}}
  for b = 1, BUCKETS do
    if it.rates[b] > 0 then
      fields[#fields + 1] = 'level:' .. b
      fields[#fields + 1] = whole(it.levels[b])
    else expired[#expired + 1] = 'level:' .. b end
  end
  for name, expiry in pairs(it.leases) do
    if expiry > now then
      fields[#fields + 1] = name
      fields[#fields + 1] = whole(expiry)
      last = math.max(last, expiry)
    else expired[#expired + 1] = name end
  end
  if #expired > 0 then redis.call('HDEL', it.key, unpack(expired)) end
  redis.call('HSET', it.key, unpack(fields))
  redis.call('PEXPIRE', it.key, whole(math.ceil((last - now + 2 * DAY) / 1000)))
end

if operation == 'reserve' then
  local known = #holders > 0
  for _, it in ipairs(holders) do known = known and (it.leases[lease] or 0) > now end
  if known then return answer(1, 0, 0, 0) end
  for h, it in ipairs(holders) do
    for b = 1, BUCKETS do
      local rate = it.rates[b]
      local missing = cost(b) * SCALE - it.levels[b]
      if rate > 0 and missing > 0 then
        return answer(0, b, h, cost(b) > rate and -1 or math.ceil(missing / rate))
      end
    end
    local is_further = lease:sub(-{len(TOKENS)}) == '{TOKENS}'
    if it.most >= 0 and it.running >= it.most and not is_further then return answer(0, BUCKETS + 1, h, 0) end
    local micros = cost(BUCKETS + 1)
    if it.budget >= 0 and it.spent + micros > it.budget then
      return answer(0, BUCKETS + 2, h, micros > it.budget and -1 or DAY - now % DAY)
    end
  end
  for _, it in ipairs(holders) do
    for b = 1, BUCKETS do it.levels[b] = it.levels[b] - cost(b) * SCALE end
    it.leases[lease] = now + life
    it.spent = it.spent + cost(BUCKETS + 1)
    save(it)
  end
elseif operation == 'renew' then
  for _, it in ipairs(holders) do
    if (it.leases[lease] or 0) > now then
      it.leases[lease] = now + life
      save(it)
    end
  end
elseif operation == 'give_back' then
  for _, it in ipairs(holders) do
    local expiry = it.leases[lease]
    if expiry ~= nil then it.leases[lease] = 0 end
    if expiry ~= nil and expiry > now then
      for b = 1, BUCKETS do
        local full = it.rates[b] * SCALE
        it.levels[b] = math.max(-full, math.min(full, it.levels[b] + (cost(b) - used(b)) * SCALE))
      end
      if it.day == math.floor(begun / DAY) then
        it.spent = math.max(0, it.spent - cost(BUCKETS + 1) + used(BUCKETS + 1))
      end
      save(it)
    end
  end
end
return answer(1, 0, 0, 0)
"""
STORE_ERRORS = (RedisError, OSError, TimeoutError)  # errors of an unreachable Redis server
REFUSALS = ("", *BUCKETS, "requests_at_once", "money")


class RedisLimiter:
    """A store of limit state in a Redis server.

    Args:
        url: `redis://host:port/database`.
        prefix: prefix of its key names in Redis.
        connections: maximum number of open connections; further calls wait for one.
        timeout: seconds until a call fails with redis's ConnectionError or TimeoutError.
        clock: replaces Redis's clock, in microseconds since 1970.
    """

    def __init__(
        self,
        url: str,
        prefix: str = "workbench:limits:",
        connections: int = 16,
        timeout: float = 2.0,
        clock: Callable[[], int] | None = None,
    ):
        self._prefix, self._clock = prefix, clock
        self._client = connect(url, connections, timeout)
        self._script = self._client.register_script(SCRIPT)

    async def reserve(self, holders: Sequence[Holder], lease: str, cost: Cost, seconds: float) -> Reservation:
        found = await self._run("reserve", holders, lease, int(seconds * MICROS), 0, cost, Cost())
        granted, now, refused_by, number, wait = found[:5]
        name = holders[number - 1].name if number else ""
        return Reservation(bool(granted), now, REFUSALS[refused_by], name, wait, _remaining(found))

    async def give_back(self, holders: Sequence[Holder], lease: str, reserved: Cost, used: Cost, begun: int) -> None:
        await self._run("give_back", holders, lease, 0, begun, reserved, used)

    async def renew(self, holders: Sequence[Holder], lease: str, seconds: float) -> None:
        await self._run("renew", holders, lease, int(seconds * MICROS), 0, Cost(), Cost())

    async def remaining(self, holders: Sequence[Holder]) -> tuple[Remaining, ...]:
        return _remaining(await self._run("remaining", holders, "", 0, 0, Cost(), Cost()))

    async def close(self) -> None:
        await self._client.aclose()

    async def _run(
        self, operation: str, holders: Sequence[Holder], lease: str, life: int, begun: int, cost: Cost, used: Cost
    ) -> list[int]:
        now = -1 if self._clock is None else self._clock()
        arguments: list[Any] = [operation, lease, life, begun, now, *cost, *used]
        for holder in holders:
            limits = holder.limits
            arguments += [limits.rates.get(bucket, 0) for bucket in BUCKETS]
            arguments += [-1 if each is None else each for each in (limits.requests_at_once, limits.micros_per_day)]
        return await self._script(keys=[self._prefix + each.name for each in holders], args=arguments)


def connect(url: str, connections: int = 16, timeout: float = 2.0) -> Redis:
    """Return a Redis client that retries a broken connection once; calls wait for one of its `connections`."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
    )
    return Redis(connection_pool=pool)


def _remaining(found: Sequence[int]) -> tuple[Remaining, ...]:
    rows = zip(BUCKETS, found[5::3], found[6::3], found[7::3], strict=True)
    return tuple(Remaining(*row) for row in rows if row[1] > 0)
