package orders

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"outlog/node"
	"outlog/store"
)

// TestOnANode verifies again and again while a real node applies the events.
func TestOnANode(t *testing.T) {
	n, err := node.Open(t.Context(), node.Options{Dir: t.TempDir(), NoBroker: true, Migrations: []store.Migrations{Migrations()}})
	require.NoError(t, err)
	defer func() { require.NoError(t, n.Close()) }()
	n.Store().Register(Checks()...)
	for _, o := range Consumers() {
		require.NoError(t, n.Handle(o))
	}
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- n.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-stopped)
	}()

	verify := func() {
		results, err := n.Store().Verify(ctx)
		require.NoError(t, err)
		for _, r := range results {
			require.True(t, r.OK, "%s: %s", r.Name, r.Detail)
		}
	}
	service := New(n, nil)
	var last Receipt
	for i := range 40 {
		last, err = service.Place(ctx, "", book)
		require.NoError(t, err)
		if i%2 == 0 {
			last, err = service.Cancel(ctx, "", last.OrderID)
			require.NoError(t, err)
		}
		verify()
	}
	for _, name := range []string{Inventory, Notifications} {
		require.NoError(t, n.WaitApplied(ctx, name, last.Position))
	}
	v, err := service.Show(ctx, last.OrderID)
	require.NoError(t, err)
	for _, c := range v.Events[0].Consumers {
		require.Equal(t, "applied", c.State)
		require.NotNil(t, c.AppliedAt)
	}
	verify()

	server := httptest.NewServer(routes(service))
	defer server.Close()
	for range 20 { // read your writes
		last, err = service.Place(ctx, "", book)
		require.NoError(t, err)
		got := decode[View](t, send(t, http.MethodGet, server.URL+"/orders/"+last.OrderID+"?wait=20s", ""))
		require.Equal(t, []string{"applied", "applied"}, []string{got.Events[0].Consumers[0].State, got.Events[0].Consumers[1].State})
	}
	for _, bad := range []string{"soon", "-1s", "0s", "31s"} {
		requireProblem(t, send(t, http.MethodGet, server.URL+"/orders/"+last.OrderID+"?wait="+bad, ""), http.StatusBadRequest, "wait")
	}
	require.Equal(t, http.StatusNotFound, send(t, http.MethodGet, server.URL+"/orders/nothing?wait=1s", "").status)
}

func routes(s *Service) http.Handler {
	mux := http.NewServeMux()
	s.Routes(mux)
	return mux
}
