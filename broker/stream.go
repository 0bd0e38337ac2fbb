package broker

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// minDuplicates is the smallest duplicate window the server allows. Messages
// carry no Nats-Msg-Id, so nothing is ever in it: an id would cost 124 bytes of
// memory and promise nothing after the window.
const minDuplicates = 100 * time.Millisecond

// streamPrefix begins the name of every log's stream.
const streamPrefix = "OUTLOG_"

// streamConfig is what the stream is made with. Nothing can delete a message
// from its middle; only its limits drop the oldest.
func (b *Broker) streamConfig() jetstream.StreamConfig {
	c := jetstream.StreamConfig{
		Name:        b.stream,
		Description: "outlog: the events of log " + b.opts.LogID,
		Subjects:    []string{subjectPrefix + ".>"},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardOld,
		MaxBytes:    b.opts.MaxBytes,
		MaxAge:      max(b.opts.MaxAge, 0),
		MaxMsgs:     -1,
		Replicas:    1,
		Duplicates:  minDuplicates,
		DenyDelete:  true,
	}
	return c
}

// info asks the server for the stream's state. Errors: jetstream.ErrStreamNotFound
// and whatever the connection says.
func (b *Broker) info(ctx context.Context, l *link) (*jetstream.StreamInfo, error) {
	s, err := l.js.Stream(ctx, b.stream)
	if err != nil {
		return nil, err
	}
	return s.CachedInfo(), nil
}

// adjust gives an existing stream the limits of the options, when they have
// changed since it was made.
func (b *Broker) adjust(ctx context.Context, l *link, have jetstream.StreamConfig) error {
	want := b.streamConfig()
	if have.MaxAge == want.MaxAge && have.MaxBytes == want.MaxBytes && have.DenyDelete {
		return nil
	}
	have.MaxAge, have.MaxBytes, have.DenyDelete = want.MaxAge, want.MaxBytes, true
	_, err := l.js.UpdateStream(ctx, have)
	return err
}

// recreate deletes the stream and makes an empty one whose next sequence is
// firstSeq. It returns false when that has to be done once more.
//
// A stream whose description was damaged is not found, and yet its directory is
// there: a new stream takes over its messages, or hides them below firstSeq, and
// keeps the damaged description, so that it is gone after the next restart. Only
// deleting a stream that exists clears the directory. So nothing counts until one
// was deleted; cleared remembers that from one try to the next.
func (b *Broker) recreate(ctx context.Context, l *link, firstSeq uint64, cleared *bool) (done bool, err error) {
	b.expected.Store(false)
	switch err := l.js.DeleteStream(ctx, b.stream); {
	case err == nil:
		*cleared = true
	case !errors.Is(err, jetstream.ErrStreamNotFound):
		return false, err
	}
	if err := b.deleteOtherLogs(ctx, l); err != nil {
		return false, err
	}
	config := b.streamConfig()
	config.FirstSeq = firstSeq
	if _, err := l.js.CreateStream(ctx, config); err != nil || !*cleared {
		return false, err
	}
	info, err := b.info(ctx, l)
	if err != nil {
		return false, err
	}
	if info.State.Msgs != 0 || info.State.LastSeq != firstSeq-1 {
		b.log.Warn("a new stream came up with old messages", "messages", info.State.Msgs, "last_seq", info.State.LastSeq)
		return false, nil
	}
	b.expected.Store(true)
	return true, nil
}

// deleteOtherLogs removes streams of other logs: the store belongs to one
// database, so they are what is left of an earlier one, and they would keep the
// subjects.
func (b *Broker) deleteOtherLogs(ctx context.Context, l *link) error {
	names := l.js.StreamNames(ctx)
	for name := range names.Name() {
		if name == b.stream || !strings.HasPrefix(name, streamPrefix) {
			continue
		}
		if err := l.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		b.log.Warn("the stream of another database was in the store and is deleted", "stream", name)
	}
	return names.Err()
}
