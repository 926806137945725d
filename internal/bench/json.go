package bench

import (
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
)

// flat is a report as programs read it: one level, with the names that bench/peers uses for every index.
type flat struct {
	Index   string `json:"index"`
	Corpus  string `json:"corpus"`
	Mode    Mode   `json:"mode"`
	Writers int    `json:"writers"`
	Readers int    `json:"readers"`

	BlocksPerS       float64 `json:"blocks_per_s,omitempty"`
	BlocksPerSSecond float64 `json:"blocks_per_s_second,omitempty"`
	P50              float64 `json:"p50_us,omitempty"`
	P99              float64 `json:"p99_us,omitempty"`
	P999             float64 `json:"p999_us,omitempty"`
	Max              float64 `json:"max_us,omitempty"`
	QueriesPerS      float64 `json:"queries_per_s,omitempty"`
	Seconds          float64 `json:"seconds,omitempty"`
	Digest           string  `json:"digest,omitempty"`
	Expected         string  `json:"expected_digest,omitempty"`
	Holdings         int64   `json:"holdings,omitempty"`
	BytesPerHolding  float64 `json:"bytes_per_holding,omitempty"`
	Counted          float64 `json:"counted_bytes_per_holding,omitempty"`
	Image            *Image  `json:"image,omitempty"`
}

// printJSON writes the report as one JSON object.
func (r *Report) printJSON(w io.Writer) error {
	f := flat{
		Index: "kvatlas", Corpus: strings.TrimSuffix(filepath.Base(r.Corpus), filepath.Ext(r.Corpus)), Mode: r.Mode, Writers: r.Writers, Readers: r.Readers,
		QueriesPerS: r.QueriesPerSec, Seconds: r.Seconds, Digest: r.Digest, Expected: r.Expected,
		Holdings: r.Holdings, BytesPerHolding: r.BytesPerHolding, Counted: r.Counted, Image: r.Image,
	}
	if len(r.Passes) > 0 {
		f.BlocksPerS = r.Passes[0].BlocksPerSec
	}
	if len(r.Passes) > 1 {
		f.BlocksPerSSecond = r.Passes[1].BlocksPerSec
	}
	if l := r.Latency; l != nil {
		f.P50, f.P99, f.P999, f.Max = l.P50, l.P99, l.P999, l.Max
	}
	return json.NewEncoder(w).Encode(f)
}
