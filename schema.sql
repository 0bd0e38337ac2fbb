-- The whole schema of an outlog database, as a fresh one has it today.
--
-- This file is for reading. The migrations are what runs (store/migrations for
-- the core, examples/orders/migrations for the order service); schema_test.go
-- proves that both give the same tables, indexes, views and triggers.
--
-- Conventions: every table is STRICT and every state has a named CHECK. Columns
-- named _at are microseconds UTC since 1970. A position is a place in the log:
-- from 1, rising, gaps are normal and mean nothing. Trigger and view SQL keeps
-- to SQLite 3.37, because it also runs in the libraries of other programs that
-- write to the file.
--
-- Missing here, on purpose: the goose tables that remember which migrations
-- have run (outlog_migrations, orders_migrations), and SQLite's own.

------------------------------------------------------------------------------
-- The log (package outbox)
------------------------------------------------------------------------------

-- What the log knows about itself: one row.
CREATE TABLE outlog_meta (
    id INTEGER PRIMARY KEY CONSTRAINT outlog_meta_one_row CHECK (id = 1), -- 1
    log_id TEXT NOT NULL, -- names this log on a stream: 16 hexadecimal digits, made once
    pruned_through INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_meta_pruned CHECK (pruned_through >= 0), -- prune horizon: events up to this position may be gone; never falls
    pruned_created_at INTEGER NOT NULL DEFAULT 0, -- newest time in the ids of pruned events; an event with a supplied id that is older is refused, nobody could tell any more whether it was here before
    created_at INTEGER NOT NULL -- when the log was made
) STRICT;

INSERT INTO outlog_meta (id, log_id, created_at)
VALUES (1, lower(hex(randomblob(8))), CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER));

-- Where each aggregate stands. Kept for ever, also when its events are pruned:
-- otherwise its versions would start at 1 again. Only the triggers of outbox
-- write it.
CREATE TABLE outlog_aggregates (
    aggregate_type TEXT NOT NULL, -- for example order
    aggregate_id TEXT NOT NULL, -- the application's id of the entity
    version INTEGER NOT NULL CONSTRAINT outlog_aggregates_version CHECK (version >= 1), -- aggregate_version of its last event
    last_position INTEGER NOT NULL, -- position of its last event: where reading its history begins
    PRIMARY KEY (aggregate_type, aggregate_id)
) STRICT, WITHOUT ROWID;

-- The log: one row per event, written in the transaction that made it true.
--
-- What it does without, and why:
--   * A state column (pending, published, …). It would double the writes per
--     event. The relay keeps one cursor; what lies behind it is published, and
--     outbox_status shows that as a column.
--   * An index for finding pending events. They are the rows after the cursor,
--     and position is the rowid: the table is that index.
--   * An index on created_at. The age of the oldest pending event is the age of
--     the first row after the cursor: one row read.
--   * An index on the aggregate. Its key would be random, which costs most of
--     the insert rate once the table outgrows the cache. Each row carries the
--     position of its predecessor instead, and outlog_aggregates the last one:
--     a history of n events is n look-ups by rowid.
--   * A foreign key to the business row: the log outlives it.
-- TestQueryPlans holds us to this.
CREATE TABLE outbox (
    position INTEGER PRIMARY KEY AUTOINCREMENT, -- place in the log, and the rowid. SQLite has one writer at a time, so rows appear in this order and a cursor cannot skip one. AUTOINCREMENT: a position is never given out again, also after everything was pruned
    event_id TEXT NOT NULL CONSTRAINT outbox_event_id_unique UNIQUE CONSTRAINT outbox_event_id CHECK (length(event_id) = 26), -- ULID: what the event is known by outside this file. Its time orders nothing; it keeps this index dense
    aggregate_type TEXT NOT NULL CONSTRAINT outbox_aggregate_type CHECK (aggregate_type <> ''), -- kind of entity the event is about
    aggregate_id TEXT NOT NULL CONSTRAINT outbox_aggregate_id CHECK (aggregate_id <> ''), -- which one. Order is kept per aggregate
    aggregate_version INTEGER NOT NULL CONSTRAINT outbox_aggregate_version CHECK (aggregate_version >= 1), -- the aggregate's version after this event: from 1, without gaps
    previous_position INTEGER NOT NULL CONSTRAINT outbox_previous_position CHECK (previous_position >= 0), -- position of the aggregate's event before this one, 0 for its first
    type TEXT NOT NULL CONSTRAINT outbox_type CHECK (type <> ''), -- event type, past tense: OrderCreated
    schema_version INTEGER NOT NULL DEFAULT 1 CONSTRAINT outbox_schema_version CHECK (schema_version >= 1), -- version of the payload's schema, from 1
    content_type TEXT NOT NULL DEFAULT 'application/json', -- media type of payload
    payload BLOB NOT NULL, -- the event's body, byte for byte as it was appended
    headers TEXT NOT NULL DEFAULT '{}', -- JSON object of strings: correlation_id, causation_id, traceparent, the application's own
    created_at INTEGER NOT NULL CONSTRAINT outbox_created_at CHECK (created_at BETWEEN 0 AND 253402300799999999) -- when it was appended, by the writer's clock. Orders nothing
) STRICT;

