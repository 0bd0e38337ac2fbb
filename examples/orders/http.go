package orders

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"outlog/internal/web"
	"outlog/store"
)

const (
	maxBodyBytes = 1 << 20
	keyHeader    = "Idempotency-Key"
	retryAfter   = "1" // seconds
)

// Routes adds the service to mux:
//
//	POST /orders              201 Receipt
//	POST /orders/{id}/cancel  200 Receipt
//	GET  /orders/{id}         200 View; ?wait=2s waits for the consumers
//
// Everything else is answered with a problem document; see fail.
func (s *Service) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /orders", s.servePlace)
	mux.HandleFunc("POST /orders/{id}/cancel", s.serveCancel)
	mux.HandleFunc("GET /orders/{id}", s.serveShow)
}

func (s *Service) servePlace(w http.ResponseWriter, r *http.Request) {
	receipt, err := func() (Receipt, error) {
		key, err := idempotencyKey(r)
		if err != nil {
			return Receipt{}, err
		}
		if err := checkContentType(r); err != nil {
			return Receipt{}, err
		}
		body, err := readBody(w, r)
		if err != nil {
			return Receipt{}, err
		}
		order, err := parseOrder(body)
		if err != nil {
			return Receipt{}, err
		}
		return s.Place(r.Context(), key, order)
	}()
	s.answer(w, r, http.StatusCreated, receipt, err)
}

func (s *Service) serveCancel(w http.ResponseWriter, r *http.Request) {
	receipt, err := func() (Receipt, error) {
		key, err := idempotencyKey(r)
		if err != nil {
			return Receipt{}, err
		}
		body, err := readBody(w, r)
		if err != nil {
			return Receipt{}, err
		}
		if len(body) > 0 {
			if err := checkContentType(r); err != nil {
				return Receipt{}, err
			}
		}
		if err := parseEmpty(body); err != nil {
			return Receipt{}, err
		}
		return s.Cancel(r.Context(), key, r.PathValue("id"))
	}()
	s.answer(w, r, http.StatusOK, receipt, err)
}

func (s *Service) serveShow(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if err := s.waitFor(r, id); err != nil {
		s.fail(w, r, err)
		return
	}
	view, err := s.Show(r.Context(), id)
	s.answer(w, r, http.StatusOK, view, err)
}

func (s *Service) answer(w http.ResponseWriter, r *http.Request, status int, v any, err error) {
	if err != nil {
		s.fail(w, r, err)
		return
	}
	web.JSON(w, status, v)
}

// fail answers with the problem that err is.
func (s *Service) fail(w http.ResponseWriter, r *http.Request, err error) {
	input, isInput := errors.AsType[*InputError](err)
	switch {
	case isInput:
		web.Problem(w, input.Status, "", input.Error(), input.Field)
	case errors.Is(err, ErrNotFound):
		web.Problem(w, http.StatusNotFound, "", err.Error(), "id")
	case errors.Is(err, ErrCancelled):
		web.Problem(w, http.StatusConflict, "", err.Error(), "id")
	case errors.Is(err, ErrKeyReused):
		web.Problem(w, http.StatusUnprocessableEntity, "", err.Error()+": use a new one", keyHeader)
	case store.IsUnavailable(err), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		detail := "the database does not answer now; nothing was lost, send the request again with the same " + keyHeader
		if store.IsFull(err) {
			detail = "the disk is full; nothing can be written until there is space"
		}
		w.Header().Set("Retry-After", retryAfter)
		web.Problem(w, http.StatusServiceUnavailable, "", detail, "")
	default:
		s.log.Error("request failed", "method", r.Method, "path", r.URL.Path, "error", err)
		web.Problem(w, http.StatusInternalServerError, "", "the server's log says more", "")
	}
}

// idempotencyKey returns the request's key, "" if it has none.
func idempotencyKey(r *http.Request) (string, error) {
	switch keys := r.Header.Values(keyHeader); {
	case len(keys) == 0:
		return "", nil
	case len(keys) > 1:
		return "", refuse(keyHeader, "is there twice")
	case keys[0] == "":
		return "", refuse(keyHeader, "must not be empty")
	default:
		return keys[0], nil
	}
}

// checkContentType refuses what is not JSON: forms are what a page of another
// origin can send without asking.
func checkContentType(r *http.Request) error {
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	charset, given := params["charset"]
	if err != nil || media != "application/json" || given && !strings.EqualFold(charset, "utf-8") {
		return &InputError{http.StatusUnsupportedMediaType, "Content-Type", "must be application/json, in UTF-8"}
	}
	return nil
}

func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return nil, &InputError{http.StatusRequestEntityTooLarge, "body", fmt.Sprintf("is over %d bytes", maxBodyBytes)}
	}
	if err != nil {
		return nil, refuse("body", "could not be read to its end")
	}
	return body, nil
}
