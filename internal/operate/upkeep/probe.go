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

// maxProbeText limits the printed text of a refusal, in bytes.
const maxProbeText = 512

// Probe sends a GET to a health endpoint, and returns an error unless the status of the answer is 200.
func Probe(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil { // err contains the URL, which may have a password
		return usage.Errorf("%q cannot be read as a URL", natsurl.Shown(url))
	}
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if reply.StatusCode == http.StatusOK {
		return nil
	}
	text, _ := io.ReadAll(io.LimitReader(reply.Body, maxProbeText))
	return fmt.Errorf("%s: %s: %s", req.URL.Redacted(), reply.Status, strings.TrimSpace(string(text)))
}
