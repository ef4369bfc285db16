-- Tenora quota, layout 1 (the "q1" of every key): reserve | extend | settle | renew over all scopes at once.
--
-- KEYS  1: the reservation; then for each scope its bucket and its leases (one hash tag: one slot)
-- ARGV  operation, clock_ms ('' = the store's clock), member, lease_ms, amount in tokens, settle kind,
--       then for each scope requests_per_minute, tokens_per_minute, concurrent_requests (-1 = no limit)
--
-- A bucket holds at most one minute of its limit and refills continuously. One request or token is 60 000
-- units, so a limit of L a minute refills exactly L units a millisecond: no rounding, all integers < 2^53.
-- Settling may make a balance negative; it then takes that much longer to be positive again.
-- Replies are integers only (the same with and without decode_responses); -1 stands for "none".
local UNITS = 60000
local RESERVATION_MS = 3600000 -- renewed with the lease
local CLOSED_MS = 60000        -- how long a settled reservation is remembered, for late duplicates
local CONCURRENCY_RETRY_MS = 1000
local REQUESTS, TOKENS, CONCURRENT = 1, 2, 3

local operation, member, kind = ARGV[1], ARGV[3], ARGV[6]
local lease_ms, amount = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number) return string.format('%.0f', number) end

local function balance(limit, saved, elapsed)
  if limit < 0 then return nil end
  local full = limit * UNITS
  if not saved then return full end
  return math.min(full, saved + elapsed * limit)
end

