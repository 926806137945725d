package upkeep

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/base/usage"
)

// maxProbeText limits the text of an answer, in bytes.
const maxProbeText = 512

// Probed is the answer of a health endpoint, in the form of the JSON output.
type Probed struct {
	URL    string `json:"url"` // without a password
	Status int    `json:"status"`
	Text   string `json:"text"` // start of the body
}

// Failure returns an error unless the status is 200.
func (p *Probed) Failure() error {
	if p.Status == http.StatusOK {
		return nil
	}
	return fmt.Errorf("%s: %d %s: %s", p.URL, p.Status, http.StatusText(p.Status), p.Text)
}

// Probe sends a GET to a health endpoint.
func Probe(ctx context.Context, url string) (*Probed, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil { // err contains the URL, which may have a password
		return nil, usage.Errorf("%q cannot be read as a URL", natsurl.Shown(url))
	}
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer reply.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(reply.Body, maxProbeText)) // the status is the answer
	return &Probed{req.URL.Redacted(), reply.StatusCode, strings.TrimSpace(string(text))}, nil
}