-- Refuses an event that does not follow its aggregate's last one, whoever
-- writes it: order per aggregate rests on it. event_id has an index of its own
-- already; it is looked up here because INSERT OR REPLACE would delete the old
-- row without firing a delete trigger, and the event would change its place.
CREATE TRIGGER outbox_before_insert BEFORE INSERT ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outlog: this event_id is already in the log')
     WHERE EXISTS (SELECT 1 FROM outbox WHERE event_id = NEW.event_id);
    SELECT RAISE(ABORT, 'outlog: aggregate_version must be the aggregate''s last version + 1 and previous_position its last position')
     WHERE (NEW.aggregate_version - 1, NEW.previous_position) IS NOT
           (SELECT coalesce(max(version), 0), coalesce(max(last_position), 0) FROM outlog_aggregates
             WHERE aggregate_type = NEW.aggregate_type AND aggregate_id = NEW.aggregate_id);
END;

-- Refuses a position of the writer's own choice: at or below one given out
-- before, a cursor would never see it; far above, it would use up the numbers.
-- AFTER, because the rowid is not known earlier; SQLite raises sqlite_sequence
-- only after this, so it still holds the value before. Then notes where the
-- aggregate stands.
CREATE TRIGGER outbox_after_insert AFTER INSERT ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outlog: positions are given out by the log')
     WHERE EXISTS (SELECT 1 FROM outbox WHERE position > NEW.position)
        OR NEW.position <= (SELECT pruned_through FROM outlog_meta)
        OR NEW.position <= coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0)
        OR NEW.position > coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0) + 1000000;
    INSERT INTO outlog_aggregates (aggregate_type, aggregate_id, version, last_position)
    VALUES (NEW.aggregate_type, NEW.aggregate_id, NEW.aggregate_version, NEW.position)
    ON CONFLICT (aggregate_type, aggregate_id) DO UPDATE SET version = excluded.version, last_position = excluded.last_position;
END;

-- An event is a fact: what was published cannot be unsaid. To correct one,
-- append another.
CREATE TRIGGER outbox_no_update BEFORE UPDATE ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outlog: the log is append-only');
END;

-- Only pruning deletes, which raises pruned_through first.
CREATE TRIGGER outbox_no_delete BEFORE DELETE ON outbox
WHEN OLD.position > (SELECT pruned_through FROM outlog_meta)
BEGIN
    SELECT RAISE(ABORT, 'outlog: the log is append-only; prune removes old events');
END;

------------------------------------------------------------------------------
-- The relay (package relay)
------------------------------------------------------------------------------

-- What went onto the stream: one row per window of published events, not per
-- event. A window ends wherever an event was passed over, so that the sequence
-- of each event can be counted out. One that was parked and published later is a
-- window of its own, with a higher sequence than events after it.
CREATE TABLE outlog_publications (
    first_position INTEGER PRIMARY KEY, -- first event of the window
    last_position INTEGER NOT NULL, -- last event of the window
    first_stream_seq INTEGER NOT NULL, -- its first event's sequence on the stream
    last_stream_seq INTEGER NOT NULL, -- its last event's sequence
    published_at INTEGER NOT NULL, -- when the broker had acknowledged all of it
    CONSTRAINT outlog_publications_range CHECK (last_position >= first_position AND last_stream_seq >= first_stream_seq)
) STRICT;

