-- The two large tables of the books in partitions by month: request_record (receipts) and ledger_entry (charges).
--
--   psql -f ops/postgres/partitions.sql        while nothing is served; again is harmless
--   SELECT tenora_add_month('2027-01-01');     for each month ahead, before it begins: a job for cron
--
-- A request's id is a UUIDv7, which begins with the time of its admission, so ids part the rows by month (UTC), and every
-- row of a request, whenever it is delivered, falls into the same partition: "each once for ever" needs no other index
-- than one that holds the id. What there was before, and months that nobody added, lie in the default partition.
-- The audit and reports read all partitions that are attached. An old month goes to a slower disk by
-- ALTER TABLE ledger_entry_2027_01 SET TABLESPACE …. One that nobody is to read again:
--
--   SELECT tenora_detach_month('2027-01-01');  its tables stay, apart from the books, to be kept elsewhere or dropped
--
-- That keeps the sums to which invoices, credit and later months are held, so that `tenora audit` goes on, and names the
-- month as not covered. It refuses a month that ended less than 200 days ago (journals and corrections may still ask for
-- it) or that is not wholly invoiced. (A plain DETACH PARTITION keeps nothing: the audit then finds invoices of nothing.)

BEGIN;

CREATE OR REPLACE FUNCTION tenora_partition(name text, keys text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  before text := name || '_before';
  found record;
  triggers text[];
BEGIN
  IF (SELECT relkind FROM pg_class WHERE oid = name::regclass) = 'p' THEN
    RETURN;
  END IF;
  SELECT array_agg(pg_get_triggerdef(oid)) INTO triggers FROM pg_trigger
    WHERE tgrelid = name::regclass AND NOT tgisinternal;
  FOR found IN SELECT tgname FROM pg_trigger WHERE tgrelid = name::regclass AND NOT tgisinternal LOOP
    EXECUTE format('DROP TRIGGER %I ON %I', found.tgname, name);
  END LOOP;
  EXECUTE format('ALTER TABLE %I RENAME TO %I', name, before);
  EXECUTE format(
    'CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS, UNIQUE (%s)) PARTITION BY RANGE (request_id)',
    name, before, keys);
  EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I DEFAULT', name, before);
  FOR found IN
    SELECT indexrelid::regclass AS index, pg_get_indexdef(indexrelid) AS definition
    FROM pg_index WHERE indrelid = before::regclass AND NOT indisunique
  LOOP
    EXECUTE format('ALTER INDEX %s RENAME TO %I', found.index, found.index || '_before');
    EXECUTE regexp_replace(found.definition, ' ON \S+ ', format(' ON %I ', name)); -- takes the old one as its part
  END LOOP;
  FOR number IN 1 .. cardinality(triggers) LOOP
    EXECUTE triggers[number];
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION tenora_first_id(moment timestamptz) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT substr(digits, 1, 8) || '-' || substr(digits, 9)
  FROM (SELECT lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0') AS digits) AS milliseconds
$$;

CREATE OR REPLACE FUNCTION tenora_add_month(day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  first timestamp := date_trunc('month', day);
  name text;
BEGIN
  FOREACH name IN ARRAY ARRAY['request_record', 'ledger_entry'] LOOP
    EXECUTE format(
      'CREATE TABLE IF NOT EXISTS %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
      name || to_char(first, '_YYYY_MM'), name,
      tenora_first_id(first AT TIME ZONE 'UTC'), tenora_first_id((first + interval '1 month') AT TIME ZONE 'UTC'));
  END LOOP;
END $$;

CREATE OR REPLACE FUNCTION tenora_detach_month(day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  first timestamp := date_trunc('month', day);
  this text := to_char(first, 'YYYY-MM');
  records text := 'request_record' || to_char(first, '_YYYY_MM');
  entries text := 'ledger_entry' || to_char(first, '_YYYY_MM');
  counts bigint[];
  missing bigint;
BEGIN
  IF EXISTS (SELECT FROM detached_month WHERE month = this) THEN
    RETURN;
  END IF;
  IF (first + interval '1 month 200 days') AT TIME ZONE 'UTC' > now() THEN
    RAISE EXCEPTION '% ended less than 200 days ago', this;
  END IF;
  EXECUTE format('LOCK TABLE %I, %I IN SHARE MODE', records, entries);
  EXECUTE format('SELECT ARRAY[(SELECT count(*) FROM %I), (SELECT count(*) FROM %I)]', records, entries) INTO counts;
  INSERT INTO detached_month VALUES (
    this, tenora_first_id(first AT TIME ZONE 'UTC'), tenora_first_id((first + interval '1 month') AT TIME ZONE 'UTC'),
    counts[1], counts[2], (extract(epoch FROM clock_timestamp()) * 1000000)::bigint * 1000);
  EXECUTE format(
    'SELECT count(*) FROM %I e WHERE NOT EXISTS (SELECT FROM invoice i WHERE i.tenant_id = e.tenant_id
       AND e.occurred_unix_ns >= i.start_unix_ns AND e.occurred_unix_ns < i.end_unix_ns)', entries) INTO missing;
  IF missing > 0 THEN
    RAISE EXCEPTION '% charges of % are of months that have no invoice yet', missing, this;
  END IF;
  EXECUTE format(
    'INSERT INTO detached_sum SELECT %L, ''charge'', i.invoice_id, e.model, e.base_model, e.flow_class, e.meter,
       e.rate_card_id, e.unit_price_picousd, sum(e.quantity), sum(e.amount_picousd)
     FROM %I e JOIN invoice i ON i.tenant_id = e.tenant_id
       AND e.occurred_unix_ns >= i.start_unix_ns AND e.occurred_unix_ns < i.end_unix_ns
     GROUP BY 3, 4, 5, 6, 7, 8, 9', this, entries);
  SELECT count(*) INTO missing FROM invoice i
    WHERE i.invoice_id IN (SELECT owner FROM detached_sum WHERE month = this AND kind = 'charge')
    AND (SELECT coalesce(sum(e.amount_picousd), 0) FROM ledger_entry e WHERE e.tenant_id = i.tenant_id
           AND e.occurred_unix_ns >= i.start_unix_ns AND e.occurred_unix_ns < i.end_unix_ns)
      + (SELECT coalesce(sum(s.amount_picousd), 0) FROM detached_sum s
           WHERE s.owner = i.invoice_id AND s.kind = 'charge' AND s.month <> this)
      <> (SELECT coalesce(sum(l.amount_picousd), 0) FROM invoice_line l
           WHERE (l.invoice_id = i.invoice_id AND l.kind = 'usage')
           OR (l.reference = i.invoice_id AND l.kind = 'correction'));
  IF missing > 0 THEN
    RAISE EXCEPTION 'charges that came late for % invoices of % stand on no invoice yet', missing, this;
  END IF;
  EXECUTE format(
    'INSERT INTO detached_sum SELECT %L, ''debit'', i.invoice_id, '''', '''', '''', '''', '''', 0, 0, sum(h.spent_picousd)
     FROM %I r JOIN wallet_hold h ON h.request_id = r.request_id AND h.attempt = r.attempt
       JOIN invoice i ON i.tenant_id = r.tenant_id
       AND r.finished_unix_ns >= i.start_unix_ns AND r.finished_unix_ns < i.end_unix_ns
     WHERE h.resolved_unix_ns IS NOT NULL GROUP BY i.invoice_id', this, records);
  EXECUTE format(
    'INSERT INTO detached_sum SELECT %L, ''written'', r.tenant_id, coalesce(v.sha256, r.adapter_version_id),
       r.base_model, '''', '''', '''', 0, max(r.prompt_tokens + r.output_tokens), 0
     FROM %I r LEFT JOIN adapter_version v ON v.adapter_version_id = r.adapter_version_id
     GROUP BY 3, 4, 5', this, records);
  EXECUTE format('ALTER TABLE request_record DETACH PARTITION %I', records);
  EXECUTE format('ALTER TABLE ledger_entry DETACH PARTITION %I', entries);
END $$;

SELECT tenora_partition('request_record', 'request_id, attempt');
SELECT tenora_partition('ledger_entry', 'entry_id, request_id');

COMMIT;
