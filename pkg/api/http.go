package api

import (
	"errors"
	"io"
	"net/http"
	"os"
)

// Allowed reports whether a request has the method that a path takes; else the answer's header says which that is.
// Where GET is taken, so is HEAD.
func Allowed(w http.ResponseWriter, r *http.Request, method string) bool {
	if r.Method == method || r.Method == http.MethodHead && method == http.MethodGet {
		return true
	}
	if method == http.MethodGet {
		method += ", " + http.MethodHead
	}
	w.Header().Set("Allow", method)
	return false
}

// WrongMethod is the error of a request that [Allowed] does not let pass.
func WrongMethod(r *http.Request, method string) *Error {
	return Errorf(CodeWrongMethod, "%s takes %s, not %s", r.URL.Path, method, shorten(r.Method))
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
