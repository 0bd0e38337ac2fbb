package web

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// ListenError is returned by CheckListen when a server must not listen on
// Addr; the caller should show it and give up.
type ListenError struct {
	Addr   string
	Reason string
	Hint   string // what to do instead
}

func (e *ListenError) Error() string {
	return fmt.Sprintf("listen on %q: %s; %s", e.Addr, e.Reason, e.Hint)
}

// CheckListen refuses, with a *ListenError, to listen on an address off
// loopback without a token: everybody on the network could place orders and
// read the log. Names other than localhost count as off loopback, whatever they
// resolve to now. It also refuses a token that no client could send.
func CheckListen(addr, token string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return &ListenError{addr, "not host:port", "try 127.0.0.1:8080"}
	}
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return &ListenError{addr, "the token has characters that do not fit into a header",
			"use printable ASCII without spaces"} // the token itself stays out of messages
	}
	if token == "" && !isLoopback(host) {
		return &ListenError{addr, "off loopback a token is required, and none is set",
			"set a token (OUTLOG_TOKEN) or listen on 127.0.0.1"}
	}
	return nil
}

// isLoopback reports whether only this machine can reach host. The empty host
// is every interface.
func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
