-- +goose Up
CREATE TABLE outlog_meta (
    id INTEGER PRIMARY KEY CONSTRAINT outlog_meta_one_row CHECK (id = 1),
    log_id TEXT NOT NULL,
    pruned_through INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_meta_pruned CHECK (pruned_through >= 0),
    pruned_created_at INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL
) STRICT;

INSERT INTO outlog_meta (id, log_id, created_at)
VALUES (1, lower(hex(randomblob(8))), CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER));

CREATE TABLE outlog_aggregates (
    aggregate_type TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    version INTEGER NOT NULL CONSTRAINT outlog_aggregates_version CHECK (version >= 1),
    last_position INTEGER NOT NULL,
    PRIMARY KEY (aggregate_type, aggregate_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE outbox (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL CONSTRAINT outbox_event_id_unique UNIQUE CONSTRAINT outbox_event_id CHECK (length(event_id) = 26),
    aggregate_type TEXT NOT NULL CONSTRAINT outbox_aggregate_type CHECK (aggregate_type <> ''),
    aggregate_id TEXT NOT NULL CONSTRAINT outbox_aggregate_id CHECK (aggregate_id <> ''),
    aggregate_version INTEGER NOT NULL CONSTRAINT outbox_aggregate_version CHECK (aggregate_version >= 1),
    previous_position INTEGER NOT NULL CONSTRAINT outbox_previous_position CHECK (previous_position >= 0),
    type TEXT NOT NULL CONSTRAINT outbox_type CHECK (type <> ''),
    schema_version INTEGER NOT NULL DEFAULT 1 CONSTRAINT outbox_schema_version CHECK (schema_version >= 1),
    content_type TEXT NOT NULL DEFAULT 'application/json',
    payload BLOB NOT NULL,
    headers TEXT NOT NULL DEFAULT '{}',
    created_at INTEGER NOT NULL CONSTRAINT outbox_created_at CHECK (created_at BETWEEN 0 AND 253402300799999999)
) STRICT;

-- +goose StatementBegin
CREATE TRIGGER outbox_before_insert BEFORE INSERT ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outlog: this event_id is already in the log')
     WHERE EXISTS (SELECT 1 FROM outbox WHERE event_id = NEW.event_id);
    SELECT RAISE(ABORT, 'outlog: aggregate_version must be the aggregate''s last version + 1 and previous_position its last position')
     WHERE (NEW.aggregate_version - 1, NEW.previous_position) IS NOT
           (SELECT coalesce(max(version), 0), coalesce(max(last_position), 0) FROM outlog_aggregates
             WHERE aggregate_type = NEW.aggregate_type AND aggregate_id = NEW.aggregate_id);
END;
-- +goose StatementEnd

-- +goose StatementBegin
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
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER outbox_no_update BEFORE UPDATE ON outbox
BEGIN
    SELECT RAISE(ABORT, 'outlog: the log is append-only');
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER outbox_no_delete BEFORE DELETE ON outbox
WHEN OLD.position > (SELECT pruned_through FROM outlog_meta)
BEGIN
    SELECT RAISE(ABORT, 'outlog: the log is append-only; prune removes old events');
END;
-- +goose StatementEnd

CREATE TABLE outlog_publications (
    first_position INTEGER PRIMARY KEY,
    last_position INTEGER NOT NULL,
    first_stream_seq INTEGER NOT NULL,
    last_stream_seq INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    CONSTRAINT outlog_publications_range CHECK (last_position >= first_position AND last_stream_seq >= first_stream_seq)
) STRICT;

CREATE TABLE outlog_relay (
    name TEXT NOT NULL PRIMARY KEY,
    position INTEGER NOT NULL DEFAULT 0,
    event_id TEXT NOT NULL DEFAULT '',
    stream TEXT NOT NULL DEFAULT '',
    stream_seq INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

INSERT INTO outlog_relay (name) VALUES ('main');

CREATE TABLE outlog_consumers (
    name TEXT NOT NULL PRIMARY KEY CONSTRAINT outlog_consumers_name CHECK (name <> '' AND name <> 'relay'),
    position INTEGER NOT NULL,
    start_position INTEGER NOT NULL,
    generation INTEGER NOT NULL DEFAULT 1,
    inbox_through INTEGER NOT NULL DEFAULT 0,
    paused INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_paused CHECK (paused IN (0, 1)),
    types TEXT NOT NULL,
    on_dead TEXT NOT NULL DEFAULT 'block' CONSTRAINT outlog_consumers_on_dead CHECK (on_dead IN ('block', 'skip')),
    running INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_running CHECK (running IN (0, 1)),
    run_position INTEGER NOT NULL DEFAULT 0,
    unclean_exits INTEGER NOT NULL DEFAULT 0,
    suspect TEXT NOT NULL DEFAULT '',
    suspect_exits INTEGER NOT NULL DEFAULT 0,
    appends INTEGER NOT NULL DEFAULT 0 CONSTRAINT outlog_consumers_appends CHECK (appends IN (0, 1)),
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE outlog_inbox (
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    applied_at INTEGER NOT NULL,
    PRIMARY KEY (consumer, event_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE outlog_parked (
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    aggregate_type TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    state TEXT NOT NULL CONSTRAINT outlog_parked_state CHECK (state IN ('running', 'retrying', 'blocked', 'delayed', 'dead')),
    attempts INTEGER NOT NULL DEFAULT 0,
    next_attempt_at INTEGER,
    delay_us INTEGER NOT NULL DEFAULT 0,
    last_error TEXT NOT NULL DEFAULT '',
    fingerprint TEXT NOT NULL DEFAULT '',
    failed_at INTEGER NOT NULL DEFAULT 0,
    parked_at INTEGER NOT NULL,
    PRIMARY KEY (consumer, event_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX outlog_parked_due ON outlog_parked (state, next_attempt_at);
CREATE INDEX outlog_parked_aggregate ON outlog_parked (consumer, aggregate_type, aggregate_id, position);

CREATE TABLE outlog_attempts (
    id INTEGER PRIMARY KEY,
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL CONSTRAINT outlog_attempts_outcome CHECK (outcome IN ('failed', 'redriven', 'discarded', 'reset')),
    error TEXT NOT NULL,
    stack TEXT NOT NULL DEFAULT '',
    at INTEGER NOT NULL
) STRICT;

CREATE INDEX outlog_attempts_event ON outlog_attempts (consumer, event_id);

CREATE TABLE outlog_requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer TEXT NOT NULL,
    verb TEXT NOT NULL CONSTRAINT outlog_requests_verb CHECK (verb IN ('reset')),
    argument TEXT NOT NULL,
    requested_at INTEGER NOT NULL,
    done_at INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT ''
) STRICT;

CREATE TABLE outlog_skips (
    consumer TEXT NOT NULL,
    after_position INTEGER NOT NULL,
    through_position INTEGER NOT NULL,
    skipped_at INTEGER NOT NULL,
    PRIMARY KEY (consumer, after_position),
    CONSTRAINT outlog_skips_range CHECK (through_position > after_position)
) STRICT, WITHOUT ROWID;

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

CREATE VIEW outbox_append AS
SELECT event_id, aggregate_type, aggregate_id, type, schema_version, content_type, payload, headers FROM outbox;

-- +goose StatementBegin
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
-- +goose StatementEnd

-- +goose Down
SELECT 'the log is not taken down';
