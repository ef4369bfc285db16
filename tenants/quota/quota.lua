-- Tenora quota, layout 2 (the "q2" of every key): reserve | extend | settle | renew | book | open, over all scopes at
-- once, all or nothing.
--
-- KEYS  1 the reservation, 2 the holds of the tenant, 3 those of them that are booked;
--       then for each scope its bucket and its leases; then each spend window (one hash tag: one slot)
-- ARGV  1 operation, 2 clock_ms ('' = the store's clock), 3 member, 4 lease_ms, 5 amount in tokens, 6 kind,
--       7 picousd, 8 attempt, 9 number of scopes,
--       then for each scope requests_per_minute, tokens_per_minute, concurrent_requests (-1 = no limit),
--       then for each window its name, limit in picousd ('' = none; of `open`: the sum of the ledger), stamp of the
--       limit, end of its life in Unix ms; then, of `open`, the members that this sum has
--
-- A bucket holds at most one minute of its limit and refills continuously. One request or token is 60 000
-- units, so a limit of L a minute refills exactly L units a millisecond: no rounding, all integers < 2^53.
-- Settling may make a balance negative; it then takes that much longer to be positive again.
--
-- A window is the exact sum, in picousd, of what its scope has spent and may yet spend in one period: { n, stamp }.
-- An absent one, and one that is older than its limit, is not known: it refuses until `open` has made it anew from
-- the ledger and the holds. A hold is one request's part of its windows until its record is booked, and a while
-- longer: { amount, state, attempt, lease, booked, names }, money as decimal text.
-- Replies are integers only (the same with and without decode_responses); -1 stands for "none".
local UNITS = 60000
local RESERVATION_MS = 3600000 -- renewed with the lease
local CLOSED_MS = 60000        -- how long a settled reservation is remembered, for late duplicates
local BOOKED_MS = 60000        -- how long a booked hold is: longer than making a window anew takes
local HOLDS_MS = 40 * 86400000 -- longer than any period
local CONCURRENCY_RETRY_MS = 1000
local REQUESTS, TOKENS, CONCURRENT, SPEND = 1, 2, 3, 4
local ADMITTED, REFUSED, CLOSED, UNKNOWN = 1, 0, -1, -2

local operation, member, kind = ARGV[1], ARGV[3], ARGV[6]
local lease_ms, amount, picousd, attempt = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[7], tonumber(ARGV[8])
local num_scopes = tonumber(ARGV[9])
local now = tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number) return string.format('%.0f', number) end

-- ── rates ──────────────────────────────────────────────────────────────────────────────────────────────────────

local function balance(limit, saved, elapsed)
  if limit < 0 then return nil end
  local full = limit * UNITS
  if not saved then return full end
  return math.min(full, saved + elapsed * limit)
end

local function load_scopes()
  local scopes = {}
  for i = 1, num_scopes do
    local scope = { bucket = KEYS[2 + 2 * i], leases = KEYS[3 + 2 * i], limits = {} }
    for meter = REQUESTS, CONCURRENT do scope.limits[meter] = tonumber(ARGV[9 + 3 * (i - 1) + meter]) end
    local saved = redis.call('HMGET', scope.bucket, 'at', 'requests', 'tokens')
    scope.has_more = (saved[2] and scope.limits[REQUESTS] < 0) or (saved[3] and scope.limits[TOKENS] < 0)
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
  if scope.has_more then redis.call('DEL', scope.bucket) end -- a limit that is no more
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

-- ── money: { billions, rest } of picousd, 0 <= rest < 10^9, exact far beyond 2^53 ──────────────────────────────

local BASE = 1000000000

local function money(text) return { tonumber(string.sub(text, 1, -10)) or 0, tonumber(string.sub(text, -9)) } end

local function plus(a, b, sign)
  local rest = a[2] + sign * b[2]
  local carry = math.floor(rest / BASE)
  return { a[1] + sign * b[1] + carry, rest - carry * BASE }
end

