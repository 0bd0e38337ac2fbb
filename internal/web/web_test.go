package web

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func ok(w http.ResponseWriter, _ *http.Request) { JSON(w, http.StatusOK, "ok") }

// do sends a real request to a server with handler.
func do(t *testing.T, handler http.Handler, method, path, host string, header http.Header) (*http.Response, string) {
	srv := httptest.NewServer(handler)
	defer srv.Close()
	r, err := http.NewRequestWithContext(t.Context(), method, srv.URL+path, nil)
	require.NoError(t, err)
	r.Host = host
	if header != nil {
		r.Header = header
	}
	client := srv.Client()
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	res, err := client.Do(r)
	require.NoError(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res, string(body)
}

// requireProblem holds a refusal to RFC 9457.
func requireProblem(t *testing.T, res *http.Response, body string, status int, field string) {
	t.Helper()
	require.Equal(t, status, res.StatusCode, body)
	require.Equal(t, "application/problem+json", res.Header.Get("Content-Type"))
	var p problem
	require.NoError(t, json.Unmarshal([]byte(body), &p))
	require.Equal(t, status, p.Status)
	require.NotEmpty(t, p.Title)
	require.NotEmpty(t, p.Detail)
	require.Equal(t, field, p.Field)
}

func TestGuard(t *testing.T) {
	const token = "s3cret-token"
	bearer := func(v string) http.Header { return http.Header{"Authorization": {v}} }
	for _, c := range []struct {
		name, method, host, path string
		header                   http.Header
		token                    string
		status                   int
		field                    string
	}{
		{name: "localhost", host: "localhost", status: 200},
		{name: "with a port", host: "LocalHost:1234", status: 200},
		{name: "IPv4", host: "127.0.0.1:80", status: 200},
		{name: "IPv6", host: "[::1]:80", status: 200},
		{name: "IPv6 without port", host: "[::1]", status: 200},
		{name: "configured", host: "orders.example:8080", status: 200},
		{name: "foreign", host: "evil.example:8080", status: 421, field: "Host"},
		{name: "foreign with a familiar start", host: "localhost.evil.example", status: 421, field: "Host"},
		{name: "foreign address", host: "10.0.0.1", status: 421, field: "Host"},
		{name: "foreign liveness", path: livenessPath, host: "evil.example", status: 421, field: "Host"},

		{name: "no token", token: token, status: 401, field: "Authorization"},
		{name: "right token", token: token, header: bearer("Bearer " + token), status: 200},
		{name: "scheme in any case", token: token, header: bearer("bearer " + token), status: 200},
		{name: "wrong token", token: token, header: bearer("Bearer " + token + "x"), status: 401, field: "Authorization"},
		{name: "empty token", token: token, header: bearer("Bearer "), status: 401, field: "Authorization"},
		{name: "other scheme", token: token, header: bearer("Basic " + token), status: 401, field: "Authorization"},
		{name: "liveness needs none", token: token, path: livenessPath, status: 200},
		{name: "readiness does", token: token, path: "/readyz", status: 401, field: "Authorization"},
		{name: "posting to liveness does", token: token, method: "POST", path: livenessPath, status: 401, field: "Authorization"},

		{name: "program posts", method: "POST", status: 200},
		{name: "own page posts", method: "POST", host: "localhost:80", header: http.Header{"Origin": {"http://localhost:80"}}, status: 200},
		{name: "foreign page posts", method: "POST", header: http.Header{"Origin": {"http://evil.example"}}, status: 403, field: "Origin"},
		{name: "foreign page posts, new browser", method: "POST", header: http.Header{"Sec-Fetch-Site": {"cross-site"}}, status: 403, field: "Origin"},
		{name: "foreign page reads", header: http.Header{"Sec-Fetch-Site": {"cross-site"}}, status: 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.method == "" {
				c.method = "GET"
			}
			if c.path == "" {
				c.path = "/"
			}
			if c.host == "" {
				c.host = "localhost"
			}
			h := Guard(http.HandlerFunc(ok), GuardOptions{Hosts: []string{"", "Orders.example"}, Token: c.token})
			res, body := do(t, h, c.method, c.path, c.host, c.header)
			require.NotContains(t, body, token)
			if c.status == http.StatusOK {
				require.Equal(t, c.status, res.StatusCode, body)
				return
			}
			requireProblem(t, res, body, c.status, c.field)
			require.Equal(t, c.status == 401, res.Header.Get("WWW-Authenticate") != "")
		})
	}
}

func TestCheckListen(t *testing.T) {
	for _, c := range []struct {
		addr, token string
		ok          bool
	}{
		{"127.0.0.1:8080", "", true},
		{"127.0.0.2:0", "", true},
		{"localhost:8080", "", true},
		{"[::1]:8080", "", true},
		{"[::ffff:127.0.0.1]:8080", "", true},
		{":8080", "", false},
		{"0.0.0.0:8080", "", false},
		{"[::]:8080", "", false},
		{"192.168.1.5:8080", "", false},
		{"orders.example:8080", "", false},
		{"0.0.0.0:8080", "s3cret", true},
		{"127.0.0.1:8080", "s3cret", true},
		{"127.0.0.1:8080", "s3 cret", false},
		{"0.0.0.0:8080", "s3cret\n", false},
		{"8080", "", false},
		{"127.0.0.1", "", false},
	} {
		t.Run(c.addr+" "+c.token, func(t *testing.T) {
			err := CheckListen(c.addr, c.token)
			if c.ok {
				require.NoError(t, err)
				return
			}
			var refused *ListenError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, c.addr, refused.Addr)
			require.NotEmpty(t, refused.Hint)
			require.NotContains(t, err.Error(), "s3")
		})
	}
}

