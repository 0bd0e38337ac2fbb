// Package web is what every HTTP handler of the program stands behind: who may
// ask (guard.go, listen.go), how a refusal looks (problem.go, mux.go), what
// happens when a handler panics (recover.go), and how a server begins and ends
// (serve.go, health.go).
//
// # Invariants, each with its guard
//
//  1. No request with a foreign Host header reaches a handler: a web page that
//     points its own name at 127.0.0.1 gets nothing (TestGuard).
//  2. No server listens off loopback without a token (TestCheckListen), and
//     with a token no request without it reaches a handler, GET /healthz
//     excepted (TestGuard).
//  3. No request that a page of another origin sent changes anything
//     (TestGuard).
//  4. Every refusal is application/problem+json (TestMux, TestRecover).
//  5. The token is never logged and never sent (TestGuard).
//
// A handler is usually built as
//
//	web.Recover(log, web.Guard(web.Mux(mux), options))
package web
