package web

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"strings"
)

// GuardOptions configures Guard. The zero value lets requests to loopback names
// pass, without a token.
type GuardOptions struct {
	// Hosts are the names, besides localhost, 127.0.0.1 and [::1], that
	// requests may ask for in their Host header, without a port. Empty ones
	// are ignored.
	Hosts []string
	// Token, when not empty, must come with every request except
	// GET /healthz, as "Authorization: Bearer <token>". See CheckListen.
	Token string
}

// Guard lets a request through to next when
//
//   - its Host header names this machine as it is known (else 421): a page
//     whose own domain points at 127.0.0.1 sends its own name;
//   - it carries the token, if there is one (else 401), compared in constant
//     time;
//   - it is not a request of a page of another origin that could change
//     something (else 403).
func Guard(next http.Handler, o GuardOptions) http.Handler {
	cross := http.NewCrossOriginProtection()
	cross.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		Problem(w, http.StatusForbidden, "Cross-origin request", "a page of another origin may not do this", "Origin")
	}))
	inner := cross.Handler(next)
	hosts := allowedHosts(o.Hosts)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !hosts[hostName(r.Host)]:
			Problem(w, http.StatusMisdirectedRequest, "", "this server does not answer for that host name", "Host")
		case o.Token != "" && !isLiveness(r) && !hasToken(r, o.Token):
			w.Header().Set("WWW-Authenticate", `Bearer realm="outlog"`)
			Problem(w, http.StatusUnauthorized, "", "send the token as Authorization: Bearer <token>", "Authorization")
		default:
			inner.ServeHTTP(w, r)
		}
	})
}

func allowedHosts(more []string) map[string]bool {
	hosts := map[string]bool{"localhost": true, "127.0.0.1": true, "::1": true}
	for _, h := range more {
		if h = hostName(h); h != "" {
			hosts[h] = true
		}
	}
	return hosts
}

// hostName is a Host header without port and brackets, in lower case.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		host = host[1 : len(host)-1]
	}
	return strings.ToLower(host)
}

// isLiveness excepts the one answer that says nothing but that the process
// serves: supervisors ask for it and need not know the token.
func isLiveness(r *http.Request) bool {
	return r.URL.Path == livenessPath && (r.Method == http.MethodGet || r.Method == http.MethodHead)
}

// hasToken compares digests: comparing the strings would take a time that
// depends on the token's length.
func hasToken(r *http.Request, token string) bool {
	scheme, sent, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return false
	}
	got, want := sha256.Sum256([]byte(strings.TrimSpace(sent))), sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}