-- Where the relay stands. Written once per window, only under the token.
CREATE TABLE outlog_relay (
    name TEXT NOT NULL PRIMARY KEY, -- main
    position INTEGER NOT NULL DEFAULT 0, -- cursor: all events up to here are published, parked, or skipped (discarded, or too old when the stream was rebuilt)
    event_id TEXT NOT NULL DEFAULT '', -- the last event published, usually the one at the cursor; with stream_seq it proves that the stream is still the one we wrote
    stream TEXT NOT NULL DEFAULT '', -- the stream's name
    stream_seq INTEGER NOT NULL DEFAULT 0, -- sequence of the last message published: the next one is appended only if the stream ends there
    token INTEGER NOT NULL DEFAULT 0 -- fencing token: each new owner of the database raises it once, and writes of an older one are refused
) STRICT, WITHOUT ROWID;

INSERT INTO outlog_relay (name) VALUES ('main');

------------------------------------------------------------------------------
-- The consumers (package consumer)
------------------------------------------------------------------------------

-- Where each consumer stands.
CREATE TABLE outlog_consumers (
    name TEXT NOT NULL PRIMARY KEY CONSTRAINT outlog_consumers_name CHECK (name <> '' AND name <> 'relay'), -- the consumer's name for ever; relay is taken (see outlog_parked)
    position INTEGER NOT NULL, -- cursor: all events up to here are applied or parked
    start_position INTEGER NOT NULL, -- where it began: events up to here are none of its business
    generation INTEGER NOT NULL DEFAULT 1, -- raised by each reset: a batch that began before it does not commit after it
    inbox_through INTEGER NOT NULL DEFAULT 0, -- its inbox rows of events up to here may be gone: they are below the cursor and not parked, which says as well that they are applied
    paused INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_paused CHECK (paused IN (0, 1)), -- 1: takes no new events
    types TEXT NOT NULL, -- event types it had routes for when it last ran; a new one needs a decision about the events behind the cursor
    on_dead TEXT NOT NULL DEFAULT 'block' CONSTRAINT outlog_consumers_on_dead CHECK (on_dead IN ('block', 'skip')), -- whether a dead event makes the later ones of its aggregate wait
    running INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_running CHECK (running IN (0, 1)), -- 1: it runs, or its last run did not end in order
    run_position INTEGER NOT NULL DEFAULT 0, -- the cursor when that run began
    unclean_exits INTEGER NOT NULL DEFAULT 0, -- runs that ended unclean in a row without moving the cursor; two make the next events suspects
    suspect TEXT NOT NULL DEFAULT '', -- event that is being handled alone, because it may have ended the process
    suspect_exits INTEGER NOT NULL DEFAULT 0, -- how often it was begun alone since it last ended well; after three it is dead
    appends INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_appends CHECK (appends IN (0, 1)), -- 1: its handlers append events, so a reset has to be forced
    created_at INTEGER NOT NULL, -- when it first ran
    updated_at INTEGER NOT NULL -- when this row last changed
) STRICT, WITHOUT ROWID;

-- Which events a consumer has applied: written in the transaction of the effect,
-- so both are there or neither. This is what makes an effect happen once. The
-- key starts with the consumer and ends with a rising id: inserts go to the end
-- of each consumer's range.
CREATE TABLE outlog_inbox (
    consumer TEXT NOT NULL, -- who applied it
    event_id TEXT NOT NULL, -- what
    position INTEGER NOT NULL, -- where it is in the log
    applied_at INTEGER NOT NULL, -- when
    PRIMARY KEY (consumer, event_id)
) STRICT, WITHOUT ROWID;