func TestMux(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /things/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == "0" {
			Problem(w, http.StatusNotFound, "No such thing", "it never was", "id")
			return
		}
		JSON(w, http.StatusOK, r.PathValue("id"))
	})
	h := Mux(mux)

	res, body := do(t, h, "GET", "/things/7", "", nil)
	require.Equal(t, 200, res.StatusCode)
	require.Equal(t, "\"7\"\n", body)
	res, body = do(t, h, "GET", "/things/0", "", nil)
	requireProblem(t, res, body, 404, "id")
	res, body = do(t, h, "GET", "/other", "", nil)
	requireProblem(t, res, body, 404, "")
	res, body = do(t, h, "DELETE", "/things/7", "", nil)
	requireProblem(t, res, body, 405, "")
	require.Equal(t, "GET, HEAD", res.Header.Get("Allow"))
	res, _ = do(t, h, "GET", "/x/../things/7", "", nil)
	require.Equal(t, "/things/7", res.Header.Get("Location"))
}

func TestRecover(t *testing.T) {
	var logged bytes.Buffer
	h := func(f http.HandlerFunc) http.Handler { return Recover(slog.New(slog.NewTextHandler(&logged, nil)), f) }

	res, body := do(t, h(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Etag", "stale")
		panic("boom")
	}), "GET", "/", "", nil)
	requireProblem(t, res, body, 500, "")
	require.NotContains(t, body, "boom")
	require.Empty(t, res.Header.Get("Etag"))
	require.Contains(t, logged.String(), "boom")
	require.Contains(t, logged.String(), "web_test.go")

	srv := httptest.NewServer(h(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("half"))
		http.NewResponseController(w).Flush()
		panic("boom")
	}))
	defer srv.Close()
	half, err := http.Get(srv.URL)
	require.NoError(t, err)
	defer half.Body.Close()
	_, err = io.ReadAll(half.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestHealth(t *testing.T) {
	var reasons []string
	mux := http.NewServeMux()
	Health(mux, func(context.Context) []string { return reasons })

	res, body := do(t, mux, "GET", "/readyz", "", nil)
	require.Equal(t, 200, res.StatusCode)
	require.JSONEq(t, `{"ready":true,"reasons":[]}`, body)
	reasons = []string{"the broker is starting"}
	res, body = do(t, mux, "GET", "/readyz", "", nil)
	require.Equal(t, 503, res.StatusCode)
	require.JSONEq(t, `{"ready":false,"reasons":["the broker is starting"]}`, body)
	res, _ = do(t, mux, "GET", "/healthz", "", nil)
	require.Equal(t, 200, res.StatusCode)
}

// TestServe stops a server while a request is in flight.
func TestServe(t *testing.T) {
	for _, c := range []struct {
		name     string
		drain    time.Duration
		finishes bool
	}{
		{"a request that ends is waited for", time.Minute, true},
		{"a request that does not is cut off", time.Millisecond, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			entered, release := make(chan struct{}), make(chan struct{})
			cut := make(chan struct{})
			handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				close(entered)
				select {
				case <-release:
					ok(w, r)
				case <-r.Context().Done():
					close(cut)
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			stopped, answered := make(chan error, 1), make(chan error, 1)
			go func() { stopped <- Serve(ctx, ln, handler, c.drain) }()
			go func() {
				res, err := http.Get("http://" + ln.Addr().String())
				if err == nil {
					err = res.Body.Close()
				}
				answered <- err
			}()
			<-entered
			cancel()
			if c.finishes {
				close(release)
				require.NoError(t, <-stopped)
				require.NoError(t, <-answered)
				return
			}
			require.ErrorIs(t, <-stopped, context.DeadlineExceeded)
			require.Error(t, <-answered)
			<-cut
		})
	}
}

// TestServeBrokenListener reports a listener that fails by itself.
func TestServeBrokenListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	require.ErrorIs(t, Serve(t.Context(), ln, http.HandlerFunc(ok), time.Second), net.ErrClosed)
}

// TestServeUnusedConnection holds a connection open on which no request was
// sent; a stop must neither wait for it nor report it.
func TestServeUnusedConnection(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() {
		stopped <- Serve(ctx, signalling{ln, accepted, new(atomic.Int32)}, http.HandlerFunc(ok), time.Minute)
	}()
	conn, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	<-accepted
	start := time.Now()
	cancel()
	require.NoError(t, <-stopped)
	require.Less(t, time.Since(start), 4*time.Second)
}

// signalling closes accepted when the server comes back for another
// connection: it knows the first by then.
type signalling struct {
	net.Listener
	accepted chan struct{}
	calls    *atomic.Int32
}

func (s signalling) Accept() (net.Conn, error) {
	if s.calls.Add(1) == 2 {
		close(s.accepted)
	}
	return s.Listener.Accept()
}