local function is_less(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end

local function text_of(a)
  assert(a[1] >= 0, 'a window below zero')
  if a[1] == 0 then return whole(a[2]) end
  return whole(a[1]) .. string.format('%09.0f', a[2])
end

local ZERO = { 0, 0 }

-- ── spend ──────────────────────────────────────────────────────────────────────────────────────────────────────

local function told_windows()
  local windows, at = {}, 9 + 3 * num_scopes
  for i = 4 + 2 * num_scopes, #KEYS do
    windows[#windows + 1] =
      { key = KEYS[i], name = ARGV[at + 1], limit = ARGV[at + 2], stamp = ARGV[at + 3], until_ms = ARGV[at + 4] }
    at = at + 4
  end
  return windows, at
end

local sums = {} -- of windows that were loaded, by key

local function load_windows(windows)
  for _, window in ipairs(windows) do
    local saved = redis.call('HMGET', window.key, 'n', 'stamp')
    window.sum = saved[1] and money(saved[1])
    window.is_stale = not saved[2] or is_less(money(saved[2]), money(window.stamp))
    sums[window.key] = window.sum
  end
end

local function sum_of(key)
  if sums[key] then return sums[key] end
  local saved = redis.call('HGET', key, 'n')
  return saved and money(saved)
end

local function load_hold()
  local saved = redis.call('HGET', KEYS[2], member)
  return saved and cjson.decode(saved)
end

local function save_hold(hold)
  redis.call('HSET', KEYS[2], member, cjson.encode(hold))
  redis.call('PEXPIRE', KEYS[2], whole(HOLDS_MS))
end

local function new_hold(windows, state)
  local hold = { amount = '0', state = state, attempt = attempt, lease = whole(now + lease_ms), booked = '', names = {} }
  for i, window in ipairs(windows) do hold.names[i] = window.name end
  return hold
end

-- Moves the hold, and every window of it that is known, to another amount. They are those of its beginning, whatever
-- the caller's calendar says by now.
local function debit(hold, to)
  local from = money(hold.amount)
  for _, name in ipairs(hold.names) do
    local key = string.sub(KEYS[2], 1, -2) .. 's:' .. name
    local sum = sum_of(key)
    if sum then redis.call('HSET', key, 'n', text_of(plus(plus(sum, to, 1), from, -1))) end
  end
  hold.amount = text_of(to)
end

local function is_unknown(windows)
  for _, window in ipairs(windows) do
    if window.limit ~= '' and window.is_stale then return true end
  end
  return false
end

-- The number of the first window that can't hold `more`.
local function exhausted(windows, more)
  for i, window in ipairs(windows) do
    if window.limit ~= '' and is_less(money(window.limit), plus(window.sum, more, 1)) then return i end
  end
end

-- ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────

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

-- ── operations ─────────────────────────────────────────────────────────────────────────────────────────────────

local reservation = redis.call('HMGET', KEYS[1], 'state', 'tokens')
local state, reserved = reservation[1], tonumber(reservation[2]) or 0
local scopes = load_scopes()
local windows, last_argument = told_windows()
local run = {}

function run.reserve()
  if state == 'closed' then return { CLOSED } end
  if state == 'open' then return with_headroom({ ADMITTED, 0, 0, 0 }, scopes) end -- asked twice, taken once
  load_windows(windows)
  if is_unknown(windows) then return { UNKNOWN } end
  local spent_out = exhausted(windows, money(picousd))
  local refusal = spent_out and { SPEND, spent_out, -1 } or binding_refusal(scopes, 1, amount)
  if refusal then return with_headroom({ REFUSED, unpack(refusal) }, scopes) end
  take(scopes, 1, amount)
  hold_leases(scopes)
  if #windows > 0 then
    local hold = load_hold() or new_hold(windows, 'open')
    debit(hold, money(picousd))
    save_hold(hold)
  end
  redis.call('HSET', KEYS[1], 'state', 'open', 'tokens', whole(amount))
  redis.call('PEXPIRE', KEYS[1], RESERVATION_MS)
  return with_headroom({ ADMITTED, 0, 0, 0 }, scopes)
end

-- picousd: the hold's amount from then on.
function run.extend()
  if state == 'closed' then return { REFUSED } end
  local hold
  if #windows > 0 then
    load_windows(windows)
    if is_unknown(windows) then return { UNKNOWN } end
    hold = load_hold() or new_hold(windows, 'open')
    if exhausted(windows, plus(money(picousd), money(hold.amount), -1)) then return { REFUSED } end
  end
  if binding_refusal(scopes, 0, amount) then return { REFUSED } end
  take(scopes, 0, amount)
  if hold then
    debit(hold, money(picousd))
    save_hold(hold)
  end
  if state then redis.call('HSET', KEYS[1], 'tokens', whole(reserved + amount)) end
  return { ADMITTED }
end

local function settle_hold()
  local hold = load_hold()
  if not hold or hold.state == 'closed' then return end
  local held, price = money(hold.amount), money(picousd)
  hold.state, hold.attempt = 'closed', attempt
  if hold.booked ~= '' then return save_hold(hold) end -- the record knows better
  if kind == 'at_least' and is_less(price, held) then price = held end
  if kind ~= 'void' then
    debit(hold, price)
    return save_hold(hold)
  end
  debit(hold, ZERO)
  redis.call('HDEL', KEYS[2], member)
end

function run.settle()
  for _, scope in ipairs(scopes) do redis.call('ZREM', scope.leases, member) end
  if state == 'open' then
    local charged = amount
    if kind == 'void' then charged = 0 end
    if kind == 'at_least' then charged = math.max(reserved, amount) end
    take(scopes, kind == 'void' and -1 or 0, charged - reserved)
  end
  if #windows > 0 then settle_hold() end
  redis.call('HSET', KEYS[1], 'state', 'closed', 'tokens', '0')
  redis.call('PEXPIRE', KEYS[1], CLOSED_MS)
  return { state == 'open' and ADMITTED or CLOSED }
end

-- Of a running request (kind 'open') its leases; what the store has lost, or never heard of, it counts from now on.
-- One that has just ended (kind 'closed') only counts.
function run.renew()
  if state == 'closed' and kind ~= 'closed' then return { CLOSED } end
  if #windows > 0 then
    local hold = load_hold()
    if hold then
      hold.lease = whole(now + lease_ms)
    else
      hold = new_hold(windows, kind)
      debit(hold, money(picousd))
    end
    save_hold(hold)
  end
  if kind == 'closed' then return { ADMITTED } end
  if state then redis.call('PEXPIRE', KEYS[1], RESERVATION_MS) end
  hold_leases(scopes)
  return { ADMITTED }
end

-- The record of one attempt is in the ledger, at picousd: that is what the request has spent. A first attempt that
-- was lost says nothing of a request that goes on. Replies whether the ledger now has what the hold stands for.
function run.book()
  local hold, price = load_hold(), money(picousd)
  local is_free = not is_less(ZERO, price)
  if not hold then
    if is_free then return { ADMITTED } end
    hold = new_hold(windows, 'closed')
    hold.booked = ','
  end
  local mark = attempt .. ','
  if string.find(hold.booked, ',' .. mark, 1, true) then return { ADMITTED } end
  local goes_on = attempt < hold.attempt or (hold.state == 'open' and tonumber(hold.lease) > now)
  if hold.booked == '' and is_free and goes_on then return { REFUSED } end
  debit(hold, hold.booked == '' and price or plus(money(hold.amount), price, 1))
  hold.booked = (hold.booked == '' and ',' or hold.booked) .. mark
  save_hold(hold)
  redis.call('ZADD', KEYS[3], whole(now), member)
  redis.call('PEXPIRE', KEYS[3], whole(HOLDS_MS))
  local old = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', whole(now - BOOKED_MS), 'LIMIT', 0, 64)
  if #old > 0 then
    redis.call('HDEL', KEYS[2], unpack(old))
    redis.call('ZREM', KEYS[3], unpack(old))
  end
  return { ADMITTED }
end

-- Makes unknown windows: the ledger's sum and every hold that this sum lacks. `kind` is a mark among the holds, made
-- before anybody was asked for them: where it is gone, so may they be.
function run.open()
  if redis.call('HDEL', KEYS[2], '!' .. kind) == 0 then return { REFUSED } end
  local has = {}
  for i = last_argument + 1, #ARGV do has[ARGV[i]] = true end
  local missing = {}
  local saved = redis.call('HGETALL', KEYS[2])
  for i = 1, #saved, 2 do
    if not has[saved[i]] and string.sub(saved[i], 1, 1) ~= '!' then
      local hold = cjson.decode(saved[i + 1])
      for _, name in ipairs(hold.names) do missing[name] = plus(missing[name] or ZERO, money(hold.amount), 1) end
    end
  end
  load_windows(windows)
  for _, window in ipairs(windows) do
    if window.is_stale then
      local sum = plus(money(window.limit), missing[window.name] or ZERO, 1)
      redis.call('HSET', window.key, 'n', text_of(sum), 'stamp', window.stamp)
      redis.call('PEXPIREAT', window.key, window.until_ms)
    end
  end
  return { ADMITTED }
end

if not run[operation] then return redis.error_reply('unknown operation') end
return run[operation]()