-- Events set aside: the failed ones and those that wait behind them, because
-- order per aggregate is kept. A consumer's cursor passes over a parked event;
-- this row is then what remembers it.
--
--   state     retrying   failed, and due again at next_attempt_at
--             running    its external effect is under way, or was when the process died
--             dead       failed for good: a person redrives or discards it
--             blocked    an earlier event of its aggregate is parked
--             delayed    waits for something other than time or a person: at the relay, for proof that it is the event the broker fails for, and not the broker
CREATE TABLE outlog_parked (
    consumer TEXT NOT NULL, -- who parked it; 'relay' for an event the broker refuses
    event_id TEXT NOT NULL, -- the event
    position INTEGER NOT NULL, -- its place in the log: parked events of an aggregate are released in this order
    aggregate_type TEXT NOT NULL, -- its aggregate, copied so that those behind it are found here
    aggregate_id TEXT NOT NULL, -- its aggregate
    state TEXT NOT NULL CONSTRAINT outlog_parked_state CHECK (state IN ('running', 'retrying', 'blocked', 'delayed', 'dead')), -- see above
    attempts INTEGER NOT NULL DEFAULT 0, -- attempts made so far; outages are not attempts
    next_attempt_at INTEGER, -- when it is due (retrying, delayed); says nothing in other states
    delay_us INTEGER NOT NULL DEFAULT 0, -- the delay that led to next_attempt_at: if that lies further ahead than this, the clock was set back, and it is due now
    last_error TEXT NOT NULL DEFAULT '', -- why the last attempt failed
    fingerprint TEXT NOT NULL DEFAULT '', -- the same for errors that differ only in numbers, ids and quoted text
    failed_at INTEGER NOT NULL DEFAULT 0, -- when the last attempt failed
    parked_at INTEGER NOT NULL, -- when it was set aside
    PRIMARY KEY (consumer, event_id)
) STRICT, WITHOUT ROWID;

-- What is due next.
CREATE INDEX outlog_parked_due ON outlog_parked (state, next_attempt_at);
-- Whether an event's aggregate has something parked before it, and what comes
-- after a released one. Parked rows are few, so a random key costs little here.
CREATE INDEX outlog_parked_aggregate ON outlog_parked (consumer, aggregate_type, aggregate_id, position);

-- The history of what failed: every failed attempt, and what became of a parked
-- event when a person or a reset took it away.
CREATE TABLE outlog_attempts (
    id INTEGER PRIMARY KEY, -- in the order it happened
    consumer TEXT NOT NULL, -- who
    event_id TEXT NOT NULL, -- what
    position INTEGER NOT NULL, -- where it is in the log
    attempt INTEGER NOT NULL, -- which attempt, from 1; for the other outcomes how many there had been
    outcome TEXT NOT NULL CONSTRAINT outlog_attempts_outcome CHECK (outcome IN ('failed', 'redriven', 'discarded', 'reset')), -- what happened
    error TEXT NOT NULL, -- the error, or the reason a person gave
    stack TEXT NOT NULL DEFAULT '', -- of a panic
    at INTEGER NOT NULL -- when
) STRICT;
-- The attempts of one event.
CREATE INDEX outlog_attempts_event ON outlog_attempts (consumer, event_id);

-- What other programs ask of the one that handles a consumer.
CREATE TABLE outlog_requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- in the order they were made; never given out twice
    consumer TEXT NOT NULL, -- of whom
    verb TEXT NOT NULL CONSTRAINT outlog_requests_verb CHECK (verb IN ('reset')), -- what
    argument TEXT NOT NULL, -- JSON
    requested_at INTEGER NOT NULL, -- when
    done_at INTEGER NOT NULL DEFAULT 0, -- when it was done or refused, 0 before
    error TEXT NOT NULL DEFAULT '' -- why it was refused
) STRICT;

-- Ranges that a reset to a later position left out, for verify to show; for
-- 'relay', what was too old for the stream when it was rebuilt.
CREATE TABLE outlog_skips (
    consumer TEXT NOT NULL, -- whose
    after_position INTEGER NOT NULL, -- the cursor before
    through_position INTEGER NOT NULL, -- and after
    skipped_at INTEGER NOT NULL, -- when
    PRIMARY KEY (consumer, after_position),
    CONSTRAINT outlog_skips_range CHECK (through_position > after_position)
) STRICT, WITHOUT ROWID;

