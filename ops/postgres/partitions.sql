-- The two large tables of the books in partitions by month: request_record (receipts) and ledger_entry (charges).
--
--   psql -f ops/postgres/partitions.sql        while nothing is served; again is harmless
--   SELECT tenora_add_month('2027-01-01');     for each month ahead, before it begins: a job for cron
--
-- A request's id is a UUIDv7, which begins with the time of its admission, so ids part the rows by month (UTC), and every
-- row of a request, whenever it is delivered, falls into the same partition: "each once for ever" needs no other index
-- than one that holds the id. What there was before, and months that nobody added, lie in the default partition.
-- The audit and reports read all partitions that are attached. An old month goes to a slower disk by
-- ALTER TABLE ledger_entry_2027_01 SET TABLESPACE …; one that no audit is to see again, by ALTER TABLE … DETACH PARTITION.

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

SELECT tenora_partition('request_record', 'request_id, attempt');
SELECT tenora_partition('ledger_entry', 'entry_id, request_id');

COMMIT;
