package orders

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"outlog/store"
)

// MaxKeyBytes is how long an idempotency key may be.
const MaxKeyBytes = 255

// once runs do in a transaction, unless key has been used before: the same
// request then gets the first receipt, another one ErrKeyReused. The key is
// written in do's transaction, and callbacks run one after the other, so of
// any number of requests at the same time one does the work. A request that
// fails does not use its key up.
func (s *Service) once(ctx context.Context, key string, request []byte, do func(tx *store.Tx) (Receipt, error)) (r Receipt, err error) {
	if err := checkKey(key); err != nil {
		return Receipt{}, err
	}
	err = s.n.Update(ctx, func(tx *store.Tx) (err error) {
		if key == "" {
			r, err = do(tx)
			return err
		}
		var known bool
		if r, known, err = answered(ctx, tx, key, request); err != nil || known {
			return err
		}
		if r, err = do(tx); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO idempotency_keys (key, request, order_id, event_id, position, created_at)
			VALUES (?, ?, ?, ?, ?, ?)`, key, request, r.OrderID, r.EventID, r.Position, tx.Now().UnixMicro())
		return err
	})
	if err != nil {
		return Receipt{}, err
	}
	return r, nil
}

// answered looks up the receipt given for key.
func answered(ctx context.Context, tx *store.Tx, key string, request []byte) (r Receipt, known bool, err error) {
	var first []byte
	err = tx.QueryRowContext(ctx, `SELECT request, order_id, event_id, position FROM idempotency_keys WHERE key = ?`, key).
		Scan(&first, &r.OrderID, &r.EventID, &r.Position)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Receipt{}, false, nil
	case err != nil:
		return Receipt{}, false, fmt.Errorf("look up idempotency key: %w", err)
	case !bytes.Equal(first, request):
		return Receipt{}, false, ErrKeyReused
	}
	return r, true, nil
}

// request is a digest of what is asked for, not of how it is written: white
// space and the order of members make no difference.
func (o Order) request() []byte { return digest("place", o) }

func digest(verb string, what any) []byte {
	b, err := json.Marshal([]any{verb, what})
	if err != nil {
		panic(err) // strings and integers
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

func checkKey(key string) error {
	switch {
	case len(key) > MaxKeyBytes:
		return refuse(keyHeader, fmt.Sprintf("has %d bytes, the limit is %d", len(key), MaxKeyBytes))
	case strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }):
		return refuse(keyHeader, "must be printable ASCII")
	}
	return nil
}