------------------------------------------------------------------------------
-- Views
------------------------------------------------------------------------------

-- The log with what the relay did to each event: state is pending, published,
-- parked, dead or skipped (for consumers see outlog_inbox and outlog_parked), and
-- stream_seq its sequence on the stream, counted from the end of its window.
CREATE VIEW outbox_status AS
SELECT o.*,
       CASE WHEN k.state = 'dead' THEN 'dead'
            WHEN k.event_id IS NOT NULL THEN 'parked'
            WHEN p.first_position IS NOT NULL THEN 'published'
            WHEN o.position <= (SELECT position FROM outlog_relay WHERE name = 'main') THEN 'skipped'
            ELSE 'pending' END AS state,
       CASE WHEN k.event_id IS NULL THEN p.last_stream_seq -
            (SELECT count(*) FROM outbox later WHERE later.position > o.position AND later.position <= p.last_position) END AS stream_seq,
       CASE WHEN k.event_id IS NULL THEN p.published_at END AS published_at
  FROM outbox o
  LEFT JOIN outlog_publications p
    ON p.first_position = (SELECT max(q.first_position) FROM outlog_publications q WHERE q.first_position <= o.position)
   AND p.last_position >= o.position
  LEFT JOIN outlog_parked k ON k.consumer = 'relay' AND k.event_id = o.event_id;

-- For programs that append with plain SQL, in their own transaction:
--
--   INSERT INTO outbox_append (aggregate_type, aggregate_id, type, payload)
--   VALUES ('order', '42', 'OrderShipped', '{"carrier":"post"}');
CREATE VIEW outbox_append AS
SELECT event_id, aggregate_type, aggregate_id, type, schema_version, content_type, payload, headers FROM outbox;

-- Fills in what such a program need not know: the ULID (48 bits of time in ten
-- base-32 digits, then 16 random ones), the aggregate's next version, the time.
CREATE TRIGGER outbox_append_insert INSTEAD OF INSERT ON outbox_append
BEGIN
    INSERT INTO outbox (event_id, aggregate_type, aggregate_id, aggregate_version, previous_position, type,
                        schema_version, content_type, payload, headers, created_at)
    SELECT coalesce(NEW.event_id,
               substr(b32, 1 + ((ms >> 45) & 31), 1) || substr(b32, 1 + ((ms >> 40) & 31), 1) ||
               substr(b32, 1 + ((ms >> 35) & 31), 1) || substr(b32, 1 + ((ms >> 30) & 31), 1) ||
               substr(b32, 1 + ((ms >> 25) & 31), 1) || substr(b32, 1 + ((ms >> 20) & 31), 1) ||
               substr(b32, 1 + ((ms >> 15) & 31), 1) || substr(b32, 1 + ((ms >> 10) & 31), 1) ||
               substr(b32, 1 + ((ms >> 5) & 31), 1) || substr(b32, 1 + (ms & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1) ||
               substr(b32, 1 + (random() & 31), 1) || substr(b32, 1 + (random() & 31), 1)),
           NEW.aggregate_type, NEW.aggregate_id, version + 1, last_position, NEW.type,
           coalesce(NEW.schema_version, 1), coalesce(NEW.content_type, 'application/json'),
           CAST(NEW.payload AS BLOB), coalesce(NEW.headers, '{}'), ms * 1000
      FROM (SELECT '0123456789ABCDEFGHJKMNPQRSTVWXYZ' AS b32,
                   CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) AS ms,
                   coalesce(max(version), 0) AS version, coalesce(max(last_position), 0) AS last_position
              FROM outlog_aggregates
             WHERE aggregate_type = NEW.aggregate_type AND aggregate_id = NEW.aggregate_id);
END;

------------------------------------------------------------------------------
-- The order service (examples/orders)
------------------------------------------------------------------------------