local function load_scopes()
  local scopes = {}
  for i = 1, (#KEYS - 1) / 2 do
    local scope = { bucket = KEYS[2 * i], leases = KEYS[2 * i + 1], limits = {} }
    for meter = REQUESTS, CONCURRENT do scope.limits[meter] = tonumber(ARGV[6 + 3 * (i - 1) + meter]) end
    local saved = redis.call('HMGET', scope.bucket, 'at', 'requests', 'tokens')
    -- a clock that went back gives nothing; the bucket goes on from the new time
    local elapsed = math.max(0, now - (tonumber(saved[1]) or now))
    scope.balances = {
      balance(scope.limits[REQUESTS], tonumber(saved[2]), elapsed),
      balance(scope.limits[TOKENS], tonumber(saved[3]), elapsed),
    }
    scopes[i] = scope
  end
  return scopes
end

local function full_after_ms(scope, meter)
  local limit = scope.limits[meter]
  if limit <= 0 then return 0 end
  return math.ceil((limit * UNITS - scope.balances[meter]) / limit)
end

local function save(scope)
  local fields, ttl = { 'at', whole(now) }, UNITS
  for meter, name in ipairs({ 'requests', 'tokens' }) do
    if scope.limits[meter] >= 0 then
      fields[#fields + 1], fields[#fields + 2] = name, whole(scope.balances[meter])
      ttl = math.max(ttl, full_after_ms(scope, meter))
    end
  end
  if #fields == 2 then return end -- concurrency only: no bucket
  redis.call('DEL', scope.bucket)
  redis.call('HSET', scope.bucket, unpack(fields))
  redis.call('PEXPIRE', scope.bucket, whole(2 * ttl)) -- an absent bucket is a full one
end

local function take(scopes, requests, tokens)
  for _, scope in ipairs(scopes) do
    for meter, count in ipairs({ requests, tokens }) do
      local limit = scope.limits[meter]
      if limit >= 0 then
        scope.balances[meter] = math.min(limit * UNITS, scope.balances[meter] - count * UNITS)
      end
    end
    save(scope)
  end
end

local function hold_leases(scopes)
  for _, scope in ipairs(scopes) do
    if scope.limits[CONCURRENT] >= 0 then
      redis.call('ZADD', scope.leases, whole(now + lease_ms), member)
      redis.call('PEXPIRE', scope.leases, whole(2 * lease_ms))
    end
  end
end

-- The limit that makes the caller wait longest: { meter, scope number, retry_ms }, -1 = never; nil = all fit.
local function binding_refusal(scopes, requests, tokens)
  local worst
  local function refuse(meter, i, retry_ms)
    if not worst or retry_ms == -1 or (worst[3] ~= -1 and retry_ms > worst[3]) then worst = { meter, i, retry_ms } end
  end
  for i, scope in ipairs(scopes) do
    for meter, count in ipairs({ requests, tokens }) do
      local limit, needed = scope.limits[meter], count * UNITS
      if limit >= 0 and scope.balances[meter] < needed then
        refuse(meter, i, limit < count and -1 or math.ceil((needed - scope.balances[meter]) / limit))
      end
    end
    if requests > 0 and scope.limits[CONCURRENT] >= 0 then
      redis.call('ZREMRANGEBYSCORE', scope.leases, '-inf', whole(now))
      if redis.call('ZCARD', scope.leases) >= scope.limits[CONCURRENT] then
        refuse(CONCURRENT, i, scope.limits[CONCURRENT] == 0 and -1 or CONCURRENCY_RETRY_MS)
      end
    end
  end
  return worst
end

-- limit, remaining, ms until full: of the scope with the least left, for requests and then for tokens.
local function with_headroom(reply, scopes)
  for meter = REQUESTS, TOKENS do
    local limit, remaining, reset = -1, -1, -1
    for _, scope in ipairs(scopes) do
      if scope.limits[meter] >= 0 then
        local left = math.max(0, math.floor(scope.balances[meter] / UNITS))
        if limit < 0 or left < remaining then
          limit, remaining, reset = scope.limits[meter], left, full_after_ms(scope, meter)
        end
      end
    end
    reply[#reply + 1], reply[#reply + 2], reply[#reply + 3] = limit, remaining, reset
  end
  return reply
end

local state = redis.call('HGET', KEYS[1], 'state')
local reserved = tonumber(redis.call('HGET', KEYS[1], 'tokens')) or 0
local scopes = load_scopes()
local ADMITTED, REFUSED, CLOSED = 1, 0, -1

if operation == 'reserve' then
  if state == 'closed' then return { CLOSED } end
  if state == 'open' then return with_headroom({ ADMITTED, 0, 0, 0 }, scopes) end -- asked twice, taken once
  local refusal = binding_refusal(scopes, 1, amount)
  if refusal then return with_headroom({ REFUSED, unpack(refusal) }, scopes) end
  take(scopes, 1, amount)
  hold_leases(scopes)
  redis.call('HSET', KEYS[1], 'state', 'open', 'tokens', whole(amount))
  redis.call('PEXPIRE', KEYS[1], RESERVATION_MS)
  return with_headroom({ ADMITTED, 0, 0, 0 }, scopes)
elseif operation == 'extend' then
  if state == 'closed' or binding_refusal(scopes, 0, amount) then return { REFUSED } end
  take(scopes, 0, amount)
  if state then redis.call('HSET', KEYS[1], 'tokens', whole(reserved + amount)) end
  return { ADMITTED }
elseif operation == 'settle' then
  for _, scope in ipairs(scopes) do redis.call('ZREM', scope.leases, member) end
  if state == 'open' then
    local charged = amount
    if kind == 'void' then charged = 0 end
    if kind == 'at_least' then charged = math.max(reserved, amount) end
    take(scopes, kind == 'void' and -1 or 0, charged - reserved)
  end
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'state', 'closed')
  redis.call('PEXPIRE', KEYS[1], CLOSED_MS)
  return { state == 'open' and ADMITTED or CLOSED }
elseif operation == 'renew' then
  if state == 'closed' then return { CLOSED } end
  if state then redis.call('PEXPIRE', KEYS[1], RESERVATION_MS) end
  hold_leases(scopes)
  return { ADMITTED }
end
return redis.error_reply('unknown operation')
