-- +goose Up

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

-- +goose Down
SELECT 'orders are not taken down';