-- What customers ordered. Ids are ULIDs, so that new rows go to the end of
-- every table that is keyed by them.
CREATE TABLE orders (
    id TEXT NOT NULL PRIMARY KEY CONSTRAINT orders_id CHECK (length(id) = 26), -- ULID
    customer_id TEXT NOT NULL CONSTRAINT orders_customer_id CHECK (customer_id <> ''), -- as the client names the customer
    status TEXT NOT NULL CONSTRAINT orders_status CHECK (status IN ('created', 'cancelled')), -- created at version 1, cancelled at 2
    version INTEGER NOT NULL CONSTRAINT orders_version CHECK (version >= 1), -- of the aggregate: how many events the order has
    total_cents INTEGER NOT NULL CONSTRAINT orders_total_cents CHECK (total_cents >= 0), -- sum of qty * unit_price_cents of its lines
    created_at INTEGER NOT NULL -- when it was placed
) STRICT, WITHOUT ROWID;

-- What is in each order. No foreign key to orders: each order writes both in
-- one transaction, verify compares them, and each line would cost a look-up.
CREATE TABLE order_lines (
    order_id TEXT NOT NULL, -- orders.id
    line_no INTEGER NOT NULL CONSTRAINT order_lines_line_no CHECK (line_no >= 1), -- from 1, in the order of the request
    sku TEXT NOT NULL CONSTRAINT order_lines_sku CHECK (sku <> ''), -- what; a SKU may be on several lines
    qty INTEGER NOT NULL CONSTRAINT order_lines_qty CHECK (qty >= 1), -- how many
    unit_price_cents INTEGER NOT NULL CONSTRAINT order_lines_unit_price_cents CHECK (unit_price_cents >= 0), -- price of one
    PRIMARY KEY (order_id, line_no)
) STRICT, WITHOUT ROWID;

-- Answers already given to requests with an Idempotency-Key. The key is the
-- client's and random: the only such index here, and only for those who ask.
CREATE TABLE idempotency_keys (
    key TEXT NOT NULL PRIMARY KEY CONSTRAINT idempotency_keys_key CHECK (key <> ''), -- as the client sent it
    request BLOB NOT NULL CONSTRAINT idempotency_keys_request CHECK (length(request) = 32), -- SHA-256 of what was asked: the same key for something else is refused
    order_id TEXT NOT NULL, -- the answer
    event_id TEXT NOT NULL, -- the answer
    position INTEGER NOT NULL, -- the answer
    created_at INTEGER NOT NULL -- when it was given
) STRICT, WITHOUT ROWID;

-- Stock per SKU; written by the consumer inventory. More reserved than on hand
-- is a backorder.
CREATE TABLE inventory (
    sku TEXT NOT NULL PRIMARY KEY CONSTRAINT inventory_sku CHECK (sku <> ''), -- the article; an unknown one appears with its first order
    on_hand INTEGER NOT NULL DEFAULT 0 CONSTRAINT inventory_on_hand CHECK (on_hand >= 0), -- in the warehouse; set by whoever counts it
    reserved INTEGER NOT NULL DEFAULT 0 CONSTRAINT inventory_reserved CHECK (reserved >= 0) -- sum of qty in reservations
) STRICT, WITHOUT ROWID;

-- What is reserved for each order that is not cancelled; written by the
-- consumer inventory.
CREATE TABLE reservations (
    order_id TEXT NOT NULL, -- orders.id
    sku TEXT NOT NULL, -- inventory.sku
    qty INTEGER NOT NULL CONSTRAINT reservations_qty CHECK (qty >= 1), -- sum over the order's lines with this SKU
    event_id TEXT NOT NULL, -- the OrderCreated that caused it
    PRIMARY KEY (order_id, sku)
) STRICT, WITHOUT ROWID;

-- What customers were told: one row per event; written by the consumer
-- notifications.
CREATE TABLE notifications (
    event_id TEXT NOT NULL PRIMARY KEY, -- the event it is about
    order_id TEXT NOT NULL, -- orders.id
    kind TEXT NOT NULL CONSTRAINT notifications_kind CHECK (kind IN ('order_created', 'order_cancelled')), -- which text
    recipient TEXT NOT NULL CONSTRAINT notifications_recipient CHECK (recipient <> ''), -- orders.customer_id
    body TEXT NOT NULL, -- the text
    sent_at INTEGER NOT NULL -- when it was written
) STRICT, WITHOUT ROWID;
