package api

import (
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
)

// Allowed reports whether a request has a method that its path takes; else the answer's header says which these are.
// Where GET is taken, so is HEAD.
func Allowed(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if at := slices.Index(methods, http.MethodGet); at >= 0 {
		methods = slices.Insert(slices.Clone(methods), at+1, http.MethodHead)
	}
	if slices.Contains(methods, r.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	return false
}

// WrongMethod is the error of a request that [Allowed] does not let pass.
func WrongMethod(r *http.Request, methods ...string) *Error {
	return Errorf(CodeWrongMethod, "%s takes %s, not %s", r.URL.Path, strings.Join(methods, " or "), shorten(r.Method))
}

// ReadBody reads a request's body.
func ReadBody(w http.ResponseWriter, r *http.Request) ([]byte, *Error) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody))
	var large *http.MaxBytesError
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, &large):
		return nil, Errorf(CodeTooLarge,
			"the request has more than %d bytes (8 MiB); ask with hashes instead of tokens, or for a part at a time",
			MaxBody)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, Errorf(CodeRequestTimeout, "of the body %d bytes came in time, and not its end", len(body))
	}
	return nil, Errorf(CodeMalformed, "the body ends too early, after %d bytes", len(body))
}

// WriteReply answers a request.
func WriteReply(w http.ResponseWriter, contentType string, body []byte, status int) error {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}
